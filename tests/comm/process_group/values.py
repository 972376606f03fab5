"""Values that ranks give to collectives, and the results that torch documents.

A rank's values are drawn from its number, so that every rank can compute all results.
"""

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

OP = dist.ReduceOp
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
SHAPES = [(), (0,), (1,), (7, 3), (33_001,)]  # The last is large in any type.
# torch has no arithmetic for float8: it is reduced in float32.
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


def drawn(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw the values of `rank`, small so that sums and products of integers are exact."""
    source = torch.Generator().manual_seed(1000 * rank + sum(shape))
    if dtype == torch.bool:
        return torch.rand(list(shape), generator=source) < 0.5
    if dtype.is_complex:
        parts = torch.randn([*shape, 2], generator=source, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(list(shape), generator=source).to(dtype)
    return torch.randint(0, 4, list(shape), generator=source).to(dtype)


@cache
def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Draw the values of all ranks, which callers leave as they are."""
    return [drawn(rank, shape, dtype) for rank in range(SIZE)]


def expected(tensors: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Compute the reduction that torch documents, in a more precise type."""
    dtype = tensors[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    if dtype == torch.bool:
        wide = torch.bool
    if dtype.is_complex:
        wide = torch.complex128
    values = [tensor.to(wide) for tensor in tensors]
    folds: dict[Any, Callable[[Any, Any], Any]] = {
        OP.SUM: torch.add,
        OP.AVG: torch.add,
        OP.PRODUCT: torch.mul,
        OP.MIN: torch.minimum,
        OP.MAX: torch.maximum,
        OP.BAND: torch.bitwise_and,
        OP.BOR: torch.bitwise_or,
        OP.BXOR: torch.bitwise_xor,
    }
    total = reduce(folds[op], values)
    if op == OP.AVG:
        whole = not (dtype.is_floating_point or dtype.is_complex)
        total = torch.div(total, len(tensors), rounding_mode="trunc" if whole else None)
    return total.to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.dtype in NARROW:
        got, wanted = got.float(), wanted.float()
        return torch.allclose(got, wanted, rtol=0.26, atol=0.05)
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return torch.equal(got, wanted)
    # At most one unit in the last place, also in half precision.
    digits = torch.finfo(got.dtype).eps * (1 if got.dtype.itemsize == 2 else 16)
    return torch.allclose(got, wanted, rtol=digits, atol=digits)


def same_everywhere(tensor: torch.Tensor) -> bool:
    """True if all ranks hold the same bytes. Compares them without the group under test."""
    return len(set(MPI.COMM_WORLD.allgather(bytes_of(tensor).numpy().tobytes()))) == 1


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor that is not contiguous."""
    room = torch.zeros([*tensor.shape, 2], dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error  # noqa: PT017 - runs without pytest
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")


def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.shape == wanted.shape and torch.equal(bytes_of(got), bytes_of(wanted))


def ring(given: torch.Tensor) -> torch.Tensor:
    """Start sending to the right and receiving from the left."""
    got = torch.zeros_like(given)
    ops = [
        dist.P2POp(dist.irecv, got, (RANK - 1) % SIZE),
        dist.P2POp(dist.isend, given, (RANK + 1) % SIZE),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got

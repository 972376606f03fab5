"""Types x layouts x operations of torch.distributed on MPI, against numpy; run under mpirun.

Every cell equals numpy's result or is refused in one line, on all ranks, which can go on after it.
Values are small and exact in every type; rank 1 has NaN and infinities. The groups are all ranks
and the first two of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from mpi4py import MPI

from dlio.comm import Communicator, world
from dlio.comm.process_group import init_process_group
from dlio.comm.torchdist import torch_world
from dlio.exchange.buckets import broadcast_tensors
from dlio.integrations.objects import broadcast_object, gather_tensor

OP: Final = dist.ReduceOp
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX: Final = (torch.complex64, torch.complex128)
DTYPES: Final = (*FLOATS, *WHOLE, torch.bool, *COMPLEX)
OPS: Final[dict[str, Any]] = {
    "sum": OP.SUM, "mean": OP.AVG, "max": OP.MAX, "min": OP.MIN, "prod": OP.PRODUCT
}  # fmt: skip
LARGE: Final = 20_001
"""Elements of a tensor that is reduced in pieces, in types of 16 bits."""

Array = npt.NDArray[Any]
Layout = Callable[[torch.Tensor], torch.Tensor]


def _windowed(t: torch.Tensor) -> torch.Tensor:
    """A slice of larger memory, at an offset, every second column."""
    whole = torch.zeros(t.shape[0] + 2, 2 * t.shape[1], dtype=t.dtype)
    whole[1:-1, ::2] = t
    return whole[1:-1, ::2]


def _expanded(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand(t.shape)


def _negated(t: torch.Tensor) -> torch.Tensor:
    """The values behind torch's lazy negation, or for complex numbers behind a lazy conjugate."""
    return t.conj().resolve_conj().conj() if t.is_complex() else t.neg()._neg_view()


LAYOUTS: Final[dict[str, Layout]] = {
    "contiguous": torch.clone,
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": _windowed,
    "channels_last": lambda t: t.view(2, 2, 3, 2).contiguous(memory_format=torch.channels_last),
    "lazy": _negated,
    "expanded": _expanded,
    "empty": lambda t: t[:0].clone(),
    "scalar": lambda t: t[0, 0].clone(),
    "large": lambda t: t.reshape(-1).repeat(LARGE // t.numel() + 1)[:LARGE].clone(),
    "sparse": lambda t: t.to_sparse(),
}


def drawn(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw a rank's values; shape (4, 6)."""
    source = np.random.default_rng(rank)
    if dtype == torch.bool:
        return torch.from_numpy(source.random((4, 6)) < 0.5)
    if dtype in WHOLE:
        # Sums of two ranks leave 8 bits.
        low, high = (0, 250) if dtype == torch.uint8 else (-120, 120)
        return torch.from_numpy(source.integers(low, high, (4, 6))).to(dtype)
    values = source.integers(-6, 7, (4, 6)) / 2
    if dtype.is_complex:
        return torch.from_numpy(values + 1j * source.integers(-6, 7, (4, 6)) / 2).to(dtype)
    if rank == 1:
        values[0, :4] = np.nan, np.inf, -np.inf, -np.nan
    elif rank == 0:
        values[0, 1:4] = -np.inf, np.nan, 1
    return torch.from_numpy(values).to(dtype)


def plain(tensor: torch.Tensor) -> Array:
    """The values as numpy's, those of 16 bits in float32."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    array: Array = (tensor.float() if tensor.dtype.itemsize == 2 and tensor.is_floating_point()
                    else tensor).numpy()  # fmt: skip
    return array


def wanted(op: str, arrays: list[Array], dtype: torch.dtype) -> Array:
    """Return numpy's reduction over ranks; the mean of integers is rounded towards zero."""
    folds = {
        "sum": np.add,
        "mean": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "prod": np.multiply,
    }
    with np.errstate(invalid="ignore"):
        if op == "mean":
            wide = arrays if arrays[0].dtype.kind in "fc" else [a.astype(np.int64) for a in arrays]
            total = reduce(np.add, wide)
            total = total / len(arrays)
            total = np.trunc(total) if wide[0].dtype.kind == "i" else total
        else:
            total = reduce(folds[op], arrays)
    return plain(torch.as_tensor(total).to(dtype))


Cell = Callable[[], tuple[list[torch.Tensor], list[Array]]]
"""Run a collective; return the tensors that it filled, and numpy's values of them."""


class Collectives:
    """The operations of one group, on tensors of one type and layout."""

    def __init__(self, group: Any, size: int, dtype: torch.dtype, layout: Layout) -> None:
        self.group, self.size, self.dtype, self.layout = group, size, dtype, layout
        self.inputs = [plain(layout(drawn(rank, dtype))) for rank in range(size)]
        self.rows = [[drawn(10 * r + k, dtype) for k in range(size)] for r in range(size)]
        """By rank, a tensor for each rank."""

    def mine(self) -> torch.Tensor:
        return self.layout(drawn(RANK, self.dtype))

    def blank(self) -> torch.Tensor:
        return self.layout(torch.zeros(4, 6, dtype=self.dtype))

    def blanks(self) -> list[torch.Tensor]:
        return [self.blank() for _ in range(self.size)]

    def each(self) -> Iterator[tuple[str, Cell]]:
        reductions = self.all_reduce, self.reduce, self.reduce_scatter, self.reduce_scatter_tensor
        for call, op in product(reductions, OPS):
            yield f"{call.__name__} {op}", partial(call, op)
        for name in (
            "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
            "all_to_all_single", "send_recv",
        ):  # fmt: skip
            yield name, getattr(self, name)

    def all_reduce(self, op: str) -> tuple[list[torch.Tensor], list[Array]]:
        mine = self.mine()
        dist.all_reduce(mine, OPS[op], self.group)
        return [mine], [wanted(op, self.inputs, self.dtype)]

    def reduce(self, op: str) -> tuple[list[torch.Tensor], list[Array]]:
        mine, root = self.mine(), self.size - 1
        dist.reduce(mine, root, OPS[op], self.group)
        kept = self.inputs[RANK] if root != RANK else wanted(op, self.inputs, self.dtype)
        return [mine], [kept]

    def reduce_scatter(self, op: str) -> tuple[list[torch.Tensor], list[Array]]:
        out = self.blank()
        dist.reduce_scatter(out, [self.layout(t) for t in self.rows[RANK]], OPS[op], self.group)
        column = [plain(self.layout(row[RANK])) for row in self.rows]
        return [out], [wanted(op, column, self.dtype)]

    def reduce_scatter_tensor(self, op: str) -> tuple[list[torch.Tensor], list[Array]]:
        out = self.layout(torch.zeros(4, 6, dtype=self.dtype))
        given = self.table(self.rows[RANK])
        dist.reduce_scatter_tensor(out, given, OPS[op], self.group)
        column = [plain(self.layout(row[RANK])) for row in self.rows]
        return [out], [wanted(op, column, self.dtype)]

    def table(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Rows as one tensor of the layout of each."""
        parts = [self.layout(row) for row in rows]
        whole = torch.stack(parts)
        if whole.layout == torch.strided and whole.dim() == 3 and not parts[0].is_contiguous():
            return whole.transpose(1, 2).contiguous().transpose(1, 2)
        return whole

    def broadcast(self) -> tuple[list[torch.Tensor], list[Array]]:
        mine, root = self.mine(), self.size - 1
        dist.broadcast(mine, root, self.group)
        return [mine], [self.inputs[root]]

    def all_gather(self) -> tuple[list[torch.Tensor], list[Array]]:
        outputs = self.blanks()
        dist.all_gather(outputs, self.mine(), self.group)
        return outputs, self.inputs

    def all_gather_into_tensor(self) -> tuple[list[torch.Tensor], list[Array]]:
        out = self.table([torch.zeros(4, 6, dtype=self.dtype)] * self.size)
        dist.all_gather_into_tensor(out, self.mine(), self.group)
        return list(out), self.inputs

    def gather(self) -> tuple[list[torch.Tensor], list[Array]]:
        # The root alone sees these, and cannot refuse them for all ranks.
        outputs, root = [torch.zeros(t.shape, dtype=t.dtype) for t in self.blanks()], self.size - 1
        dist.gather(self.mine(), outputs if root == RANK else None, root, self.group)
        return (outputs, self.inputs) if root == RANK else ([], [])

    def scatter(self) -> tuple[list[torch.Tensor], list[Array]]:
        out, root = self.blank(), self.size - 1
        given = [self.layout(t) for t in self.rows[root]]
        dist.scatter(out, given if root == RANK else None, root, self.group)
        return [out], [plain(given[RANK])]

    def all_to_all(self) -> tuple[list[torch.Tensor], list[Array]]:
        outputs = self.blanks()
        dist.all_to_all(outputs, [self.layout(t) for t in self.rows[RANK]], self.group)
        return outputs, [plain(self.layout(row[RANK])) for row in self.rows]

    def all_to_all_single(self) -> tuple[list[torch.Tensor], list[Array]]:
        out = self.table([torch.zeros(4, 6, dtype=self.dtype)] * self.size)
        dist.all_to_all_single(out, self.table(self.rows[RANK]), group=self.group)
        return list(out), [plain(self.layout(row[RANK])) for row in self.rows]

    def send_recv(self) -> tuple[list[torch.Tensor], list[Array]]:
        out, mine = self.blank(), self.mine()
        right, left = (RANK + 1) % self.size, (RANK - 1) % self.size
        works = [dist.irecv(out, left, self.group), dist.isend(mine, right, self.group)]
        for work in works:
            assert work is not None
            work.wait()
        return [out], [self.inputs[left]]


class Helpers(Collectives):
    """Calls of dlio's own that move tensors between the ranks of a communicator."""

    def __init__(self, comm: Communicator, dtype: torch.dtype, layout: Layout) -> None:
        super().__init__(None, comm.size, dtype, layout)
        self.comm = comm

    def each(self) -> Iterator[tuple[str, Cell]]:
        yield "broadcast_tensors", self.broadcast_tensors
        yield "broadcast_object", self.broadcast_object
        yield "gather_tensor", self.gather_tensor

    def broadcast_tensors(self) -> tuple[list[torch.Tensor], list[Array]]:
        mine, root = self.mine(), self.size - 1
        broadcast_tensors([mine], self.comm, root)
        return [mine], [self.inputs[root]]

    def broadcast_object(self) -> tuple[list[torch.Tensor], list[Array]]:
        got, root = broadcast_object(self.mine(), self.comm, self.size - 1), self.size - 1
        assert isinstance(got, torch.Tensor)
        return [got], [self.inputs[root]]

    def gather_tensor(self) -> tuple[list[torch.Tensor], list[Array]]:
        return list(gather_tensor(self.mine(), self.comm)), self.inputs


TORCHS: Final = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "scatter", "all_to_all",
    "send_recv",
)  # fmt: skip
"""Operations of which torch itself views complex numbers as real."""


def refusal(dtype: torch.dtype, layout: str, name: str) -> str:
    """Return a part of the line with which a cell is refused; nothing for one that is not."""
    call, _, op = name.partition(" ")
    if (
        layout == "sparse" and call == "reduce_scatter_tensor"
    ):  # Cut into parts before it is looked at.
        return "dense tensors"
    if dtype.is_complex and (op in ("max", "min") or (call, op) == ("all_reduce", "prod")):
        return "on complex tensors" if call == "all_reduce" else f"there is no {op.upper()} of"
    if dtype == torch.bool and op == "mean":
        return "AVG of torch.bool"
    if layout == "sparse":
        return "dense tensors"
    if layout == "expanded" and call not in (
        "gather",
        "all_gather_into_tensor",
        "all_to_all_single",
    ):
        return "share memory"
    if layout == "lazy" and dtype.is_complex and call in TORCHS:
        return "resolve_conj"
    return ""


def fault(cell: Cell, refused: str) -> str:
    """Return what is wrong with a cell, or nothing."""
    try:
        got, numpys = cell()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "" if refused and refused in text and "\n" not in text else text
    if refused:
        return f"not refused: {refused}"
    for tensor, array in zip(got, numpys, strict=True):
        mine = plain(tensor)
        close = np.allclose if mine.dtype.kind == "c" else np.array_equal
        if mine.shape != array.shape or not close(mine, array, equal_nan=mine.dtype.kind in "fc"):
            return f"{mine.reshape(-1)[:8]} where numpy has {array.reshape(-1)[:8]}"
    return ""


def tables(dtype: torch.dtype, layout: str) -> Iterator[tuple[str, Collectives]]:
    """Yield the name and the cells of each group that this rank is in."""
    everyone, first = dist.group.WORLD, _made("dlio-mpi", (0, 1))
    yield f"{SIZE} ranks", Collectives(everyone, SIZE, dtype, LAYOUTS[layout])
    if RANK < 2:
        yield "2 ranks", Collectives(first, 2, dtype, LAYOUTS[layout])
    if layout in ("sparse", "expanded"):
        return
    for name, comm in (("MPI", world()), ("gloo", _torchs())):
        yield f"{SIZE} ranks of {name}", Helpers(comm, dtype, LAYOUTS[layout])


@cache
def _torchs() -> Communicator:
    return torch_world(dist.new_group(backend="gloo"))


@cache
def _made(backend: str, ranks: tuple[int, ...]) -> Any:
    return dist.new_group(list(ranks), backend=backend)


def main() -> None:
    init_process_group(timeout_s=60)
    counts: Counter[bool] = Counter()
    faults = []
    for dtype in DTYPES:
        for layout in LAYOUTS:
            if layout == "lazy" and not (dtype.is_complex or dtype.is_floating_point):
                continue
            for group, calls in tables(dtype, layout):
                for name, cell in calls.each():
                    refused = refusal(dtype, layout, name)
                    counts[bool(refused)] += 1
                    if said := fault(cell, refused):
                        faults.append(f"{group}, {dtype}, {layout}, {name}: {said}")
    _torchs().close()
    dist.destroy_process_group()
    assert not faults, f"{len(faults)} of {counts.total()} cells: " + "; ".join(faults[:20])
    print(f"{counts[False]} cells equal numpy's, {counts[True]} are refused", flush=True)


if __name__ == "__main__":
    main()

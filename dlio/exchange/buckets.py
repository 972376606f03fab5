"""Parameters grouped into buckets, each with one flat buffer for messages."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.errors import UsageError

# Over 1 Gbit/s, 0.25 MiB and 4 MiB hid less of the exchange behind backward: small buckets cost
# messages, and a large one leaves late, because it waits for as many gradients.
BUCKET_BYTES = 1 << 20
Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names, in the model's order."""


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """The type of a parameter's gradient: its own, unless the script has chosen another."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)  # From torch 2.9 on.
    return chosen or parameter.dtype


def sum_type(parameter: torch.Tensor) -> torch.dtype:
    """The type in which a parameter or its gradient is summed: float64 if either is, else float32,
    and so are the two parts of a complex number.

    Float32 also for 16 bits: MPI libraries return garbage for sums of bfloat16, and sums in 16 bits
    would round at each hop.
    """
    types = (parameter.dtype, gradient_type(parameter))
    wide = torch.float64 in types or torch.complex128 in types
    return torch.float64 if wide else torch.float32


class Bucket:
    """Some parameters and one flat buffer with a view of each parameter's shape.

    The buffer has the widest `sum_type` of its parameters. It may have `extra` elements at its end,
    and be `pinned`, page-locked memory of the host. `array` and `bytes` require the host. Complex
    parameters, which have buckets of their own, are pairs of numbers in it.
    """

    def __init__(
        self,
        named: Named,
        extra: int = 0,
        device: torch.device | str | None = None,
        pinned: bool = False,
    ) -> None:
        self.tensors = [
            (name, (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape))
            for name, parameter in named
        ]
        """(name, shape) of the parameters in the order of the buffer."""
        self.parameters = parameters = [parameter for _, parameter in named]
        count = sum(map(_numbers, parameters))
        wide = torch.float64 in map(sum_type, parameters)
        # A script may have set another default type or device.
        self.flat = torch.zeros(
            count + extra,
            dtype=torch.float64 if wide else torch.float32,
            device=device or "cpu",
            pin_memory=pinned,
        )
        self.views = self._views()
        self._other: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def _views(self) -> list[torch.Tensor]:
        counts = [_numbers(parameter) for parameter in self.parameters]
        ends = np.cumsum(counts).tolist()
        views = [
            self.flat[end - count : end].view(shape)
            for (_, shape), count, end in zip(self.tensors, counts, ends, strict=True)
        ]
        return [
            torch.view_as_complex(view) if parameter.is_complex() else view
            for parameter, view in zip(self.parameters, views, strict=True)
        ]

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parameters into the buffer."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter)

    @torch.no_grad()
    def write(self) -> None:
        """Copy the buffer into the parameters."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.copy_(view)

    @property
    def is_narrow(self) -> bool:
        """True if a parameter has become float64 since, because the script has converted its model
        after it made the optimizer."""
        return self.flat.dtype is torch.float32 and any(
            parameter.dtype is torch.float64 for parameter in self.parameters
        )

    def take_over(self, narrower: "Bucket") -> None:
        """Continue with the values of a bucket of the same parameters in another type."""
        self.flat.copy_(narrower.flat)
        if narrower._other is not None:
            self.swap()
            self.flat.copy_(narrower.before)
            self.swap()

    def swap(self) -> None:
        """Continue in a second buffer; the next call returns to this one, whose contents stay."""
        before = (self.flat, self.views)
        if self._other is None:
            self.flat = torch.zeros_like(self.flat)
            self.views = self._views()
        else:
            self.flat, self.views = self._other
        self._other = before

    @property
    def before(self) -> torch.Tensor:
        """The buffer that was in use before the last `swap`."""
        assert self._other is not None
        return self._other[0]

    @property
    def array(self) -> npt.NDArray[np.floating]:
        """The buffer as a numpy array; shared memory."""
        array: npt.NDArray[np.floating] = self.flat.numpy()
        return array

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The buffer as bytes; shared memory."""
        return self.array.view(np.uint8)


def _numbers(parameter: torch.Tensor) -> int:
    """The real numbers in a tensor."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters that require gradients."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def has_shape(parameter: torch.Tensor) -> bool:
    """False for a parameter of a lazy module that has not computed yet."""
    return not nn.parameter.is_lazy(parameter)


def check_real(named: Named) -> None:
    """Raise UsageError for a complex parameter, for what computes with real numbers alone."""
    for name, parameter in named:
        if parameter.is_complex():
            raise UsageError(
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}: this exchange is of "
                "real numbers: take allreduce, or make it a real parameter with a last dimension "
                "of 2, and use torch.view_as_complex in the forward pass"
            )


def in_buckets(named: Named, fewest: int = 1) -> list[list[tuple[str, nn.Parameter]]]:
    """Group parameters into buckets of about 1 MiB, or at least into `fewest` smaller ones, in
    backward's order: the last one first. Those that are summed in another type have others, and so
    have complex ones.
    """
    sizes = [sum_type(parameter).itemsize * _numbers(parameter) for _, parameter in named]
    most = BUCKET_BYTES if fewest == 1 else max(1, min(BUCKET_BYTES, sum(sizes) // fewest))
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    filled: dict[tuple[torch.dtype, bool], tuple[int, int]] = {}
    """By type, and whether they are complex, the number of its last bucket, and the bytes in it."""
    for (name, parameter), size in zip(reversed(named), reversed(sizes), strict=True):
        kind = (sum_type(parameter), parameter.is_complex())
        number, full = filled.get(kind, (0, most))
        if full >= most:
            number, full = len(buckets), 0
            buckets.append([])
        buckets[number].append((name, parameter))
        filled[kind] = number, full + size
    return buckets


@torch.no_grad()
def broadcast_state(model: nn.Module, comm: Communicator) -> None:
    """Overwrite parameters and buffers with rank 0's. Collective."""
    broadcast_tensors(filter(has_shape, model.state_dict().values()), comm)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], comm: Communicator, root: int = 0) -> None:
    """Overwrite tensors with those of a rank, of any type, bit by bit. Collective."""
    for tensor in tensors:
        # Bytes, not numbers: a broadcast works for types that MPI does not have, such as bfloat16.
        mine = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        flat = mine.reshape(-1).view(torch.uint8)
        before = flat.clone()
        comm.bcast(flat.numpy(), root)
        # To autograd, a write changes the tensor: a backward of an earlier forward would fail.
        if not torch.equal(flat, before):
            tensor.copy_(mine)


@torch.no_grad()
def averaged_state(model: nn.Module, comm: Communicator) -> dict[str, torch.Tensor]:
    """Return the mean of the ranks' state dicts, on the host; integers are this rank's.
    Collective."""
    state: dict[str, Any] = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    if comm.size == 1:
        return state
    floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
    # float32 would round the mean of float64 weights; float64 for all would double the bytes.
    wide = any(state[name].dtype is torch.float64 for name in floats)
    kind = torch.float64 if wide else torch.float32
    flat = torch.cat([state[name].reshape(-1).to(kind) for name in floats])
    comm.wait([comm.iallreduce(flat.numpy())], "the mean of weights")
    flat /= comm.size
    at = 0
    for name in floats:
        count = state[name].numel()
        state[name] = flat[at : at + count].view(state[name].shape).to(state[name].dtype).clone()
        at += count
    return state


@torch.no_grad()
def consensus_distance(
    model: nn.Module, mean: dict[str, torch.Tensor], comm: Communicator
) -> float:
    """Return the root mean square over ranks and weights of the distance to `mean`. Collective."""
    sums = np.zeros(2)
    for name, parameter in model.named_parameters():
        kind = sum_type(parameter)
        apart = parameter.detach().cpu().to(kind) - mean[name].to(kind)
        sums[0] += float(apart.square().sum())
        sums[1] += parameter.numel()
    comm.wait([comm.iallreduce(sums)], "the consensus distance")
    return float(np.sqrt(sums[0] / max(1.0, sums[1])))

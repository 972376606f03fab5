"""Broadcast, gather and reduce small objects and tensors without pickle, for control flow."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Json
from dlio.comm.survival.recovery import uniform
from dlio.errors import UsageError

_DTYPES: Final = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}


def broadcast_object(value: object, comm: Communicator, root: int = 0) -> object:
    """Return `root`'s value on all ranks. Collective.

    Args:
        value: a tensor, or None, a bool, number, string or path, or a list, tuple or dictionary of
            these. On other ranks only a tensor's device is used.

    Raises UsageError, on all ranks, for any other type.
    """
    kind, text, shape, content = comm.tell(_described(value, comm.rank == root), root)
    if kind == "error":
        raise UsageError(text)
    if kind == "object":
        return value if comm.rank == root else unpacked(content)
    if comm.rank == root:
        assert isinstance(value, torch.Tensor)
        comm.bcast(_as_bytes(value), root)
        return value
    device = value.device if isinstance(value, torch.Tensor) else torch.device("cpu")
    return _of_root(torch.empty(shape, dtype=_DTYPES[text], device=device), comm, root)


def gather_tensor(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Stack all ranks' tensors of one shape; result shape (ranks, *shape). Collective."""
    return torch.stack([_of_root(tensor, comm, root) for root in range(comm.size)])


def gather_tensors(tensor: torch.Tensor, comm: Communicator) -> list[torch.Tensor]:
    """Return all ranks' tensors of one type; their shapes may differ. Collective."""
    shapes = comm.allgather(list(tensor.shape))
    return [
        _of_root(tensor if root == comm.rank else tensor.new_empty(shape), comm, root)
        for root, shape in enumerate(shapes)
    ]


def packed(value: object) -> Json:
    """Encode a value as JSON, with the type of each container.

    Raises UsageError for a type that has no such encoding.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return ["path", str(os.fspath(value))]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [packed(each) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[packed(key), packed(each)] for key, each in value.items()]]
    raise UsageError(
        f"cannot broadcast a value of type {type(value).__name__}: give a tensor, or numbers, "
        "strings and lists, tuples and dictionaries of them"
    )


def unpacked(value: Json) -> object:
    """Decode the result of `packed`."""
    if value is None or isinstance(value, (bool, int, float, str, Mapping)):
        return value
    kind, content = value
    if kind == "path":
        return Path(str(content))
    assert isinstance(content, list)
    if kind == "dict":
        return {unpacked(key): unpacked(each) for key, each in content}
    members = [unpacked(each) for each in content]
    return members if kind == "list" else tuple(members)


def _described(value: object, mine: bool) -> tuple[str, str, list[int], Json]:
    """Describe the root's value: (kind, dtype or error, shape, content)."""
    if not mine:
        return "", "", [], None
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype).removeprefix("torch."), list(value.shape), None
    try:
        return "object", "", [], packed(value)
    except UsageError as error:
        return "error", str(error), [], None


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Copy a tensor's bytes to the host; shape (bytes,)."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def _of_root(like: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    """Return `root`'s tensor, of the type, shape and device of this rank's. Collective."""
    theirs = like.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    comm.bcast(theirs.reshape(-1).view(torch.uint8).numpy(), root)
    return theirs.to(like.device)


REDUCED: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "mean": lambda rows: rows.mean(0),
    "avg": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0),
}
"""By name, the reduction of the rows of all ranks."""


class AllGather(torch.autograd.Function):
    """An all-gather with gradients: backward sums each tensor's gradients on its own rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
        rows = uniform(comm, lambda: gather_tensor(tensor, comm))
        ctx.comm, ctx.row = comm, comm.rank
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        mine = uniform(ctx.comm, lambda: gather_tensor(gradients[0], ctx.comm))
        return mine.sum(0)[ctx.row], None  # Ranks may have other numbers by now.

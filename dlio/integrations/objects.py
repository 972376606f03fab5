"""Small objects and tensors from rank to rank, without pickle: what a framework's control wants."""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dlio.comm import Communicator, Json
from dlio.errors import UsageError

_DTYPES: Final = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}


def broadcast_object(value: Any, comm: Communicator, root: int = 0) -> Any:
    """`root`'s value: a tensor, or None, truth values, numbers, text, paths, and lists, tuples and
    dictionaries of these. Collective.

    Raises UsageError, on all ranks, for anything else.
    """
    head: Json = None
    if comm.rank == root:
        if isinstance(value, torch.Tensor):
            head = ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
        else:
            try:
                head = ["object", packed(value)]
            except UsageError as error:
                head = ["error", str(error)]
    told = comm.allgather(head)[root]
    if told[0] == "error":
        raise UsageError(told[1])
    if told[0] == "object":
        return value if comm.rank == root else unpacked(told[1])
    if comm.rank != root:
        device = value.device if isinstance(value, torch.Tensor) else torch.device("cpu")
        value = torch.empty(told[2], dtype=_DTYPES[told[1]], device=device)
    flat = _as_bytes(value)
    comm.bcast(flat, root)
    if comm.rank == root:
        return value
    return _as_tensor(flat, value)


def gather_tensor(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """All ranks' tensors of one shape, behind each other along a first dimension. Collective."""
    rows = []
    for root in range(comm.size):
        flat = _as_bytes(tensor)
        comm.bcast(flat, root)
        rows.append(_as_tensor(flat, tensor))
    return torch.stack(rows)


def packed(value: Any) -> Json:
    """As JSON, every container under its kind. Raises UsageError for what has no such form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return ["path", os.fspath(value)]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [packed(each) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[packed(key), packed(each)] for key, each in value.items()]]
    raise UsageError(
        f"a {type(value).__name__} cannot be told to other ranks: give a tensor, or numbers, text "
        "and lists, tuples and dictionaries of them"
    )


def unpacked(value: Json) -> Any:
    """What `packed` was given."""
    if not isinstance(value, list):
        return value
    kind, inside = value
    if kind == "path":
        return Path(inside)
    if kind == "dict":
        return {unpacked(key): unpacked(each) for key, each in inside}
    members = [unpacked(each) for each in inside]
    return members if kind == "list" else tuple(members)


def _as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A copy on the host."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    array: np.ndarray[Any, np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return array


def _as_tensor(flat: np.ndarray[Any, Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(flat).view(like.dtype).reshape(like.shape).to(like.device)

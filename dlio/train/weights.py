"""Weights of an earlier run as the beginning of another (`--weights`)."""

import os
import pickle

import torch
from torch import nn

from dlio.errors import UsageError

__all__ = ["load_weights", "read_weights"]


def read_weights(path: str, option: str = "--weights") -> dict[str, torch.Tensor]:
    """Read a file that `--save` has written.

    Raises UsageError if it cannot be read or is not such a file.
    """
    if not os.path.isfile(path):
        raise UsageError(f"{option} {path}: the file does not exist: give one written by --save")
    try:
        # With weights_only nothing but tensors and plain containers is unpickled.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"{option} {path}: it is not a file of weights: {first}") from error
    if not isinstance(state, dict) or not all(
        isinstance(each, torch.Tensor) for each in state.values()
    ):
        raise UsageError(f"{option} {path}: it holds more than weights: give one written by --save")
    return state


@torch.no_grad()
def load_weights(path: str, model: nn.Module, rank: int) -> None:
    """Copy those tensors of a file into a model that have the names and shapes of its own.

    Rank 0 prints how many they are. Raises UsageError if none are.
    """
    given, own = read_weights(path), model.state_dict()
    fitting = [
        name
        for name, value in own.items()
        if name in given
        and (given[name].shape, given[name].dtype) == (value.shape, value.dtype)
        # A table's description of its columns: the task has chosen between the file's and another.
        and value.dtype is not torch.uint8
    ]
    if not fitting:
        names = ", ".join(list(given)[:3])
        raise UsageError(
            f"--weights {path}: none of its tensors ({names}, ...) has a name and shape of the "
            f"model's ({', '.join(list(own)[:3])}, ...): give the --model that it was saved with"
        )
    for name in fitting:
        own[name].copy_(given[name])
    if rank == 0:
        others = [name for name in own if name not in fitting]
        rest = f"; new are {', '.join(others[:4])}" + (", ..." if len(others) > 4 else "")
        print(
            f"{len(fitting)} of {len(own)} tensors of the model come from {path}"
            + (rest if others else ""),
            flush=True,
        )

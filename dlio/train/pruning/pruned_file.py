"""Weights files of pruned models: an ordinary torch file, and its layout in a second one."""

import json
from typing import Final, TypeVar

import torch
from torch import nn

from dlio.errors import SourceError, UsageError
from dlio.train.pruning.pruned_layout import PrunedLayout, shrink_to
from dlio.util.arguments import PathText, named, path_in
from dlio.util.files import remove_file, write_json

__all__ = ["load_pruned", "save_layout"]

_SUFFIX: Final = ".layout.json"
Module = TypeVar("Module", bound=nn.Module)


def save_layout(path: str, layout: PrunedLayout | None) -> None:
    """Write PATH.layout.json for the weights at `path`; None removes a stale one."""
    if layout is not None:
        write_json(path + _SUFFIX, layout.to_json())
    else:
        remove_file(path + _SUFFIX)


def load_pruned(model: Module, path: PathText) -> Module:
    """Load the pruned weights that `dlio train --save PATH` wrote; exported as `dlio.load_pruned`.

    Cuts the model in place to the pruned widths and loads the weights. Also loads weights of a
    model that was never pruned.

    Args:
        model: a new model, made with the same options as the trained one.
        path: the file given to `--save`.

    Raises SourceError if a file cannot be read, UsageError if the weights belong to another model,
    DlioError if the model's widths differ from the original ones.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{named('model', model)}: give a torch.nn.Module")
    path = path_in("path", path, "weights.pt")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch passes on any error of its reader.
        raise SourceError(f"{path}: not weights that `--save` wrote: {error}") from error
    layout = None
    try:
        with open(path + _SUFFIX, encoding="utf-8") as file:
            layout = PrunedLayout.from_json(json.load(file))
    except FileNotFoundError:
        layout = PrunedLayout()
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}{_SUFFIX}: cannot be read: {error}") from error
    shrink_to(model, layout)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"{path} holds weights of another model, or its layout {path}{_SUFFIX} was lost: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return model

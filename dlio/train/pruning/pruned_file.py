"""Weights of a pruned model as a file that anybody can read, and its layout beside it."""

import contextlib
import json
import os
from typing import Final, TypeVar

import torch
from torch import nn

from dlio.errors import SourceError, UsageError
from dlio.train.pruning.pruned_layout import PrunedLayout, shrink_to
from dlio.util.files import write_json

_BESIDE: Final = ".layout.json"
Module = TypeVar("Module", bound=nn.Module)


def save_layout(path: str, layout: PrunedLayout | None) -> None:
    """Beside the weights at `path`, as PATH.layout.json; None takes away what lies there, of
    weights that were written over."""
    if layout is not None:
        write_json(path + _BESIDE, layout.to_json())
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + _BESIDE)


def load_pruned(model: Module, path: str) -> Module:
    """Have a model, made with the options of the one that was trained, be the pruned one that
    `dlio train --save PATH` wrote: cut in place to its widths, with its weights; exported as
    `dlio.load_pruned`. Weights of a model that was not pruned are loaded, too.

    Raises SourceError for files that cannot be read; UsageError for weights of another model;
    DlioError for a model of other widths.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its reader met.
        raise SourceError(f"{path}: not weights that `--save` wrote: {error}") from error
    layout = None
    try:
        with open(path + _BESIDE, encoding="utf-8") as file:
            layout = PrunedLayout.from_json(json.load(file))
    except FileNotFoundError:
        layout = PrunedLayout()
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}{_BESIDE}: cannot be read: {error}") from error
    shrink_to(model, layout)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"{path} holds weights of another model, or its layout {path}{_BESIDE} was lost: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return model

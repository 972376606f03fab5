"""Weights files of pruned models: an ordinary torch file, and its layout in a second one."""

from collections.abc import Mapping
from typing import Final, TypeVar, cast

import torch
from torch import nn

from dlio.errors import DlioError, SourceError, UsageError
from dlio.features.pruning.model_surgery import PrunedLayout, shrink_to
from dlio.features.pruning.neuron_groups import JsonRecord
from dlio.features.pruning.pruning_feature import LAYOUT_SUFFIX
from dlio.train.weights import load_saved, stored_state
from dlio.util.arguments import PathText, named, path_in
from dlio.util.input_files import read_json
from dlio.util.whole_files import write_json

_MOST: Final = 256 << 20
"""Bytes of a layout file."""
Module = TypeVar("Module", bound=nn.Module)


def save_layout(path: str, layout: PrunedLayout) -> None:
    """Write PATH.layout.json for the weights at `path`."""
    write_json(path + LAYOUT_SUFFIX, layout.to_json())


def fit_model(model: nn.Module, path: str, about: Mapping[str, object] | None) -> None:
    """Cut a new model to the widths of pruned weights; see `FeatureSpec.fit_model`."""
    if about is None:
        shrink_to(model, _read_layout(path + LAYOUT_SUFFIX))
    elif isinstance(saved := about.get("pruning"), Mapping):
        shrink_to(model, PrunedLayout.from_json(cast(JsonRecord, saved.get("layout"))))


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
        state = stored_state(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: not weights that `--save` wrote: {error}") from error
    load_saved(model, state, path)
    return model


def _read_layout(path: str) -> PrunedLayout:
    """Read a layout file; weights without one are of an unpruned model. Raises SourceError."""
    try:
        return PrunedLayout.from_json(cast(JsonRecord, read_json(path, _MOST)))
    except FileNotFoundError:
        return PrunedLayout()
    except (OSError, ValueError, RecursionError, DlioError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error

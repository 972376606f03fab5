"""Make a model from the weights that `dlio train` has left: a weights file, or a checkpoint."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from dlio.errors import SourceError, UsageError
from dlio.train.checkpoint.checkpoint_store import StoredCheckpoint, open_checkpoint
from dlio.train.checkpoint.state import mean_of_ranks, part_of
from dlio.train.factory import split_options
from dlio.train.model import make_model
from dlio.train.names import DEFAULT_MODEL
from dlio.train.weights import load_saved, read_weights
from dlio.util.limits import check_claim
from dlio.util.units import counted

IMAGE_SIZE: Final = 64
"""Pixels: the default of `dlio train`."""
_LARGE: Final = 1 << 14
_LARGE_SIDE: Final = 4096
"""Numbers in a checkpoint's model, and pixels, up to which nobody is asked."""
_STEP: Final = re.compile(r"step-\d{8,}")


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model with its trained weights, on the host, for evaluation."""

    module: nn.Module
    model: str
    """Value of --model."""
    classes: int
    image_size: int
    """Side of the square pictures that it was made for, in pixels."""
    path: str
    """File or checkpoint that the weights are from."""


def load_trained(
    path: str, model: str | None, classes: int | None, image_size: int | None
) -> TrainedModel:
    """Load the model at `path`, pruned or not.

    `path` is a file that `--save` wrote, a folder of checkpoints, of which the newest is taken, or
    one of them. None for the other arguments takes a checkpoint's model and image size, or `resnet`
    and 64, and the number of classes that the weights have.

    Raises UsageError if the file is not one of weights, or an option differs from the checkpoint's
    or does not fit the weights; SourceError if no checkpoint is whole.
    """
    if os.path.isdir(path):
        return _from_checkpoint(_newest(path), model, classes, image_size)
    name, size = model or DEFAULT_MODEL, image_size or IMAGE_SIZE
    state = read_weights(path, "WEIGHTS")
    return _loaded(name, classes, size, state, path)


def _from_checkpoint(
    checkpoint: StoredCheckpoint, model: str | None, classes: int | None, image_size: int | None
) -> TrainedModel:
    path, about = checkpoint.path, checkpoint.about
    for option, given, saved in (
        ("--model", model, about.get("model")),
        ("--image-size", image_size, about.get("image_size")),
    ):
        if given is not None and given != saved:
            raise UsageError(
                f"{option} {given}: {path} was trained with {option} {saved}; leave the option out"
            )
    name, size = about.get("model"), about.get("image_size")
    if not isinstance(name, str) or type(size) is not int:
        raise SourceError(f"{path}: the checkpoint does not name its model")
    if model is None and ":" in name:
        # It would be imported and called: files of others must not choose that.
        raise UsageError(
            f"{path}: the checkpoint's model is code of a module: add --model {shlex.quote(name)} "
            "if you trust it"
        )
    _check_numbers(path, name if model is None else "", size if image_size is None else 0)
    state = _mean_weights(checkpoint)
    return _loaded(name, classes, size, state, path, about)


def _check_numbers(path: str, model: str, image_size: int) -> None:
    """Check those numbers of a checkpoint that no option confirms, before memory is taken for them.

    Raises UsageError for unusually large ones.
    """
    _, options = split_options("--model", model or DEFAULT_MODEL)
    large = any(int(each) > _LARGE for each in re.findall(r"\d{1,9}", repr(options)))
    if large or not 0 <= image_size <= _LARGE_SIDE:
        raise UsageError(
            f"{path}: the checkpoint's model is {model or 'given'} for pictures of {image_size} "
            "pixels: add --model and --image-size with these values if you trust it"
        )


def _loaded(
    name: str,
    classes: int | None,
    image_size: int,
    state: Mapping[str, torch.Tensor],
    path: str,
    about: Mapping[str, object] | None = None,
) -> TrainedModel:
    """Make the model of some weights, unless it is out of proportion to them, and load these.

    Raises UsageError for options that do not fit, or a model that does not map pictures to logits;
    SourceError for a model that is far larger than the weights.
    """
    if classes is None:
        classes = _count_classes(name, image_size, state, path)
    if ":" not in name:
        planned = _planned(name, classes, image_size).state_dict()
        declared, stored = (
            sum(each.numel() * each.element_size() for each in tensors.values())
            for tensors in (planned, state)
        )
        check_claim(declared, stored, f"{path}: the model {name} with {counted(classes, 'class')}")
    module = make_model(name, classes, image_size)
    try:
        load_saved(module, state, path, about)
    except UsageError as error:
        raise UsageError(f"--model {name} with --classes {classes}: {error}") from error
    module.eval()
    with torch.no_grad():
        logits = module(torch.zeros(2, 3, image_size, image_size))
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != 2:
        raise UsageError(
            f"--model {name}: it does not give logits (pictures, classes): only networks that "
            "classify pictures are exported"
        )
    return TrainedModel(module, name, logits.shape[1], image_size, path)


def _planned(name: str, classes: int, image_size: int) -> nn.Module:
    """Make a model without memory for its tensors, if it is one of dlio's own."""
    if ":" in name:
        return make_model(name, classes, image_size)
    with torch.device("meta"):
        return make_model(name, classes, image_size)


def _newest(path: str) -> StoredCheckpoint:
    """Open a checkpoint, or the newest intact one of a folder. Raises SourceError."""
    if _STEP.fullmatch(os.path.basename(os.path.abspath(path))):
        return open_checkpoint(path).whole()
    try:
        names = sorted(filter(_STEP.fullmatch, os.listdir(path)), reverse=True)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    if not names:
        raise SourceError(
            f"{path}: neither weights nor checkpoints: give a file of `dlio train --save`, or a "
            "folder of `dlio train --checkpoint`"
        )
    errors: list[SourceError] = []
    for name in names:
        try:
            return open_checkpoint(os.path.join(path, name)).whole()
        except SourceError as error:
            errors.append(error)
    raise errors[0]


def _mean_weights(checkpoint: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """Mean over the saved ranks of their weights and statistics, as `--save` writes it.

    The moving average of a run with --ema takes the place of its weights.
    """
    tensors = {**checkpoint.read("all/"), **mean_of_ranks(checkpoint, ("model/", "ema/"))}
    return {**part_of(tensors, "model/"), **part_of(tensors, "ema/")}


def _count_classes(name: str, image_size: int, state: Mapping[str, torch.Tensor], path: str) -> int:
    """Return the number of classes of some weights: the width that depends on it in the model.

    Raises UsageError if the weights lack such a tensor.
    """
    two, three = (_planned(name, count, image_size).state_dict() for count in (2, 3))
    for key, value in two.items():
        differing = [k for k, size in enumerate(value.shape) if size != three[key].shape[k]]
        if differing:
            if key in state and state[key].ndim == value.ndim:
                return state[key].shape[differing[0]]
            raise UsageError(
                f"--model {name}: {path} holds weights of another model, without {key}"
            )
    return 2  # The model has its number of classes from elsewhere.

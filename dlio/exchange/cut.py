"""Cuts of a pruned network's tensors, and of the state that an exchange keeps of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dlio.errors import DlioError
from dlio.exchange.buckets import Bucket


@dataclass(frozen=True, slots=True, eq=False)
class TensorCut:
    """A cut of one tensor of the model: a keep-index per dimension."""

    name: str
    """Name in the model's state dict."""
    tensor: torch.Tensor
    """The model's own tensor, after the cut."""
    before: tuple[int, ...]
    """Shape before the cut."""
    kept: tuple[tuple[int, torch.Tensor], ...]
    """(dimension, indices that stay)."""

    def of(self, other: torch.Tensor, description: str = "a tensor") -> torch.Tensor:
        """Cut a companion tensor of shape `before` the same way: a momentum, a residual, an
        average.

        Dimensions of size 1 stay if the model's tensor is longer there, which covers the factored
        sums that Adafactor keeps. 0-dimensional tensors, such as step counts, stay too. Raises
        DlioError, with `description` as its subject, for a tensor of any other shape.
        """
        if other.ndim == 0:
            return other
        fits = other.ndim == len(self.before) and all(
            mine in (whole, 1) for mine, whole in zip(other.shape, self.before, strict=True)
        )
        if not fits:
            raise DlioError(
                f"{description} of {self.name} has shape {tuple(other.shape)}, the tensor had "
                f"{self.before}, so the two cannot be cut together. Choose an optimizer whose "
                "state has the shape of its parameters"
            )
        for dim, indices in self.kept:
            if other.shape[dim] == self.before[dim]:
                other = other.index_select(dim, indices.to(other.device))
        return other


def reshape_flats(
    flats: Sequence[torch.Tensor],
    before: Sequence[Bucket],
    after: Sequence[Bucket],
    cuts: Sequence[TensorCut],
) -> list[torch.Tensor]:
    """Cut flat values of the old buckets, which may have a rest that is dropped, and regroup them
    into new buckets of the same parameters: one tensor for each.
    """
    cut_of = {id(cut.tensor): cut for cut in cuts}
    piece_of: dict[int, torch.Tensor] = {}
    for flat, bucket in zip(flats, before, strict=True):
        at = 0
        for parameter, (_, shape) in zip(bucket.parameters, bucket.tensors, strict=True):
            count = math.prod(shape)
            part = flat[at : at + count].view(shape)
            cut = cut_of.get(id(parameter))
            piece_of[id(parameter)] = (part if cut is None else cut.of(part)).reshape(-1)
            at += count
    return [torch.cat([piece_of[id(each)] for each in bucket.parameters]) for bucket in after]


def reshape_state(
    state: Mapping[str, torch.Tensor],
    before: Sequence[Bucket],
    after: Sequence[Bucket],
    cuts: Sequence[TensorCut],
    flat: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Return an exchange's state after a cut: entries `<name>/<number>`, one per bucket, are cut
    like parameters if `flat` names them.

    Compressors forget their memory of a tensor (adapted thresholds, positions), because it refers
    to entries that no longer exist.
    """
    reshaped = {name: value for name, value in state.items() if "/" not in name}
    for name in flat:
        values = [state.get(f"{name}/{number}") for number in range(len(before))]
        present = [value for value in values if value is not None]
        if present and len(present) == len(before):
            for number, value in enumerate(reshape_flats(present, before, after, cuts)):
                reshaped[f"{name}/{number}"] = value
    return reshaped

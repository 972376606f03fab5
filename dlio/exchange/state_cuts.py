"""Reshape an exchange's state after parameters have been cut."""

import math
from collections.abc import Mapping, Sequence

import torch

from dlio.exchange.buckets import Bucket
from dlio.exchange.cut import TensorCut


def reshape_flats(
    flats: Sequence[torch.Tensor],
    before: Sequence[Bucket],
    after: Sequence[Bucket],
    cuts: Sequence[TensorCut],
) -> list[torch.Tensor]:
    """Cut flat values of the old buckets and regroup them into the new ones.

    Args:
        flats: one tensor per old bucket, at least as long as its parameters; the rest is dropped.
        after: buckets of the same parameters in the same order, grouped in any way.

    Returns:
        One tensor per new bucket, shape (its parameters' elements,).
    """
    cut_of = {id(cut.tensor): cut for cut in cuts}
    pieces: list[torch.Tensor] = []
    for flat, bucket in zip(flats, before, strict=True):
        at = 0
        for parameter, (_, shape) in zip(bucket.parameters, bucket.tensors, strict=True):
            count = math.prod(shape)
            part = flat[at : at + count].view(shape)
            cut = cut_of.get(id(parameter))
            pieces.append((part if cut is None else cut.of(part)).reshape(-1))
            at += count
    whole = torch.cat(pieces) if pieces else torch.empty(0)
    counts = [sum(math.prod(shape) for _, shape in bucket.tensors) for bucket in after]
    return [part.clone() for part in torch.split(whole, counts)] if counts else []


def reshape_state(
    state: Mapping[str, torch.Tensor],
    before: Sequence[Bucket],
    after: Sequence[Bucket],
    cuts: Sequence[TensorCut],
    flat: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Return an exchange's state after a cut.

    Compressors forget their memory of a tensor (adapted thresholds, positions), because it refers
    to entries that no longer exist.

    Args:
        flat: names of the entries `<name>/<number>`, one per bucket, that are cut like parameters.
    """
    reshaped = {name: value for name, value in state.items() if "/" not in name}
    for name in flat:
        values = [state.get(f"{name}/{number}") for number in range(len(before))]
        present = [value for value in values if value is not None]
        if present and len(present) == len(before):
            for number, value in enumerate(reshape_flats(present, before, after, cuts)):
                reshaped[f"{name}/{number}"] = value
    return reshaped


class KeptTotals:
    """Statistics that continue when the objects that count them are recreated."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def keep(self, counts: Mapping[str, float]) -> None:
        """Add the counts of objects that are about to be discarded."""
        self._before = self.plus(counts)

    def plus(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the counts so far plus those of the current objects."""
        return {key: value + self._before.get(key, 0.0) for key, value in counts.items()}

"""What an exchange keeps beside parameters, when these have been cut."""

import math
from collections.abc import Mapping, Sequence

import torch

from dlio.train.cut import Cut
from dlio.train.exchange.buckets import Bucket


def recut(
    flats: Sequence[torch.Tensor],
    before: Sequence[Bucket],
    after: Sequence[Bucket],
    cuts: Sequence[Cut],
) -> list[torch.Tensor]:
    """Flat values of the buckets that there were, as those that there are now have them.

    Args:
        flats: one per bucket before; what lies beyond its parameters is left out.
        after: of the same parameters in the same order, however they are grouped.
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


def recut_state(
    state: Mapping[str, torch.Tensor],
    before: Sequence[Bucket],
    after: Sequence[Bucket],
    cuts: Sequence[Cut],
    flat: Sequence[str],
) -> dict[str, torch.Tensor]:
    """An exchange's state after a cut.

    What compressors remember of a tensor (adapted thresholds, whose turn it is) begins anew: it is
    kept by places that there are no longer.

    Args:
        flat: names of what there is one of per bucket, `<name>/<number>`, cut like parameters.
    """
    found = {name: value for name, value in state.items() if "/" not in name}
    for name in flat:
        values = [state.get(f"{name}/{number}") for number in range(len(before))]
        there = [value for value in values if value is not None]
        if there and len(there) == len(before):
            for number, value in enumerate(recut(there, before, after, cuts)):
                found[f"{name}/{number}"] = value
    return found


class Told:
    """Statistics that go on when what counts them is made anew."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def keep(self, told: Mapping[str, float]) -> None:
        """Of parts that are about to go."""
        self._before = self.plus(told)

    def plus(self, told: Mapping[str, float]) -> dict[str, float]:
        return {key: value + self._before.get(key, 0.0) for key, value in told.items()}

"""Samplers that a script has written itself, whose state it may keep and save.

Rank 0 draws the batches of a pass ahead, all ranks' alike. A sampler of the script's would then be
at the end of its pass while the script is in the middle of it, and the state that it saves of it
would be wrong. So a copy of it is drawn from, and the sampler itself follows on every rank, batch
by batch, as torch's loader would have drawn from it.
"""

import copy
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler

from dlio.loader.dataloader import DataLoader

_LONG: Final = 1 << 20
_States: TypeAlias = tuple[Any, Any, torch.Tensor]


def has_own_sampler(loader: DataLoader[Any]) -> bool:
    """True if a loader's sampler, or that of its batches, is neither torch's nor dlio's."""
    sampler: Any = loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return hasattr(sampler, "__dict__") and not type(sampler).__module__.startswith(
        ("torch.utils.data", "dlio.")
    )


def draws_for_long(loader: DataLoader[Any]) -> bool:
    """True if a pass of a loader draws the samples again and again, so often that a script will
    leave it: all of its batches are not to be drawn at once."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    dataset: Any = loader.dataset
    try:
        return len(sampler) > max(_LONG, len(dataset))
    except (TypeError, NotImplementedError):  # Without a length.
        return False


def copied_sampler(loader: DataLoader[Any]) -> Any | None:
    """Return a copy of the sampler of a loader's batches, without its data set; None if it has
    parts that cannot be copied."""
    dataset: Any = loader.dataset
    try:
        return copy.deepcopy(loader.batch_sampler, {id(dataset): dataset})
    except Exception:  # Whatever its parts raise.
        return None


class DrawnAhead:
    """Draws batches from a copy of a sampler, and leaves no trace in generators of all. For rank 0.

    The batches come in runs, as a sampler may go on for ever.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._batches: Iterator[Any] | None = None
        self._states: _States | None = None
        """Of the generators of all, as the latest run has left them for itself."""

    def run(self, most: int) -> list[list[int]]:
        """Return the next batches, until they have `most` samples; none at the end."""
        with _states_kept():
            if self._states is not None:
                _set_states(self._states)
            if self._batches is None:
                self._batches = iter(self._sampler)
            drawn: list[list[int]] = []
            count = 0
            for batch in self._batches:
                drawn.append(list(batch))
                count += max(1, len(drawn[-1]))
                if count >= most:
                    break
            self._states = _present_states()
            return drawn


class FollowingSampler:
    """A script's sampler that draws as far as torch's loader has by then.

    Args:
        loader: the loader of the sampler.
        each: batches of the sampler for each that the script gets.
    """

    def __init__(self, loader: DataLoader[Any], each: int) -> None:
        sampler: Any = loader.batch_sampler  # It may have no length.
        self._batches = iter(sampler)
        self._each = each
        self._drawn: deque[int] = deque()
        self._take(loader.num_workers * (loader.prefetch_factor or 0))

    def _take(self, count: int) -> None:
        for batch in islice(self._batches, count):
            self._drawn.extend(batch)

    def step(self) -> None:
        """Draw for the next batch that the script gets, or to find that there is none."""
        self._take(self._each)

    def gets(self, batch: Sequence[int]) -> bool:
        """Note the batch that the script gets. False if the sampler has drawn another one: it draws
        from generators of which others have drawn, too, since the batch was drawn ahead."""
        return [self._drawn.popleft() for _ in batch if self._drawn] == list(batch)


@contextmanager
def _states_kept() -> Iterator[None]:
    """Leave the generators that all share as they were before the `with` block."""
    states = _present_states()
    try:
        yield
    finally:
        _set_states(states)


def _present_states() -> _States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _set_states(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - scripts draw from the global generator
    torch.set_rng_state(states[2])

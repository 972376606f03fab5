"""The link from a loader's batches to those who weigh gradients by them.

The last batch of an epoch may have fewer samples on one rank than on another, or none. The loader
knows how many, and says so when it hands the batch out; an exchange, a strategy of Lightning or
Accelerate then weighs the rank's gradient, without a message. Batches are told apart by their
tensors: a loop may take the next batch before it computes on this one.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from dlio.exchange.tensor_notes import TensorNotes


@dataclass(frozen=True, slots=True, eq=False)
class BatchShare:
    """This rank's part of a global batch."""

    counts: tuple[int, ...]
    """Samples that the loader's plan has for each rank."""
    rank: int
    samples: int
    """Samples of this rank: fewer than planned where some cannot be read. 0 if the batch only
    repeats samples of others, so that this rank has something to compute on."""
    number: int = 0
    """Number of the batch in its pass, from 1; 0 if unknown."""

    @property
    def weight(self) -> float:
        """Factor of this rank's gradient, of a mean over its samples, in the mean over ranks that
        is the gradient of the global batch."""
        return self.samples * len(self.counts) / max(1, sum(self.counts))

    @property
    def is_even(self) -> bool:
        """True if all ranks count alike."""
        return min(self.counts) == max(self.counts)


class BatchListener(Protocol):
    """Weighs gradients by the loader's batches."""

    def wants_repeats(self) -> bool:
        """True if a rank without a sample is to get a repeated one now, which counts nothing."""

    def took(self, share: BatchShare | None) -> None:
        """Learn of the batch that is handed out; None for one that the ranks do not share."""


_listeners: "weakref.WeakSet[BatchListener]" = weakref.WeakSet()
_of_tensor: TensorNotes[BatchShare] = TensorNotes()


def listen(listener: BatchListener) -> None:
    """Have a listener told of all batches, for as long as somebody else refers to it."""
    _listeners.add(listener)


def stop_listening(listener: BatchListener) -> None:
    """Undo `listen`."""
    _listeners.discard(listener)


def is_heard() -> bool:
    """True if somebody weighs gradients by batches."""
    return bool(_listeners)


def wants_repeats() -> bool:
    """True if a rank without a sample is to get a repeated one now."""
    return any(each.wants_repeats() for each in tuple(_listeners))


def announce(share: BatchShare | None, data: object) -> None:
    """Tell all listeners that a batch is handed out, with its tensors."""
    if not _listeners:
        return
    if share is not None:
        mark(share, data)
    for each in tuple(_listeners):
        each.took(share)


def share_of(data: object) -> BatchShare | None:
    """Return the share of the batch that one of the tensors is from; None if none is known."""
    return next((s for t in tensors_of(data) if (s := _of_tensor.get(t)) is not None), None)


def parts_of(share: BatchShare | None) -> tuple[float, ...]:
    """Return the parts of a batch that the ranks have; empty if they are even."""
    if share is None or share.is_even:
        return ()
    return tuple(count / sum(share.counts) for count in share.counts)


def mark(share: BatchShare, data: object) -> None:
    """Note that a batch's tensors are copies of one that was handed out."""
    _of_tensor.set(tensors_of(data), share)


def tensors_of(data: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, in tuples, lists and mappings inside each other."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for each in data.values() if isinstance(data, Mapping) else data:
            if not isinstance(each, str | int | float):
                yield from tensors_of(each)

"""Batches in the making, as the pipeline knows them: their slots and their makers.

Some abilities of slots are optional, and used where they are there: `ManySlots` make several
samples at a time, `CachedSlots` and `ManyCachedSlots` take samples from a tier of decoded images,
`DirectSlots` have a payload's bytes read into the batch itself, `SettledSlots` decode all samples
together.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.loader.contract import BatchData
from dlio.loader.planned_engine.mixup_partners import BatchPartners


class Slots(Protocol):
    """One batch in the making. `make` is called once a slot, from any thread; `finish` once, after
    all slots are made."""

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        """Decode a sample into its slot; return the seconds spent in the user's transform."""

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        """Return the batch of the slots given; of all slots for None."""


@runtime_checkable
class CachedSlots(Slots, Protocol):
    """Slots whose samples may be in a tier of decoded images."""

    def take_cached(self, slot: int, sample: int) -> float | None:
        """Make a sample of its decoded image; return the seconds of decoding that this saved.

        None if the tier does not have the image; then `make` is called.
        """


@runtime_checkable
class ManyCachedSlots(CachedSlots, Protocol):
    """Slots whose samples are looked up many at a time, which costs a tenth as much."""

    whole: bool
    """True if one thread looks up all samples of a batch, which takes as long as looking up one;
    False if it makes them, so that many threads share the work."""

    def take_cached_many(self, slots: list[int]) -> tuple[list[int], float]:
        """Make those of the samples that a tier has; return (the other slots, the seconds of
        decoding that this saved)."""


@runtime_checkable
class ManySlots(Slots, Protocol):
    """Slots that are made several at a time, which takes the interpreter's lock less often."""

    def make_many(
        self, slots: Sequence[int], samples: Sequence[int], payloads: Sequence[Buffer]
    ) -> tuple[dict[int, Exception], float]:
        """Do `make` for several slots.

        Returns: (the error of each slot that failed, seconds spent in the user's transform).
        """


@runtime_checkable
class DirectSlots(Slots, Protocol):
    """Slots that a payload's bytes can be read into, without decoding."""

    def pieces(self, slot: int) -> list[memoryview]:
        """Return the memory for consecutive parts of a payload."""

    def filled(self, slot: int, pieces: list[memoryview]) -> None:
        """Finish a slot whose pieces have been read; called in place of `make`."""


@runtime_checkable
class SettledSlots(Slots, Protocol):
    """Slots whose samples are decoded together: `make` only gathers their bytes."""

    def settle(self, intact: Sequence[int]) -> dict[int, Exception]:
        """Decode the slots that have been made; called once, before `finish`.

        Returns: the error of each slot that failed.
        """


class BatchBuilder(Protocol):
    """Makes batches of one data set."""

    owns_payloads: bool
    """True if samples share the memory of their payloads, which must not be used again then."""
    batch_bytes: int
    """Approximate bytes of a batch."""

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: BatchPartners | None = None
    ) -> Slots:
        """Begin a batch of these samples, mixed with these partners."""

"""Samples out of a node's tiers, and the repair of damaged blocks."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from dlio.data.reader import Reader, data_bytes
from dlio.errors import CorruptBlock
from dlio.storage.arrivals import Arrivals
from dlio.storage.counters import Counters
from dlio.storage.notes import Notes
from dlio.storage.targets import Targets
from dlio.storage.tier import Tier

__all__ = ["TierReads"]

T = TypeVar("T")

_ON_THEIR_OWN_SHARE: Final = 0.005
"""Share of the data set that all ranks together may read sample by sample."""
_SMALL_BLOCK: Final = 8
"""Samples of a block that is brought for one of them without counting the cost."""


class TierReads:
    """Reads samples from the tier of their block, and fetches the block if it is missing.

    While a small budget lasts, a sample of a missing block is read from the source alone, so that
    the first batch does not wait for as many whole blocks as it has samples. A damaged block is
    fetched again, but only once, because the disk may be defective. Thread-safe.

    Invariant, under the lock: `budget_bytes` is never negative, and no block is renewed twice.

    Args:
        ranks: number of ranks in the job, which share the budget.
    """

    def __init__(
        self,
        reader: Reader,
        targets: Targets,
        arrivals: Arrivals,
        counters: Counters,
        notes: Notes,
        ranks: int,
    ) -> None:
        self._reader, self._targets, self._arrivals = reader, targets, arrivals
        self._counters, self._notes = counters, notes
        self._lock = threading.Lock()
        self._renewed: set[int] = set()
        self.budget_bytes = int(_ON_THEIR_OWN_SHARE * data_bytes(reader) / ranks)
        """Bytes that may still be read sample by sample."""

    def read(self, sample: int, block: int, read: Callable[[Tier], T]) -> tuple[T, str] | None:
        """Return the result of `read` on the block's tier, and the tier's kind.

        None where the sample has to be read from the source.
        """
        targets, arrivals = self._targets, self._arrivals
        number = targets.number(block)
        # A streamed block may have been removed since an earlier pass, by another rank.
        for _ in range(1 if targets.is_pinned(block) else 2):
            if number < 0 or not (block in arrivals or self._bring(sample, block, number)):
                return None
            tier = targets.tiers[number]
            try:
                return read(tier), tier.kind
            except FileNotFoundError:
                arrivals.forget(block)  # Removed by hand, or by a job's epilog.
            except (CorruptBlock, OSError) as error:
                self._counters.add("healed")
                self._notes.add(f"{error}; read from the source instead")
                self._renew(block, tier)
        return None

    def _bring(self, sample: int, block: int, number: int) -> bool:
        """Have the block in its tier; False if the sample is to be read on its own."""
        if self._arrivals.look(block, number):
            return True
        if not self._arrivals.can_fill(block):
            return False
        # The other samples of a streamed block are needed soon.
        if self._targets.is_pinned(block) and self._may_read_alone(sample, block):
            return False
        return self._arrivals.fill(block)

    def _may_read_alone(self, sample: int, block: int) -> bool:
        size = int(self._reader.sizes[sample])
        starts = self._reader.layout.starts
        with self._lock:
            if self.budget_bytes < size or starts[block + 1] - starts[block] <= _SMALL_BLOCK:
                return False
            self.budget_bytes -= size
            return True

    def _renew(self, block: int, tier: Tier) -> None:
        """Have a damaged block filled again at its next use, unless it was renewed before."""
        with self._lock:
            if block in self._renewed:
                return
            self._renewed.add(block)
        self._arrivals.forget(block)
        tier.discard(block)

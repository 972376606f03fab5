"""Samples out of a node's tiers, and the repair of damaged blocks."""

from collections.abc import Callable
from typing import Final, TypeVar

from dlio.data.reader import Reader, data_bytes
from dlio.errors import CorruptBlock
from dlio.storage.block_fetcher import BlockFetcher
from dlio.storage.counters import Counters
from dlio.storage.health import TierHealth
from dlio.storage.notes import RunNotes
from dlio.storage.tier import Tier
from dlio.storage.tier_targets import TierTargets
from dlio.util.forks import new_lock

T = TypeVar("T")

_ON_THEIR_OWN_SHARE: Final = 0.005
"""Share of the data set that all ranks together may read sample by sample."""
_SMALL_BLOCK: Final = 8
"""Samples of a block that is brought for one of them without counting the cost."""


class TierReads:
    """Reads samples from the fastest tier that has their block; fetches it if its own has not.

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
        targets: TierTargets,
        arrivals: BlockFetcher,
        counters: Counters,
        notes: RunNotes,
        health: TierHealth,
        ranks: int,
    ) -> None:
        self._reader, self._targets, self._arrivals = reader, targets, arrivals
        self._counters, self._notes, self._health = counters, notes, health
        self._lock = new_lock()
        self._renewed: set[int] = set()
        self.budget_bytes = int(_ON_THEIR_OWN_SHARE * data_bytes(reader) / ranks)
        """Bytes that may still be read sample by sample."""

    def read(self, sample: int, block: int, read: Callable[[Tier], T]) -> tuple[T, str] | None:
        """Return the result of `read` on a tier that has the block, and the tier's kind.

        None where the sample has to be read from the source.
        """
        arrivals = self._arrivals
        # A block may have been removed since it was seen: by another rank, by hand, or as damaged.
        for _ in range(len(self._targets.tiers) + 1):
            number = self._bring(sample, block)
            if number < 0:
                return None
            tier = self._targets.tiers[number]
            try:
                return read(tier), tier.kind
            except FileNotFoundError:
                arrivals.forget(block)  # Removed by hand, or by a job's epilog.
                if self._targets.is_pinned(block):
                    return None
            except CorruptBlock as error:
                self._notes.add(f"{error}; read from the source instead")
                self._renew(block, number)
                return None
            except OSError as error:
                then = "its blocks are read from elsewhere"
                self._health.failed(tier.path, "read", error, then)
                self._renew(block, number)
                return None
        return None

    def _bring(self, sample: int, block: int) -> int:
        """Have the block in its tier; return the number of the tier to read it from.

        -1 if the sample is to be read from the source, on its own.
        """
        targets, arrivals = self._targets, self._arrivals
        place, home = arrivals.place(block), targets.number(block)
        if place == home >= 0:
            return place
        order = targets.by_speed
        if place >= 0 and (home < 0 or order.index(place) <= order.index(home)):
            return place
        if not arrivals.can_fill(block):
            return place
        # The other samples of a streamed block are needed soon.
        if targets.is_pinned(block) and self._may_read_alone(sample, block):
            return place
        return home if arrivals.fill(block) else place

    def _may_read_alone(self, sample: int, block: int) -> bool:
        size = int(self._reader.sizes[sample])
        starts = self._reader.layout.starts
        with self._lock:
            if self.budget_bytes < size or starts[block + 1] - starts[block] <= _SMALL_BLOCK:
                return False
            self.budget_bytes -= size
            return True

    def _renew(self, block: int, number: int) -> None:
        """Have a damaged block filled again at its next use, unless it was renewed before."""
        self._counters.add("healed")
        self._arrivals.distrust(block, number)
        with self._lock:
            if block in self._renewed:
                self._arrivals.give_up(block)
            self._renewed.add(block)

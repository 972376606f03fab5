"""A node's tiers, fastest first, with the source last.

A sample is read from the tier that its block is in. Until the block has arrived there, whoever
reads the sample brings the block, or waits for whoever is filling it, so that the job reads each
pinned block from the source once.

`Hierarchy` is a thin front. Each of its parts has one idea, its own lock, and its invariant:

    Targets        the tier that each block belongs in: pinned or streamed
    Arrivals       blocks on their way into tiers, each read once per node
    TierReads      a sample out of its tier; the repair of damaged blocks
    FirstBatch     the samples of a first batch, read before their blocks (EarlyPayloads)
    Gather         instead of these two for a source with a latency: samples that are read as they
                   are needed, many at a time, and complete their blocks as they go by
"""

from collections.abc import Callable
from typing import Final, TypeVar
from dlio.data.reader import Reader, data_bytes
from dlio.errors import CorruptBlock
from dlio.storage.block_fetcher import BlockFetcher
from dlio.storage.counters import Counters
from dlio.storage.counters import TierHealth
from dlio.storage.counters import RunNotes
from dlio.storage.tier import Tier
from dlio.storage.tier import TierTargets
from dlio.util.forks import new_lock
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self
import numpy as np
import numpy.typing as npt
import xxhash
from dlio.data.abilities import flow_of
from dlio.data.flow import Flow
from dlio.data.reader import Reader
from dlio.data.schema import Buffer
from dlio.errors import SourceError
from dlio.storage.block_fetcher import BlockFetcher
from dlio.storage.counters import Counters
from dlio.storage.block_fetcher import EarlyPayloads
from dlio.storage.block_fetcher import FirstBatch
from dlio.storage.counters import TierHealth
from dlio.storage.counters import RunNotes
from dlio.storage.sample_fetcher import SampleFetcher, locate
from dlio.storage.block import PayloadScratch, scatter
from dlio.storage.block_fetcher import SourceRequests
from dlio.storage.tier import Tier
from dlio.storage.tier import PinnedTiers, TierTargets

# Samples out of tiers
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


# The front
class Hierarchy:
    """Reads samples from the fastest place of this node that holds them. Thread-safe.

    Owns its tiers: `close` closes them. Does not own the reader.

    Args:
        reader: the source.
        tiers: fastest first.
        pins: the tier that each block is kept in.
        ranks: number of ranks in the job, which share the budget of samples read on their own.
        intake: reads whole blocks of the source; owned. Default: one request at a time.
        check: read each block that is brought back from its tier, and compare.
        fill_timeout_s: how long to wait for another process that fills a block, before its
            sample is read from the source instead. Default: the setting DLIO_FILL_TIMEOUT.
        flow: limits the requests in flight where samples are read as they are needed; by default
            that of the reader. With None of both, whole blocks are read.
    """

    def __init__(
        self,
        reader: Reader,
        tiers: Sequence[Tier],
        pins: PinnedTiers,
        *,
        ranks: int = 1,
        intake: SourceRequests | None = None,
        check: bool = False,
        fill_timeout_s: float | None = None,
        flow: Flow | None = None,
    ) -> None:
        self.reader = reader
        self.counters = Counters(by_source=getattr(reader, "bytes_by_source", None))
        self.targets = TierTargets(tiers, pins)
        self._notes = RunNotes()
        self.health = TierHealth(self.counters, self._notes)
        self._intake = intake or SourceRequests(reader)
        self._early = EarlyPayloads()
        self._arrivals = BlockFetcher(
            reader,
            self.targets,
            self._intake,
            self._early,
            self.counters,
            self._notes,
            self.health,
            check=check,
            fill_timeout_s=fill_timeout_s,
        )
        self._reads = TierReads(
            reader,
            self.targets,
            self._arrivals,
            self.counters,
            self._notes,
            self.health,
            ranks,
        )
        self._first_batch = FirstBatch(
            reader, self._intake, self._early, self._arrivals, self.counters
        )
        flow = flow_of(reader) if flow is None else flow
        self.gather: SampleFetcher | None = None
        """Reads the samples of a source with a latency; None for other sources."""
        if flow is not None:
            self.gather = SampleFetcher(
                self._intake, flow, self.targets, self._arrivals, self.counters, self._notes
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pace(self, lacking: int) -> None:
        """Have few samples read at a time while `lacking` of them are ready to be taken."""
        if self.gather is not None:
            self.gather.pace(lacking)

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, fastest first."""
        return self.targets.tiers

    @property
    def pins(self) -> PinnedTiers:
        """The tier that each block is kept in."""
        return self.targets.pins

    def read(
        self, sample: int, block: int, place: int, scratch: PayloadScratch | None = None
    ) -> tuple[Buffer, str]:
        """Return a sample's payload and where it came from: `ram`, `disk` or `source`.

        Args:
            sample: index; (block, place) is where the layout locates it.
            scratch: memory that the payload may be read into; it is valid until the next read.

        Raises SourceError when the last place, the source, fails too.
        """
        early = self._early.get(sample, self._arrivals.fill_timeout_s)
        if early is not None:
            return early, "source"
        if self.gather is not None:
            gathered = self.gather.take(sample, block, place)
            if gathered is not None:
                return gathered
        result = self._reads.read(sample, block, lambda tier: tier.read(block, place, scratch))
        return (self.read_source(sample), "source") if result is None else result

    def read_one(self, sample: int) -> tuple[Buffer, str]:
        """Return `read` of a sample, wherever it is stored; for single samples."""
        block, place = self.reader.layout.locate(np.array([sample], np.int64))
        return self.read(sample, int(block[0]), int(place[0]))

    def read_into(self, sample: int, block: int, place: int, pieces: Sequence[memoryview]) -> str:
        """Read a sample's payload into `pieces`, one after another, and return where it came from.

        Args:
            pieces: writable memory; together as long as the payload.

        Other arguments and errors as for `read`.
        """
        early = self._early.get(sample, self._arrivals.fill_timeout_s)
        if early is None and self.gather is not None:
            gathered = self.gather.take(sample, block, place)
            if gathered is not None:
                self._scatter(sample, gathered[0], pieces)
                return gathered[1]
        if early is None:
            result = self._reads.read(
                sample, block, lambda tier: tier.read_into(block, place, pieces)
            )
            if result is not None:
                return result[1]
        self._scatter(sample, early, pieces)
        return "source"

    def read_stored(self, sample: int, block: int, place: int, into: memoryview) -> tuple[int, int]:
        """Read a sample's payload as its tier stores it, compressed or not.

        Args:
            into: writable memory of the payload's size; the stored bytes are put at its beginning.

        Returns (bytes stored, xxh3_64 of the payload). Errors as for `read`.
        """
        early = self._early.get(sample, self._arrivals.fill_timeout_s)
        if early is None and self.gather is not None:
            gathered = self.gather.take(sample, block, place)
            if gathered is not None:
                self._scatter(sample, gathered[0], [into])
                return len(into), xxhash.xxh3_64_intdigest(into)
        if early is None:
            result = self._reads.read(
                sample, block, lambda tier: tier.read_stored(block, place, into)
            )
            if result is not None:
                return result[0]
        self._scatter(sample, early, [into])
        return len(into), xxhash.xxh3_64_intdigest(into)

    def read_source(self, sample: int) -> Buffer:
        """Return the payload as the source has it now; counted."""
        payload = self.reader.read(np.array([sample], np.int64))[0]
        self.counters.add_bytes("source", len(payload))
        self.counters.add("single_bytes", len(payload))
        return payload

    def fill(self, block: int, timeout_s: float | None = None) -> bool:
        """Bring a block into its tier unless it is there; True when it is there now.

        False when it cannot be kept (`can_fill`), or when another process that fills it did not
        finish within `timeout_s`.
        """
        return self._arrivals.fill(block, timeout_s)

    def can_fill(self, block: int) -> bool:
        """True if the block belongs in a tier of this node that can take it."""
        return self._arrivals.can_fill(block)

    def missing(self) -> int:
        """Count the blocks pinned here that are not in their tier."""
        here: list[set[int]] = []
        for tier in self.tiers:
            try:
                here.append(tier.blocks())
            except OSError as error:
                here.append(set())
                self.health.failed(tier.path, "read", error, "its blocks are read from elsewhere")
        pinned = np.flatnonzero(self.pins.tier >= 0)
        return sum(int(block) not in here[self.pins.tier[block]] for block in pinned)

    def drop_streamed(self, block: int) -> None:
        """Remove a streamed block from its tier."""
        self._arrivals.forget(block)
        with suppress(OSError):  # The folder is of memory, and goes with the job.
            self.tiers[-1].discard(block)

    def hurry(self, samples: npt.NDArray[np.int64], then: Callable[[], object]) -> None:
        """Begin to read the samples of a first batch, many at a time, ahead of their blocks.

        Does so for a source whose samples are objects of their own. Each payload is kept for its
        block, which other processes leave to this one; so nothing is read twice.

        Args:
            samples: indices; shape (batch,).
            then: called when they are read, in a thread of this hierarchy's, or now. Never called
                by two threads at once, nor after `settle`.
        """
        if self.gather is None:
            self._first_batch.hurry(samples, then)
            return
        # Samples of streamed blocks come with these.
        self.expect(samples[self.pins.tier[self.reader.layout.block_of(samples)] >= 0])
        then()

    def expect(self, samples: npt.NDArray[np.int64]) -> None:
        """Begin to read samples that are about to be read, where that takes a while each.

        Args:
            samples: indices, in the order of their use; shape (n,).
        """
        if self.gather is not None and len(samples):
            self.gather.expect(*locate(self.reader, samples))

    def forget(self, samples: npt.NDArray[np.int64]) -> None:
        """Let go of samples that were expected and are not going to be read now."""
        if self.gather is not None:
            self.gather.forget(samples.tolist())

    def notes(self) -> list[str]:
        """Return sentences about handled failures and decisions, without duplicates."""
        replicas: Callable[[], str] | None = getattr(self.reader, "summary", None)
        return self._notes.all() if replicas is None else [*self._notes.all(), replicas()]

    def note(self, event: str) -> None:
        """Remember a sentence that users should read; see `notes`."""
        self._notes.add(event)

    def settle(self) -> None:
        """End the work that `hurry` began; its `then` is not called after this."""
        self._first_batch.settle()

    def close(self) -> None:
        """Stop reading ahead and close the tiers."""
        self.settle()
        if self.gather is not None:
            self.gather.close()
        self._intake.close()
        self.targets.close()

    def _scatter(self, sample: int, early: Buffer | None, pieces: Sequence[memoryview]) -> None:
        """Put a payload that was read early, or is read from the source now, into `pieces`."""
        payload = self.read_source(sample) if early is None else early
        wanted = sum(len(piece) for piece in pieces)
        if len(payload) != wanted:
            raise SourceError(
                f"{self.reader.path}: sample {self.reader.name(sample)!r} has {len(payload)} "
                f"bytes instead of the {wanted} that its fields need: the source has changed "
                "since it was opened; open it again"
            )
        scatter(payload, pieces)

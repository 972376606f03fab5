"""A node's tiers, fastest first, with the source last: where a sample is read from.

A sample is read from the tier that its block is in. Until the block has arrived there, whoever
reads the sample brings the block, or waits for whoever is filling it, so that the job reads each
pinned block from the source once. `dlio.storage` says which of two paths brings it.

`Hierarchy` is a thin front. Each of its parts has one idea, its own lock, and its invariant:

    TierTargets    the tier that each block belongs in: pinned or streamed
    Fetcher        blocks and samples on their way into tiers, each read once per node
    TierReads      a sample out of its tier; the repair of damaged blocks
    SampleLocator  where the samples of a batch lie, as arrays, for reads outside of Python
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.flow import Flow
from dlio.data.reader_contract import Reader, abilities_of, data_bytes
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.storage.block import PayloadScratch, scatter
from dlio.storage.block_fetcher import BlockFetcher, Fetcher
from dlio.storage.counters import Counters, RunNotes
from dlio.storage.sample_fetcher import SampleFetcher
from dlio.storage.sample_locations import SampleLocations, SampleLocator
from dlio.storage.source_requests import SourceRequests
from dlio.storage.tier import Tier, TierTargets
from dlio.util.closable import Closable
from dlio.util.forks import new_lock

T = TypeVar("T")

_ON_THEIR_OWN_SHARE: Final = 0.005
"""Share of the data set that all ranks together may read sample by sample."""
_SMALL_BLOCK: Final = 8
"""Samples of a block that is brought for one of them without counting the cost."""


class Hierarchy(Closable):
    """Reads samples from the fastest place of this node that holds them. Thread-safe.

    Owns its tiers: `close` closes them. Does not own the reader.

    `tiers` are fastest first; `pinned` has the number of the tier that each block is kept in, -1
    for none. The `ranks` of the job share the budget of samples read on their own. `requests` read
    whole blocks of the source, by default one at a time; owned. With `check`, each block is read
    back from its tier, and compared. `flow` limits the requests in flight where samples are read as
    they are needed; it is by default that of the reader, and with None of both, whole blocks are
    read.
    """

    def __init__(
        self,
        reader: Reader,
        tiers: Sequence[Tier],
        pinned: npt.NDArray[np.int8],
        *,
        ranks: int = 1,
        requests: SourceRequests | None = None,
        check: bool = False,
        flow: Flow | None = None,
    ) -> None:
        self.reader = reader
        self.counters = Counters(by_source=abilities_of(reader).bytes_by_source)
        self.targets = TierTargets(tiers, pinned)
        self.tiers, self.pinned = self.targets.tiers, pinned
        self.run_notes = RunNotes(self.counters)
        self._requests = requests or SourceRequests(reader)
        self.block_fetcher = BlockFetcher(
            reader, self.targets, self._requests, self.run_notes, check=check
        )
        self._reads = TierReads(reader, self.targets, self.block_fetcher, self.run_notes, ranks)
        flow = abilities_of(reader).flow if flow is None else flow
        self.sample_fetcher: SampleFetcher | None = None
        """Reads the samples of a source with a latency; None where whole blocks are read."""
        if flow is not None:
            self.sample_fetcher = SampleFetcher(
                self._requests, flow, self.targets, self.block_fetcher, self.run_notes
            )
        self.fetcher: Fetcher = self.sample_fetcher or self.block_fetcher
        """Brings samples from the source, ahead of their use where that takes a while."""
        self.before_close: list[Callable[[], object]] = []
        """Called before its tiers are closed, by those who keep something of their files."""
        # Where samples are requests, the fetcher reads them.
        in_source = abilities_of(reader).locate if flow is None else None
        self._locator = SampleLocator(self.targets, self.block_fetcher, self.fetcher, in_source)

    # Samples

    def read(
        self, sample: int, block: int, place: int, scratch: PayloadScratch | None = None
    ) -> tuple[Buffer, str]:
        """Return a sample's payload and where it came from: `ram`, `disk` or `source`. (block,
        place) is where the layout locates it. It may be read into `scratch`, and is valid until the
        next read then.

        Raises SourceError when the last place, the source, fails too.
        """
        return self._read(
            sample,
            block,
            place,
            lambda tier: tier.read(block, place, scratch),
            lambda payload: payload,
        )

    def read_one(self, sample: int) -> tuple[Buffer, str]:
        """Return `read` of a sample, wherever it is stored; for single samples."""
        block, place = self.reader.layout.locate(np.array([sample], np.int64))
        return self.read(sample, int(block[0]), int(place[0]))

    def read_into(self, sample: int, block: int, place: int, pieces: Sequence[memoryview]) -> str:
        """Read a sample's payload into `pieces`, one after another, and return where it came from.

        The pieces are together as long as the payload. Errors as for `read`.
        """
        _, origin = self._read(
            sample,
            block,
            place,
            lambda tier: tier.read_into(block, place, pieces),
            lambda payload: self._scatter(sample, payload, pieces),
        )
        return origin

    def read_stored(self, sample: int, block: int, place: int, into: memoryview) -> tuple[int, int]:
        """Read a sample's payload as its tier stores it, compressed or not. `into` has the
        payload's size; the stored bytes are put at its beginning.

        Returns (bytes stored, xxh3_64 of the payload). Errors as for `read`.
        """

        def store(payload: Buffer) -> tuple[int, int]:
            self._scatter(sample, payload, [into])
            return len(into), xxhash.xxh3_64_intdigest(into)

        stored, _ = self._read(
            sample, block, place, lambda tier: tier.read_stored(block, place, into), store
        )
        return stored

    def locate(
        self,
        samples: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> SampleLocations:
        """Return where samples lie that can be read at once, for reads outside of Python.

        (blocks, places) are where the layout locates them; all of shape (n,). A sample is known if
        its block was seen in its own tier or a faster one, or belongs in none and the source is a
        local file that the reader can locate it in. Tables that are not in memory are read here.
        No sample is brought. Errors of tiers and of the source make samples unknown.

        Each is to be read once: known samples of tiers count as read in them.
        """
        return self._locator.locate(samples, blocks, places)

    def failed(self, blocks: npt.NDArray[np.int64]) -> None:
        """Say that samples of these blocks were not found, or were damaged, where `locate` said
        that they are. They are to be read by `read`, which finds out, and repairs their blocks."""
        # Without this, `read` may leave a damaged payload unchecked, by the share of those checked.
        different = np.unique(blocks)
        numbers = self.block_fetcher.seen_in(different)
        for block, number in zip(different.tolist(), numbers.tolist(), strict=True):
            if number >= 0:
                self.tiers[number].suspect(block)

    def _read(
        self,
        sample: int,
        block: int,
        place: int,
        from_tier: Callable[[Tier], T],
        from_payload: Callable[[Buffer], T],
    ) -> tuple[T, str]:
        """Read a sample from the first place that has it, and return that place, too.

        Samples read ahead of their blocks come first, then the tiers, then the source. Reading is
        a part of the search: a block may be removed, or prove damaged, after it was found.
        """
        early = self.fetcher.take(sample, block, place)
        if early is None:
            result = self._reads.read(sample, block, from_tier)
            if result is not None:
                return result
            payload = self.reader.read(np.array([sample], np.int64))[0]
            self.counters.add_bytes("source", len(payload))
            self.counters.add("single_bytes", len(payload))
            early = payload, "source"
        return from_payload(early[0]), early[1]

    def _scatter(self, sample: int, payload: Buffer, pieces: Sequence[memoryview]) -> None:
        wanted = sum(len(piece) for piece in pieces)
        if len(payload) != wanted:
            raise SourceError(
                f"{self.reader.path}: sample {self.reader.name(sample)!r} has {len(payload)} "
                f"bytes instead of the {wanted} that its fields need: the source has changed "
                "since it was opened; open it again"
            )
        scatter(payload, pieces)

    # Blocks

    def missing(self) -> int:
        """Count the blocks pinned here that are not in their tier."""
        lacking = 0
        for number, tier in enumerate(self.tiers):
            wanted = set(np.flatnonzero(self.pinned == number).tolist())
            try:
                lacking += len(wanted - tier.blocks())
            except OSError as error:
                lacking += len(wanted)
                self.run_notes.tier_failed(tier.path, "read", error)
        return lacking

    def drop_streamed(self, block: int) -> None:
        """Remove a streamed block from its tier."""
        self.block_fetcher.forget_place(block)
        with suppress(OSError):  # The folder is of memory, and goes with the job.
            self.tiers[-1].discard(block)

    # Notes, and the end

    def notes(self) -> list[str]:
        """Return sentences about handled failures and decisions, without duplicates."""
        replicas = abilities_of(self.reader).summary
        return self.run_notes.all() if replicas is None else [*self.run_notes.all(), replicas()]

    def close(self) -> None:
        """Stop reading ahead and close the tiers."""
        self.fetcher.settle()
        self.fetcher.close()
        self._requests.close()
        for let_go in self.before_close:
            let_go()
        self.targets.close()


class TierReads:
    """Reads samples from the fastest tier that has their block; fetches it if its own has not.

    While a small budget lasts, a sample of a missing block is read from the source alone, so that
    the first batch does not wait for as many whole blocks as it has samples. A damaged block is
    fetched again, but only once, because the disk may be defective. Thread-safe.

    Invariant, under the lock: `budget_bytes` is never negative, and no block is renewed twice.

    The `ranks` of the job share the budget.
    """

    def __init__(
        self,
        reader: Reader,
        targets: TierTargets,
        blocks: BlockFetcher,
        notes: RunNotes,
        ranks: int,
    ) -> None:
        self._reader, self._targets, self._blocks = reader, targets, blocks
        self._counters, self._notes = notes.counters, notes
        self._lock = new_lock()
        self._renewed: set[int] = set()
        self.budget_bytes = int(_ON_THEIR_OWN_SHARE * data_bytes(reader) / ranks)
        """Bytes that may still be read sample by sample."""

    def read(self, sample: int, block: int, read: Callable[[Tier], T]) -> tuple[T, str] | None:
        """Return the result of `read` on a tier that has the block, and the tier's kind.

        None where the sample has to be read from the source.
        """
        blocks = self._blocks
        # A block may have been removed since it was seen: by another rank, by hand, or as damaged.
        for _ in range(len(self._targets.tiers) + 1):
            number = self._bring(sample, block)
            if number < 0:
                return None
            tier = self._targets.tiers[number]
            try:
                return read(tier), tier.kind
            except FileNotFoundError:
                blocks.forget_place(block)  # Removed by hand, or by a job's epilog.
                if self._targets.is_pinned(block):
                    return None
            except CorruptBlock as error:
                self._notes.add(f"{error}; read from the source instead")
                self._renew(block, number)
                return None
            except OSError as error:
                self._notes.tier_failed(tier.path, "read", error)
                self._renew(block, number)
                return None
        return None

    def _bring(self, sample: int, block: int) -> int:
        """Bring the block to its tier if need be; return the number of the tier to read from.

        -1 if the sample is to be read from the source, on its own.
        """
        targets, blocks = self._targets, self._blocks
        place, home = blocks.place(block), targets.number(block)
        if place == home >= 0:
            return place
        order = targets.by_speed
        # A faster tier than its own has it: nothing is moved.
        if place >= 0 and (home < 0 or order.index(place) <= order.index(home)):
            return place
        if not blocks.can_fill(block):
            return place
        if targets.are_closed:
            raise UsageError(
                f"{self._reader.path} was closed while a loader reads it: close the data set after "
                "the loop over its batches"
            )
        # The other samples of a streamed block are needed soon.
        if targets.is_pinned(block) and self._may_read_alone(sample, block):
            return place
        began = time.perf_counter()
        has_come = blocks.fill(block)
        # Of the source: the tier that the sample is then read from did not take this time.
        self._counters.waited("source", time.perf_counter() - began)
        return home if has_come else place

    def _may_read_alone(self, sample: int, block: int) -> bool:
        size = int(self._reader.sizes[sample])
        starts = self._reader.layout.starts
        # Without a budget, the first batch of 64 samples waits for about 64 blocks of some MiB
        # each.
        with self._lock:
            if self.budget_bytes < size or starts[block + 1] - starts[block] <= _SMALL_BLOCK:
                return False
            self.budget_bytes -= size
            return True

    def _renew(self, block: int, number: int) -> None:
        """Let a damaged block be fetched again at its next use, unless it was before."""
        self._counters.add("healed")
        self._blocks.distrust(block, number)
        with self._lock:
            # Damaged once more after it was rewritten: the disk is defective.
            if block in self._renewed:
                self._blocks.give_up(block)
            self._renewed.add(block)

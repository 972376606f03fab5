"""The hierarchy: a node's tiers, fastest first, and the source last.

A sample is read from the tier that its block is pinned in. Until the block has arrived there,
the reader of the sample brings it: it fills the block itself, or waits for whoever is filling
it, so that the job reads each pinned block from the source once. The first few samples are
impatient: while a small budget lasts (half a percent of the data set over all ranks) they are
read on their own, so that the first batch does not wait for as many whole blocks as it has
samples.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader import Reader, data_bytes
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, TierError
from dlio.storage.block import Scratch, scatter
from dlio.storage.counters import Counters
from dlio.storage.intake import Intake
from dlio.storage.tier import Tier
from dlio.util.settings import settings
from dlio.util.threads import Workers

T = TypeVar("T")

_IMPATIENT_SHARE = 0.005
_POLL_S = 0.002
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Pins:
    """Which tier of this node holds each block."""

    tier: npt.NDArray[np.int8]
    """Number of the tier that pins the block here, -1 where this node does not; (blocks,)."""


class Hierarchy:
    """Reads samples from the fastest place of this node that holds them. Thread-safe.

    Owns its tiers: `close` closes them. Does not own the reader.

    Args:
        reader: the source.
        tiers: fastest first.
        pins: what each of them is to hold.
        ranks: number of ranks in the job, which share the budget of impatient reads.
        intake: reads whole blocks of the source; owned. Default: one request at a time.
        check: read each block that is brought back from its tier, and compare.
        fill_timeout_s: how long to wait for another process that fills a block, before its
            sample is read from the source instead. Default: DLIO_FILL_TIMEOUT or 60.
    """

    def __init__(
        self,
        reader: Reader,
        tiers: Sequence[Tier],
        pins: Pins,
        *,
        ranks: int = 1,
        intake: Intake | None = None,
        check: bool = False,
        fill_timeout_s: float | None = None,
    ) -> None:
        self.reader = reader
        self.tiers = list(tiers)
        self.pins = pins
        self.counters = Counters()
        self._intake = intake or Intake(reader)
        self._check = check
        self._full = [False] * len(self.tiers)
        self._broken: set[int] = set()
        self._events: list[str] = []
        self._renewed: set[int] = set()
        self._arrived: set[int] = set()
        self._filling: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._early: dict[int, Buffer] = {}
        """Payloads that were wanted before their blocks; each goes into its block later."""
        self._awaited: set[int] = set()
        self._hurried = threading.Condition()
        self._hurrying: Workers | None = None
        self._reserved: set[int] = set()
        """Blocks that this process has claimed, and will fill when what is wanted of them first
        has been read."""
        self._closed = False
        self._is_over: Callable[[int], bool] = lambda _: False
        self._passing: npt.NDArray[np.bool_] | None = None
        """Blocks that no tier pins, but that pass through the last tier; shape (blocks,)."""
        self._impatience = int(_IMPATIENT_SHARE * data_bytes(reader) / ranks)
        if fill_timeout_s is None:
            fill_timeout_s = settings().fill_timeout_s
        self._fill_timeout_s = fill_timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pass_through(self, tier: Tier) -> None:
        """Give blocks that are pinned nowhere a tier to pass through; owned, and the last."""
        self.tiers.append(tier)
        self._full.append(False)
        self._passing = np.zeros(len(self.pins.tier), np.bool_)

    @property
    def passes(self) -> bool:
        """Whether there is a tier for blocks to pass through."""
        return self._passing is not None

    def let_pass(self, blocks: npt.NDArray[np.bool_], is_over: Callable[[int], bool]) -> None:
        """These blocks too may pass through, where they are pinned nowhere.

        Args:
            blocks: shape (blocks,).
            is_over: whether a block has been used by all, and is not to be brought again.
        """
        assert self._passing is not None
        self._passing |= blocks & (self.pins.tier < 0)
        self._is_over = is_over

    def passing_blocks(self) -> set[int]:
        """Blocks that are in the tier that they pass through."""
        return self.tiers[-1].blocks() if self.passes else set()

    def let_go(self, block: int) -> None:
        """Take a block out of the tier that it passes through."""
        self._arrived.discard(block)
        self.tiers[-1].discard(block)

    def _tier_of(self, block: int) -> int:
        """Number of the tier that a block is in, or to be brought into; -1 for none."""
        number = int(self.pins.tier[block])
        if number < 0 and self._passing is not None and self._passing[block]:
            return len(self.tiers) - 1
        return number

    def hurry(self, samples: npt.NDArray[np.int64], then: Callable[[], object]) -> None:
        """Begin to read samples, many at a time, whose blocks have not arrived: those of a first
        batch, which would wait for their blocks' other samples otherwise. Each is kept for its
        block, which other processes leave to this one; so nothing is read twice. Of a source of
        single objects.

        Args:
            then: called when they are read, in a thread of this hierarchy's; or now. Never by two
                threads at once, nor after `settle`.
        """
        late: list[int] = []
        able = self.reader.objects and self._intake.requests > 1
        if able and self._hurrying is None:
            blocks = self.reader.layout.block_of(samples)
            mine = [block for block in np.unique(blocks).tolist() if self._reserve(block)]
            late = samples[np.isin(blocks, mine)].tolist()
        if not late:
            self._unless_closed(then)
            return
        self._awaited.update(late)
        self._hurrying = Workers(
            "dlio-hurry",
            lambda _: self._hurry(late, then),
            wake=self._intake.stop,
            stop_timeout_s=_JOIN_TIMEOUT_S,
        ).start()

    def _reserve(self, block: int) -> bool:
        """Claim a block that is yet to be filled, for this process to do that."""
        if not self.fillable(block):
            return False
        tier = self.tiers[self._tier_of(block)]
        if tier.has(block) or not tier.claim(block):
            return False
        if tier.has(block):  # Filled in between.
            tier.release(block)
            return False
        with self._lock:
            self._reserved.add(block)
        return True

    def _hurry(self, late: list[int], then: Callable[[], object]) -> None:
        def read(sample: int) -> None:
            payload = self.reader.read(np.array([sample], np.int64))[0]
            self.counters.add_bytes("source", len(payload))
            with self._hurried:
                self._early[sample] = payload
                self._awaited.discard(sample)
                self._hurried.notify_all()

        try:
            self._intake.map(read, late, -1)
        except (SourceError, CorruptBlock):
            pass  # It is met again, and named, where the sample is wanted.
        finally:
            with self._hurried:
                self._awaited.clear()
                self._hurried.notify_all()
        self._unless_closed(then)

    def _unless_closed(self, then: Callable[[], object]) -> None:
        with self._lock:
            if not self._closed:
                then()

    def _early_payload(self, sample: int) -> Buffer | None:
        """What `hurry` has brought, or is about to."""
        if not (self._awaited or self._early):
            return None
        if sample in self._awaited:
            with self._hurried:
                self._hurried.wait_for(lambda: sample not in self._awaited, self._fill_timeout_s)
        return self._early.get(sample)

    def read(
        self, sample: int, block: int, place: int, scratch: Scratch | None = None
    ) -> tuple[Buffer, str]:
        """A sample's payload and where it came from: `ram`, `disk` or `source`.

        Args:
            sample: index; (block, place) is where the layout locates it.
            scratch: memory that the payload may be read into; it is valid until the next read.

        Raises SourceError when the last place, the source, fails too.
        """
        early = self._early_payload(sample)
        if early is not None:
            return early, "source"
        found = self._from_tier(sample, block, lambda tier: tier.read(block, place, scratch))
        return (self.read_source(sample), "source") if found is None else found

    def read_into(self, sample: int, block: int, place: int, pieces: Sequence[memoryview]) -> str:
        """A sample's payload into `pieces`, one after another, which have its size together; where
        it came from. Arguments and errors as for `read`."""
        early = self._early_payload(sample)
        if early is None:
            found = self._from_tier(
                sample, block, lambda tier: tier.read_into(block, place, pieces)
            )
            if found is not None:
                return found[1]
        self._scatter(sample, early, pieces)
        return "source"

    def read_stored(self, sample: int, block: int, place: int, into: memoryview) -> tuple[int, int]:
        """A sample's payload as its tier stores it, compressed or not, at the beginning of `into`,
        which has the payload's size; (bytes stored, xxh3_64 of the payload). Errors as for `read`.
        """
        early = self._early_payload(sample)
        if early is None:
            found = self._from_tier(
                sample, block, lambda tier: tier.read_stored(block, place, into)
            )
            if found is not None:
                return found[0]
        self._scatter(sample, early, [into])
        return len(into), xxhash.xxh3_64_intdigest(into)

    def _scatter(self, sample: int, early: Buffer | None, pieces: Sequence[memoryview]) -> None:
        """What was read early, or is read from the source now, into pieces of its size."""
        payload = self.read_source(sample) if early is None else early
        if len(payload) != sum(len(piece) for piece in pieces):
            raise SourceError(
                f"{self.reader.path}: sample {self.reader.name(sample)!r} has {len(payload)} "
                "bytes, not what its fields need"
            )
        scatter(payload, pieces)

    def _from_tier(
        self, sample: int, block: int, read: Callable[[Tier], T]
    ) -> tuple[T, str] | None:
        """What `read` gets from the block's tier, and its kind; None where it cannot."""
        number = self._tier_of(block)
        # What passes through may have been taken away since an earlier pass, by another rank.
        for _ in range(2 if self.pins.tier[block] < 0 else 1):
            if number < 0 or not (block in self._arrived or self._bring(sample, block, number)):
                return None
            tier = self.tiers[number]
            try:
                return read(tier), tier.kind
            except FileNotFoundError:
                self._arrived.discard(block)  # Removed under us, by hand or by an epilog.
            except (CorruptBlock, OSError) as error:
                self.counters.add("healed")
                self.note(f"{error}; read from the source instead")
                self._renew(block, tier)
        return None

    def read_source(self, sample: int) -> Buffer:
        """The payload as the source has it now; counted."""
        payload = self.reader.read(np.array([sample], np.int64))[0]
        self.counters.add_bytes("source", len(payload))
        return payload

    def fill(self, block: int, timeout_s: float | None = None) -> bool:
        """Bring a pinned block into its tier, unless it is there; True when it is there now.

        One thread of one process on the node reads it; others wait for that one. False when the
        block cannot be kept (`fillable`): its tier has no room, or a sample of it cannot be read,
        so that each sample has to speak for itself; or when the one that fills it did not finish
        within `timeout_s`.
        """
        number = self._tier_of(block)
        if not self.fillable(block):
            return False
        limit_s = self._fill_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            with self._lock:
                if block in self._arrived:
                    return True
                under_way = self._filling.get(block)
                if under_way is None:
                    self._filling[block] = threading.Event()
                    break
            under_way.wait(max(0.0, deadline - time.monotonic()))
            # Another thread may have had less patience with the process that fills it.
            if block not in self._arrived and (
                time.monotonic() >= deadline or not self.fillable(block)
            ):
                return False
        try:
            if self._fill_or_wait(block, self.tiers[number], timeout_s):
                self._arrived.add(block)
                return True
        except TierError as error:
            self._full[number] = True
            self.note(f"{error}; the blocks it was to hold are read from the source")
        except (SourceError, CorruptBlock) as error:
            self._broken.add(block)
            self.note(f"block {block} of {self.reader.path} stays in the source: {error}")
        finally:
            with self._lock:
                self._filling.pop(block).set()
        return False

    def fillable(self, block: int) -> bool:
        """Whether a tier of this node is to hold the block, and can."""
        number = self._tier_of(block)
        return number >= 0 and not self._full[number] and block not in self._broken

    def missing(self) -> int:
        """Number of blocks pinned here that are not in their tier."""
        here = [tier.blocks() for tier in self.tiers]
        pinned = np.flatnonzero(self.pins.tier >= 0)
        return sum(int(block) not in here[self.pins.tier[block]] for block in pinned)

    def notes(self) -> list[str]:
        """What went wrong and was dealt with, and what was decided, in words; each once."""
        with self._lock:
            found = list(dict.fromkeys(self._events))
        copies: Callable[[], str] | None = getattr(self.reader, "told", None)
        return found if copies is None else [*found, copies()]

    def settle(self) -> None:
        """End what `hurry` began; nothing is called back after this."""
        with self._lock:
            self._closed = True
        if self._hurrying is not None and self._hurrying.alive():
            self._hurrying.close()
        with self._lock:
            left = [block for block in self._reserved if block not in self._filling]
            self._reserved.difference_update(left)
        for block in left:
            self.tiers[self._tier_of(block)].release(block)

    def close(self) -> None:
        self.settle()
        self._intake.close()
        for tier in self.tiers:
            tier.close()

    def _bring(self, sample: int, block: int, number: int) -> bool:
        """Have the block here, or decide that this sample is read on its own."""
        if self.tiers[number].has(block):
            self._arrived.add(block)
            return True
        if not self.fillable(block):
            return False
        if self.pins.tier[block] < 0:
            return self.fill(block)  # It passes through: its other samples are wanted soon.
        size = int(self.reader.sizes[sample])
        starts = self.reader.layout.starts
        with self._lock:
            # A block of few samples is no dearer than the sample.
            if self._impatience >= size and starts[block + 1] - starts[block] > 8:
                self._impatience -= size
                return False
        return self.fill(block)

    def _renew(self, block: int, tier: Tier) -> None:
        """Have a damaged block filled again at its next use; once, for the disk may be bad."""
        with self._lock:
            if block in self._renewed:
                return
            self._renewed.add(block)
        self._arrived.discard(block)
        tier.discard(block)

    def _fill_or_wait(self, block: int, tier: Tier, timeout_s: float | None) -> bool:
        deadline = time.monotonic() + (self._fill_timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            reserved = block in self._reserved
            self._reserved.discard(block)
        while not reserved and not tier.claim(block):
            # Another process of this node is at it; its lock goes with it if it dies.
            if time.monotonic() > deadline:
                if timeout_s is None:
                    self.note(
                        f"block {block} of {self.reader.path} was not in {tier.path} after "
                        f"{self._fill_timeout_s:.0f} s: the process that fills it is slow or "
                        "stopped; its samples are read from the source"
                    )
                return False
            time.sleep(_POLL_S)
        try:
            if not tier.has(block):
                if self.pins.tier[block] < 0 and self._is_over(block):
                    return False
                self._copy(block, tier)
        finally:
            tier.release(block)
        return True

    def _copy(self, block: int, tier: Tier) -> None:
        pieces, size = self._intake.block(block, self._early)
        self.counters.add_bytes("source", size)
        tier.publish(block, pieces)
        if self._check:
            try:
                tier.check(block)
            except CorruptBlock:
                tier.discard(block)
                tier.publish(block, pieces)
                tier.check(block)
        self._intake.give_back(pieces)
        if self._early:
            for sample in self.reader.layout.samples_of(block).tolist():
                self._early.pop(sample, None)

    def note(self, event: str) -> None:
        """Remember what users should know; see `notes`."""
        with self._lock:
            if len(self._events) < 1000:
                self._events.append(event)

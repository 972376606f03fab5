"""The block path: whole blocks are brought from the source into a node's tiers, each once a node.

    BlockFiller       takes the node's missing blocks in the order of the epoch (background threads)
    BlockFetcher      makes one thread of one process bring a block; the others wait for it. Of a
                      first batch it reads the samples ahead of their blocks

`dlio.storage` says when this path acts, and when `dlio.storage.sample_fetcher` does.
"""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import Reader
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, TierFull
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.storage.block import NO_ROOM, encode_block
from dlio.storage.counters import RunNotes
from dlio.storage.partial_blocks import PartialBlocks
from dlio.storage.source_requests import SourceRequests, members
from dlio.storage.tier import Tier, TierTargets
from dlio.util.closable import Closable
from dlio.util.forks import call_in_child, new_lock
from dlio.util.settings import settings
from dlio.util.threads import Workers

# Constants

_CLAIM_POLL_S: Final = 0.002
_FIRST_BATCH_TIMEOUT_S: Final = 5.0
IN_FLIGHT_BYTES: Final = 64 << 20
"""Approximate bytes of the blocks that are read at a time."""
_CHUNK: Final = 1 << 14
_BUSY_WAIT_S: Final = 0.05
_FILLER_TIMEOUT_S: Final = 10.0

T = TypeVar("T")
R = TypeVar("R")


# Blocks on their way into tiers


class EarlyPayloads:
    """Payloads that are read before their blocks, by sample. Thread-safe.

    Invariant, under the condition: a sample is expected, or here, or neither. A sample that is
    expected is either put or given up, so nobody waits for it for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: set[int] = set()
        self.payloads: dict[int, Buffer] = {}
        """The payloads that are here."""
        call_in_child(self._reset_in_child)

    def expect(self, samples: Iterable[int]) -> None:
        """Make readers of these samples wait for them."""
        with self._changed:
            self._expected.update(samples)

    def put(self, sample: int, payload: Buffer) -> None:
        """Hand over a payload to whoever waits for it."""
        with self._changed:
            self.payloads[sample] = payload
            self._expected.discard(sample)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Expect nothing any more."""
        with self._changed:
            self._expected.clear()
            self._changed.notify_all()

    def holds(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the samples that are expected or here; None if there are none."""
        held = {*self._expected, *self.payloads}
        return members(held, samples) if held else None

    def get(self, sample: int, timeout_s: float) -> Buffer | None:
        """Return a payload that is here or comes within `timeout_s`; None for all others."""
        if not (self._expected or self.payloads):
            return None  # On the way of every sample of a run: no lock is taken.
        if sample in self._expected:
            with self._changed:
                self._changed.wait_for(lambda: sample not in self._expected, timeout_s)
        return self.payloads.get(sample)

    def _reset_in_child(self) -> None:
        """Expect nothing in a forked child: the threads that read are its parent's."""
        self._changed = threading.Condition()
        self._expected.clear()

    def drop(self, samples: Sequence[int]) -> None:
        """Forget samples whose block is in its tier."""
        for sample in samples:
            self.payloads.pop(sample, None)


class Fetcher:
    """A path from the source into a node's tiers; a base class. Thread-safe.

    A hierarchy takes its samples by one of two: `BlockFetcher`, which brings whole blocks, or
    `dlio.storage.sample_fetcher.SampleFetcher`, which reads the samples that are needed.
    """

    def take(self, sample: int, block: int, place: int) -> tuple[Buffer, str] | None:
        """Return a sample's payload and where it came from, or None to read it from its tier.

        Waits for a sample that is on its way. Raises SourceError or CorruptBlock.
        """
        raise NotImplementedError

    def holds(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the samples that are to be taken, though their blocks may be in tiers;
        None if there are none. The others are about to be read without `take`."""
        raise NotImplementedError

    def hurry(self, samples: npt.NDArray[np.int64], then: Callable[[], object]) -> None:
        """Begin to read the samples of a first batch, many at a time, ahead of their blocks.

        Does so for a source whose samples are single files or objects. Each payload is kept for its
        block, which other processes leave to this one; so nothing is read twice.

        `then` is called when they are read, in a thread of this fetcher's, or now: never by two
        threads at once, nor after `settle`.
        """
        raise NotImplementedError

    def expect(self, samples: npt.NDArray[np.int64]) -> None:
        """Begin to read samples that are going to be taken, where that takes a while each. They are
        in the order of their use."""

    def forget(self, samples: npt.NDArray[np.int64]) -> None:
        """Let go of samples that were expected and are not going to be taken."""

    def pace(self, lacking: int) -> None:
        """Read few samples at a time while `lacking` of them are ready to be taken."""

    def settle(self) -> None:
        """End the work that `hurry` began; its `then` is not called after this."""

    def close(self) -> None:
        """Stop reading. A source that hangs is not waited for."""


class BlockFetcher(Fetcher):
    """Brings blocks into their tiers and knows where they are. Thread-safe.

    A block that any tier of the node has is not read from the source: its own tier is filled from
    there.

    Several threads of a process may want the same block, and so may several processes of a node.
    One thread of one process reads it; the others wait for that one.

    Invariant, under the lock: a block that a thread of this process is filling has an event in
    `_filling`, and no other thread starts to fill it. Among processes, the tier's own claim file
    decides. A block in `_reserved` is claimed by this process and not being filled yet. `then` of
    `hurry` is called by one thread at a time, under a lock of its own, and by none after `settle`.

    With `check`, each block is read back from its tier, and compared.
    """

    def __init__(
        self,
        reader: Reader,
        targets: TierTargets,
        requests: SourceRequests,
        notes: RunNotes,
        *,
        check: bool,
    ) -> None:
        self._reader, self._targets, self._requests = reader, targets, requests
        self._counters, self._notes = notes.counters, notes
        self._early = EarlyPayloads()
        self._hurry: Workers | None = None
        self._hurry_lock = threading.Lock()
        self._is_settled = False
        self._check = check
        self.fill_timeout_s = settings().fill_timeout_s
        """Seconds to wait for another process that fills a block."""
        self._lock = new_lock()
        self._places = np.full(len(targets.pinned), -1, np.int8)
        """Number of the fastest tier that each block was seen in, -1 for none; shape (blocks,)."""
        self._filling: dict[int, threading.Event] = {}
        self._reserved: set[int] = set()
        self._full = {n for n, tier in enumerate(targets.tiers) if not tier.writable}
        """Numbers of tiers that take no more blocks."""
        self.short: set[int] = set()
        """Those of them whose disks had less room than their capacity."""
        self._damaged: set[tuple[int, int]] = set()
        """(block, tier) whose file is damaged: not used before it is rewritten."""
        self._broken: set[int] = set()
        """Blocks with a sample that cannot be read: each of their samples is read on its own."""
        call_in_child(self._reset_in_child)

    # Where blocks are

    def place(self, block: int) -> int:
        """Return the number of the fastest tier that has a block, -1 for none."""
        known = int(self._places[block])
        return self.look(block) if known < 0 else known

    def seen(self, block: int) -> bool:
        """True for a block that this process has seen in a tier; nothing is looked for."""
        return bool(self._places[block] >= 0)

    def seen_in(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the tier in which each block was seen, -1 for none; nothing is
        looked for."""
        return self._places[blocks].astype(np.int64)

    def look(self, block: int) -> int:
        """As `place`, but look again."""
        for number in self._targets.by_speed:
            if self._has(block, number):
                self._places[block] = number
                return number
        return -1

    def forget_place(self, block: int) -> None:
        """Look for the block at its next use, and fill it then if need be."""
        self._places[block] = -1

    def distrust(self, block: int, number: int) -> None:
        """Leave a damaged block in tier `number` unused, and remove it if possible."""
        self._damaged.add((block, number))
        self.forget_place(block)
        tier = self._targets.tiers[number]
        try:
            tier.discard(block)
        except OSError as error:
            self._notes.tier_failed(
                tier.path, "cleared", error, "what is damaged there is not used"
            )

    def give_up(self, block: int) -> None:
        """Read the samples of a block from the source from now on."""
        self._broken.add(block)

    # Filling

    def can_fill(self, block: int) -> bool:
        """True if the block belongs in a tier of this node that can take it."""
        number = self._targets.number(block)
        return number >= 0 and number not in self._full and block not in self._broken

    def fill(self, block: int, timeout_s: float | None = None) -> bool:
        """Bring a block into its tier unless it is there; True when it is there now.

        False when it cannot be kept (`can_fill`): its tier has no room, or one of its samples
        cannot be read, so that each sample has to be read on its own to name the bad one. False
        also when another process that fills the block did not finish within `timeout_s`.
        """
        if not self.can_fill(block):
            return False
        limit_s = self.fill_timeout_s if timeout_s is None else timeout_s
        begun = self._begin(block, time.monotonic() + limit_s)
        if begun is not None:
            return begun
        number = self._targets.number(block)
        try:
            if self._fill_or_wait(block, number, timeout_s):
                self._places[block] = number
                return True
        except (SourceError, CorruptBlock) as error:
            # A block is written whole or not at all. Its samples are read one by one, so that the
            # error names the bad one.
            self._broken.add(block)
            self._notes.add(f"block {block} of {self._reader.path} stays in the source: {error}")
        except OSError as error:  # Of the tier; TierError is one.
            self.fill_up(number, error)
        finally:
            with self._lock:
                self._filling.pop(block).set()
        return False

    def put(self, block: int, number: int, payloads: Sequence[Buffer]) -> None:
        """Publish a block of these payloads in tier `number`. Raises OSError."""
        reader = self._reader
        pieces = encode_block(
            payloads, block=block, fingerprint=reader.fingerprint, schema=reader.schema
        )
        self._publish(block, self._targets.tiers[number], pieces)
        self._damaged.discard((block, number))

    def complete(self, block: int, number: int, pieces: PartialBlocks) -> None:
        """Publish a block of its pieces in tier `number`, if all are there. Raises OSError."""
        if not pieces.publish(block, lambda payloads: self.put(block, number, payloads)):
            return
        if self._check:
            tier = self._targets.tiers[number]
            try:
                tier.check(block)
            except CorruptBlock:
                tier.discard(block)
        self._damaged.discard((block, number))

    def fill_up(self, number: int, error: OSError) -> None:
        """Add nothing more to a tier that cannot be written."""
        self._full.add(number)
        if isinstance(error, TierFull) or error.errno in NO_ROOM:
            self.short.add(number)
        path = self._targets.tiers[number].path
        then = "the blocks it was to hold are read from the source"
        self._notes.tier_failed(path, "written", error, then)

    # A first batch

    def take(self, sample: int, block: int, place: int) -> tuple[Buffer, str] | None:
        """Return the payload of a sample of the first batch, until its block is in its tier."""
        payload = self._early.get(sample, self.fill_timeout_s)
        return None if payload is None else (payload, "source")

    def holds(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the samples of the first batch that are here or are being read."""
        return self._early.holds(samples)

    def hurry(self, samples: npt.NDArray[np.int64], then: Callable[[], object]) -> None:
        """Begin to read the samples whose blocks have not arrived."""
        # A first batch of 64 samples touches about 64 blocks. Waiting for all of these, of some MiB
        # each, takes far longer than reading 64 files. So where samples are files of their own,
        # those of a first batch are read first. Each payload is kept for its block, which this
        # process has claimed, so that nothing is read twice.
        late: list[int] = []
        if self._reader.objects and self._requests.requests > 1 and self._hurry is None:
            blocks = self._reader.layout.block_of(samples)
            mine = [block for block in np.unique(blocks).tolist() if self._reserve(block)]
            late = samples[np.isin(blocks, mine)].tolist()
        if not late:
            self._unless_settled(then)
            return
        self._early.expect(late)
        self._hurry = Workers(
            "dlio-hurry",
            lambda _: self._read_early(late, then),
            wake=self._requests.stop,
            stop_timeout_s=_FIRST_BATCH_TIMEOUT_S,
        )
        self._hurry.start()

    def settle(self) -> None:
        """Stop reading ahead of blocks; `then` of `hurry` is not called afterwards."""
        with self._hurry_lock:
            self._is_settled = True
        if self._hurry is not None and self._hurry.alive():
            self._hurry.close()
        with self._lock:
            left = [block for block in self._reserved if block not in self._filling]
            self._reserved.difference_update(left)
        for block in left:
            self._targets.tiers[self._targets.number(block)].release(block)

    def _reserve(self, block: int) -> bool:
        """Claim a block that is yet to be filled, so that this process fills it later."""
        if not self.can_fill(block) or self.place(block) >= 0:
            return False
        number = self._targets.number(block)
        tier = self._targets.tiers[number]
        try:
            if not tier.claim(block):
                return False
        except OSError as error:
            self.fill_up(number, error)
            return False
        if self._has(block, number):  # Filled in between.
            tier.release(block)
            return False
        with self._lock:
            self._reserved.add(block)
        return True

    def _read_early(self, late: list[int], then: Callable[[], object]) -> None:
        def read(sample: int) -> None:
            payload = self._reader.read(np.array([sample], np.int64))[0]
            self._counters.add_bytes("source", len(payload))
            self._counters.add("single_bytes", len(payload))
            self._early.put(sample, payload)

        try:
            self._requests.map(read, late, -1)
        except (SourceError, CorruptBlock):
            pass  # It occurs again, with the sample's name, where the sample is wanted.
        finally:
            self._early.give_up()
        if not self._requests.stopping.is_set():  # Otherwise all of it is about to end.
            self._unless_settled(then)

    def _unless_settled(self, then: Callable[[], object]) -> None:
        with self._hurry_lock:
            if not self._is_settled:
                then()

    # How a block is filled

    def _reset_in_child(self) -> None:
        """Fill nothing yet, in a forked child: its parent does."""
        self._filling.clear()
        self._reserved.clear()

    def _begin(self, block: int, deadline: float) -> bool | None:
        """Become the thread that fills a block: None. Otherwise wait for the one that does, until
        `deadline`; True if the block has arrived."""
        while True:
            with self._lock:
                if self._is_home(block):
                    return True
                under_way = self._filling.get(block)
                if under_way is None:
                    self._filling[block] = threading.Event()
                    return None
            # An attempt that failed says nothing about the next: it may have had a deadline of
            # zero. Giving up with it had samples read on their own, in addition to their block.
            under_way.wait(max(0.0, deadline - time.monotonic()))
            # Another thread may have had less patience with the process that fills it.
            if not self._is_home(block) and (
                time.monotonic() >= deadline or not self.can_fill(block)
            ):
                return False

    def _is_home(self, block: int) -> bool:
        """True for a block that was seen in the tier that it belongs in."""
        return int(self._places[block]) == self._targets.number(block)

    def _has(self, block: int, number: int) -> bool:
        """True if tier `number` has a block that is fit for use."""
        tier = self._targets.tiers[number]
        try:
            return (block, number) not in self._damaged and tier.has(block)
        except OSError as error:
            self._notes.tier_failed(tier.path, "read", error)
            return False

    def _fill_or_wait(self, block: int, number: int, timeout_s: float | None) -> bool:
        tier = self._targets.tiers[number]
        deadline = time.monotonic() + (self.fill_timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            reserved = block in self._reserved
            self._reserved.discard(block)
        while not reserved and not tier.claim(block):
            # Another process of this node fills it; its claim ends with it if it dies.
            if time.monotonic() > deadline:
                if timeout_s is None:
                    self._notes.add(
                        f"block {block} of {self._reader.path} was not in {tier.path} after "
                        f"{self.fill_timeout_s:.0f} s: the process that fills it is slow or "
                        "stopped; its samples are read from the source"
                    )
                return False
            if self._requests.stopping.wait(_CLAIM_POLL_S):
                return False
        try:
            if not self._has(block, number):
                if self._targets.is_over(block):
                    return False
                self._copy(block, number)
        finally:
            tier.release(block)
        return True

    def _copy(self, block: int, number: int) -> None:
        """Write a block to its tier, from another one of the node or from the source."""
        tier = self._targets.tiers[number]
        here = self._from_tiers(block, number)
        if here is not None:
            self._counters.add("moved_bytes", len(here))
            self._publish(block, tier, [here])
        else:
            with self._requests.block(block, self._early.payloads) as (pieces, source_bytes):
                self._counters.add_bytes("source", source_bytes)
                self._publish(block, tier, pieces)
        self._damaged.discard((block, number))
        if self._early.payloads:
            self._early.drop(self._reader.layout.samples_of(block).tolist())

    def _publish(self, block: int, tier: Tier, pieces: Sequence[Buffer]) -> None:
        tier.publish(block, pieces)
        if self._check:
            try:
                tier.check(block)
            except CorruptBlock:
                tier.discard(block)
                tier.publish(block, pieces)
                tier.check(block)

    def _from_tiers(self, block: int, but: int) -> memoryview | None:
        """Return a block that another tier has, checked; None if none has it intact."""
        # A copy from the node costs a memory copy; the source may be a network away.
        for number in self._targets.by_speed:
            if number == but or not self._has(block, number):
                continue
            tier = self._targets.tiers[number]
            try:
                return tier.read_whole(block)
            except FileNotFoundError:
                continue
            except CorruptBlock as error:
                self._counters.add("healed")
                self._notes.add(f"{error}; read from the source instead")
                self.distrust(block, number)
            except OSError as error:
                self._damaged.add((block, number))
                self._notes.tier_failed(tier.path, "read", error)
        return None


# Filling in the background


def blocks_in_order(layout: Layout, order: Order, wanted: npt.NDArray[np.bool_]) -> Iterator[int]:
    """Yield the wanted blocks in the order of their first use in an epoch, then the unused ones.

    The order is evaluated only as far as blocks are consumed. `wanted` is a mask of shape
    (blocks,).
    """
    left = wanted.copy()
    for start in range(0, len(order), _CHUNK):
        if not left.any():
            return
        positions = np.arange(start, min(start + _CHUNK, len(order)), dtype=np.int64)
        blocks = layout.block_of(order.samples(positions))
        different, first = np.unique(blocks, return_index=True)
        for block in different[np.argsort(first)]:
            if left[block]:
                left[block] = False
                yield int(block)
    yield from np.flatnonzero(left).tolist()


def filler_threads(block_bytes: npt.NDArray[np.int64], requests: int) -> int:
    """Return the number of blocks to bring at a time.

    There are as many as requests, unless their bytes exceed those that may be in flight; 2 at
    least.
    """
    # Bytes bound the blocks in flight, not their number: they take memory.
    largest = int(block_bytes.max(initial=1))
    return max(2, min(requests, IN_FLIGHT_BYTES // largest))


class Filler(Closable):
    """Threads that bring blocks into their tiers until all are there, or it is closed.

    Each rank of a node has one, and all go through the same list.
    """

    def __init__(
        self, threads: int, name: str = "dlio-fill", wake: Callable[[], object] | None = None
    ) -> None:
        """Starts the threads, of this name, as `Workers` does: called last by constructors."""
        self._workers = Workers(
            name, self._run, threads, wake=wake, stop_timeout_s=_FILLER_TIMEOUT_S
        )
        self._closing = self._workers.stopping
        self._workers.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks that can be brought are there; False after `timeout_s`."""
        return self._workers.wait(timeout_s)

    def close(self) -> None:
        """Stop after the blocks that are being filled. A source that hangs is not waited for."""
        self._workers.close()

    def _run(self, _: int) -> None:
        try:
            self._fill()
        except Exception:
            # A source that hung and answers at last finds its tier closed.
            if not self._closing.is_set():
                raise

    @abstractmethod
    def _fill(self) -> None:
        """Do the work of a thread."""


class BlockFiller(Filler):
    """A filler of the block path. A block that another rank is filling is skipped and looked at
    again at the end, so that nobody waits while there is work.

    `blocks` makes the iterator of blocks to bring, and is called by the first of the threads.
    """

    def __init__(
        self, fetcher: BlockFetcher, blocks: Callable[[], Iterator[int]], threads: int = 2
    ) -> None:
        self._fetcher = fetcher
        self._blocks = blocks
        self._lock = threading.Lock()
        self._work: Iterator[int] | None = None
        super().__init__(threads)

    def _next(self) -> int | None:
        with self._lock:
            if self._work is None:
                self._work = self._blocks()
            return next(self._work, None)

    def _fill(self) -> None:
        fill = self._fetcher.fill
        busy: list[int] = []
        while not self._closing.is_set() and (block := self._next()) is not None:
            if not fill(block, timeout_s=0):
                busy.append(block)
        while busy and not self._closing.wait(_BUSY_WAIT_S):
            busy = [
                block
                for block in busy
                if not fill(block, timeout_s=0) and self._fetcher.can_fill(block)
            ]

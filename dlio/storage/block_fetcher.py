"""Blocks on their way into a node's tiers, each read from the source once per node, if at all."""

import threading
import time
from collections.abc import Sequence
from typing import Final

from dlio.data.reader import Reader
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.storage.block_format import encode_block
from dlio.storage.counters import Counters
from dlio.storage.early import EarlyPayloads
from dlio.storage.health import TierHealth
from dlio.storage.notes import RunNotes
from dlio.storage.partial_blocks import PartialBlocks
from dlio.storage.source_requests import SourceRequests
from dlio.storage.tier import Tier
from dlio.storage.tier_targets import TierTargets
from dlio.util.forks import call_in_child, new_lock
from dlio.util.settings import settings

_POLL_S: Final = 0.002


class BlockFetcher:
    """Brings blocks into their tiers and knows where they are. Thread-safe.

    A block that any tier of the node has is not read from the source: its own tier is filled from
    there.

    Several threads of a process may want the same block, and so may several processes of a node.
    One thread of one process reads it; the others wait for that one.

    Invariant, under the lock: a block that a thread of this process is filling has an event in
    `_filling`, and no other thread starts to fill it. Among processes, the tier's own claim file
    decides. A block in `_reserved` is claimed by this process and not being filled yet.

    Args:
        check: read each block that is brought back from its tier, and compare.
        fill_timeout_s: how long to wait for another process that fills a block. Default: the
            setting DLIO_FILL_TIMEOUT.
    """

    def __init__(
        self,
        reader: Reader,
        targets: TierTargets,
        intake: SourceRequests,
        early: EarlyPayloads,
        counters: Counters,
        notes: RunNotes,
        health: TierHealth,
        *,
        check: bool,
        fill_timeout_s: float | None,
    ) -> None:
        self._reader, self._targets, self._intake = reader, targets, intake
        self._early, self._counters, self._notes = early, counters, notes
        self._health = health
        self._check = check
        if fill_timeout_s is None:
            fill_timeout_s = settings().fill_timeout_s
        self.fill_timeout_s = fill_timeout_s
        self._lock = new_lock()
        self._places: dict[int, int] = {}
        """Number of the fastest tier that a block was seen in."""
        self._filling: dict[int, threading.Event] = {}
        self._reserved: set[int] = set()
        self._full = {n for n, tier in enumerate(targets.tiers) if not tier.writable}
        """Numbers of tiers that take no more blocks."""
        self._damaged: set[tuple[int, int]] = set()
        """(block, tier) whose file is damaged: not used before it is written anew."""
        self._broken: set[int] = set()
        """Blocks with a sample that cannot be read: each of their samples is read on its own."""
        call_in_child(self._begin_anew)

    def place(self, block: int) -> int:
        """Return the number of the fastest tier that has a block, -1 for none."""
        known = self._places.get(block)
        return self.look(block) if known is None else known

    def seen(self, block: int) -> bool:
        """True for a block that this process has seen in a tier; nothing is looked for."""
        return block in self._places

    def look(self, block: int) -> int:
        """As `place`, but look again."""
        for number in self._targets.by_speed:
            if self._has(block, number):
                self._places[block] = number
                return number
        return -1

    def forget(self, block: int) -> None:
        """Have the block looked for, and filled if need be, at its next use."""
        self._places.pop(block, None)

    def distrust(self, block: int, number: int) -> None:
        """Leave a damaged block in tier `number` unused, and remove it if possible."""
        self._damaged.add((block, number))
        self.forget(block)
        tier = self._targets.tiers[number]
        try:
            tier.discard(block)
        except OSError as error:
            self._health.failed(tier.path, "cleared", error, "what is damaged there is not used")

    def give_up(self, block: int) -> None:
        """Have the samples of a block read from the source from now on."""
        self._broken.add(block)

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
        path = self._targets.tiers[number].path
        then = "the blocks it was to hold are read from the source"
        self._health.failed(path, "written", error, then)

    def reserve(self, block: int) -> bool:
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

    def release_reserved(self) -> None:
        """Let others fill the blocks that were reserved and are not being filled."""
        with self._lock:
            left = [block for block in self._reserved if block not in self._filling]
            self._reserved.difference_update(left)
        for block in left:
            self._targets.tiers[self._targets.number(block)].release(block)

    def _begin_anew(self) -> None:
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
            under_way.wait(max(0.0, deadline - time.monotonic()))
            # Another thread may have had less patience with the process that fills it.
            if not self._is_home(block) and (
                time.monotonic() >= deadline or not self.can_fill(block)
            ):
                return False

    def _is_home(self, block: int) -> bool:
        """True for a block that was seen in the tier that it belongs in."""
        return self._places.get(block, -1) == self._targets.number(block)

    def _has(self, block: int, number: int) -> bool:
        """True if tier `number` has a block that is fit for use."""
        tier = self._targets.tiers[number]
        try:
            return (block, number) not in self._damaged and tier.has(block)
        except OSError as error:
            self._health.failed(tier.path, "read", error, "its blocks are read from elsewhere")
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
            if self._intake.stopping.wait(_POLL_S):
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
            with self._intake.block(block, self._early.payloads) as fresh:
                self._counters.add_bytes("source", fresh.source_bytes)
                self._publish(block, tier, fresh.pieces)
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
                self._health.failed(tier.path, "read", error, "its blocks are read from elsewhere")
        return None

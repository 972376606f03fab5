"""Blocks on their way from the source into a node's tiers, each read once per node."""

import threading
import time
from typing import Final

from dlio.data.reader import Reader
from dlio.errors import CorruptBlock, SourceError, TierError
from dlio.storage.counters import Counters
from dlio.storage.early import EarlyPayloads
from dlio.storage.intake import Intake
from dlio.storage.notes import Notes
from dlio.storage.targets import Targets
from dlio.storage.tier import Tier
from dlio.util.settings import settings

__all__ = ["Arrivals"]

_POLL_S: Final = 0.002


class Arrivals:
    """Brings blocks into their tiers and knows which have arrived. Thread-safe.

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
        targets: Targets,
        intake: Intake,
        early: EarlyPayloads,
        counters: Counters,
        notes: Notes,
        *,
        check: bool,
        fill_timeout_s: float | None,
    ) -> None:
        self._reader, self._targets, self._intake = reader, targets, intake
        self._early, self._counters, self._notes = early, counters, notes
        self._check = check
        if fill_timeout_s is None:
            fill_timeout_s = settings().fill_timeout_s
        self.fill_timeout_s = fill_timeout_s
        self._lock = threading.Lock()
        self._arrived: set[int] = set()
        self._filling: dict[int, threading.Event] = {}
        self._reserved: set[int] = set()
        self._full: set[int] = set()
        """Numbers of tiers without room."""
        self._broken: set[int] = set()
        """Blocks with a sample that cannot be read: each of their samples is read on its own."""

    def __contains__(self, block: int) -> bool:
        """True for a block that has arrived, as far as this process knows without looking."""
        return block in self._arrived

    def look(self, block: int, number: int) -> bool:
        """Look whether a block is in tier `number`, where another process may have brought it."""
        if not self._targets.tiers[number].has(block):
            return False
        self._arrived.add(block)
        return True

    def forget(self, block: int) -> None:
        """Have the block looked for, and filled if need be, at its next use."""
        self._arrived.discard(block)

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
            if self._fill_or_wait(block, self._targets.tiers[number], timeout_s):
                self._arrived.add(block)
                return True
        except TierError as error:
            self._full.add(number)
            self._notes.add(f"{error}; the blocks it was to hold are read from the source")
        except (SourceError, CorruptBlock) as error:
            self._broken.add(block)
            self._notes.add(f"block {block} of {self._reader.path} stays in the source: {error}")
        finally:
            with self._lock:
                self._filling.pop(block).set()
        return False

    def reserve(self, block: int) -> bool:
        """Claim a block that is yet to be filled, so that this process fills it later."""
        if not self.can_fill(block):
            return False
        tier = self._targets.tiers[self._targets.number(block)]
        if tier.has(block) or not tier.claim(block):
            return False
        if tier.has(block):  # Filled in between.
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

    def _begin(self, block: int, deadline: float) -> bool | None:
        """Become the thread that fills a block: None. Otherwise wait for the one that does, until
        `deadline`; True if the block has arrived."""
        while True:
            with self._lock:
                if block in self._arrived:
                    return True
                under_way = self._filling.get(block)
                if under_way is None:
                    self._filling[block] = threading.Event()
                    return None
            under_way.wait(max(0.0, deadline - time.monotonic()))
            # Another thread may have had less patience with the process that fills it.
            if block not in self._arrived and (
                time.monotonic() >= deadline or not self.can_fill(block)
            ):
                return False

    def _fill_or_wait(self, block: int, tier: Tier, timeout_s: float | None) -> bool:
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
            if not tier.has(block):
                if self._targets.is_over(block):
                    return False
                self._copy(block, tier)
        finally:
            tier.release(block)
        return True

    def _copy(self, block: int, tier: Tier) -> None:
        with self._intake.block(block, self._early.payloads) as fresh:
            self._counters.add_bytes("source", fresh.source_bytes)
            tier.publish(block, fresh.pieces)
            if self._check:
                try:
                    tier.check(block)
                except CorruptBlock:
                    tier.discard(block)
                    tier.publish(block, fresh.pieces)
                    tier.check(block)
        if self._early.payloads:
            self._early.drop(self._reader.layout.samples_of(block).tolist())

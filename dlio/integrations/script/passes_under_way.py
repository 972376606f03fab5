"""Passes whose batches a script may compute on now.

Which these are decides about weights and random numbers: it has to be the same on all ranks. So an
iterator that the script leaves unfinished is over where its last reference goes, at the same call
on all ranks, but not where Python's collector of cycles frees it, at any moment. One that stays
open steps aside while other passes give batch after batch.
"""

import gc
import threading
from typing import Any, Final

from dlio.integrations.script.pass_use import PassUse
from dlio.integrations.script.script_assigner import ScriptBatch


class GarbageWatch:
    """Tells whether Python frees an object at a moment that differs between ranks."""

    def __init__(self) -> None:
        self._collecting: set[int] = set()
        """Threads that look for cycles now."""

    def start(self) -> None:
        """Look at the collector of cycles until `close`."""
        gc.callbacks.append(self._collects)

    def close(self) -> None:
        """Look no more."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    @property
    def frees(self) -> bool:
        """True within a collection of cycles, and in other threads than the main one."""
        thread = threading.get_ident()
        return thread in self._collecting or threading.main_thread().ident != thread

    def _collects(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting.add(threading.get_ident())
        else:
            self._collecting.discard(threading.get_ident())


GARBAGE: Final = GarbageWatch()


class PassesUnderWay:
    """The batch that the script got last of each pass under way."""

    def __init__(self) -> None:
        self.batches: dict[PassUse, ScriptBatch] = {}
        """Of those in use, in the order in which the script got them."""
        self._aside: dict[PassUse, tuple[ScriptBatch, PassUse]] = {}
        """Passes that have stepped aside, with their batch and the pass that gives instead."""
        self._since: dict[PassUse, set[PassUse]] = {}
        """By pass, others that have given a batch since that one was used last."""
        self._idle: set[PassUse] = set()
        """Passes that have stepped aside since they were used last."""

    def begins(self, use: PassUse) -> None:
        """Note that a pass begins: one of the same place that has stepped aside is over."""
        for before in [each for each in self._idle if each.is_like(use)]:
            self.ended(before)

    def took(self, use: PassUse, batch: ScriptBatch) -> None:
        """Note that the script gets a batch. Passes of which it has used none since the one before
        of this pass step aside, as in a loop within another."""
        for other in [each for each in self.batches if each is not use]:
            if use in self._since[other]:
                self._aside[other] = self.batches.pop(other), use
                self._idle.add(other)
            else:
                self._since[other].add(use)
        self.batches.pop(use, None)
        self._aside.pop(use, None)
        self._idle.discard(use)
        self.batches[use], self._since[use] = batch, set()

    def used(self, use: PassUse) -> None:
        """Note that a module computes on a batch of a pass."""
        self._idle.discard(use)
        self._returns(use)

    def _returns(self, use: PassUse) -> None:
        if use in self._since:
            self._since[use].clear()
        if use in self._aside:
            self.batches[use] = self._aside.pop(use)[0]

    def ended(self, use: PassUse) -> None:
        """Note that a pass is over: those that have stepped aside for it are in use again."""
        self.batches.pop(use, None)
        self._aside.pop(use, None)
        self._since.pop(use, None)
        self._idle.discard(use)
        for since in self._since.values():
            since.discard(use)
        for other in [each for each, (_, by) in self._aside.items() if by is use]:
            self._returns(other)

"""Samples that are read one by one, as they are needed, and fill their blocks as they go by.

For a source with a latency, whose samples are requests of their own (a reader with a `flow`).
Threads read the samples that are wanted, in the order in which they were, and those that the filler
offers when no other waits: as many at a time as the flow says. A sample that was read is added to
the pieces of its block before it is handed out, and the block appears in its tier with its last
one. Among the processes of a node each sample is read by one: the others wait for it, or find it.
"""

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.abilities import estimates_sizes, reads_together
from dlio.data.flow import Flow
from dlio.data.reader import Reader
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.storage.arrivals import Arrivals
from dlio.storage.background import Background
from dlio.storage.counters import Counters
from dlio.storage.intake import Intake
from dlio.storage.notes import Notes
from dlio.storage.pieces import Pieces
from dlio.storage.room import Room
from dlio.storage.targets import Targets
from dlio.util.threads import Workers

__all__ = ["Gather", "locate"]

_POLL_S: Final = 0.002
_LOOK_S: Final = 0.2
_STOP_TIMEOUT_S: Final = 5.0
_TOGETHER: Final = 32
"""Samples of one request, of a data set that takes several at a time."""


@dataclass(slots=True, eq=False)
class _Task:
    """A sample that is to be read."""

    sample: int
    block: int
    place: int
    wanted: bool
    """Somebody is going to take it."""
    begun: bool = False
    done: bool = False
    """It can be taken, or has failed."""
    added: bool = False
    """It is done, and has been added to its block, if a tier keeps that."""
    payload: Buffer | None = None
    """The sample; None where it failed, or another process is reading it."""
    kind: str = "source"
    """The kind of the tier that it was found in, or `source`."""
    error: Exception | None = None
    ended: threading.Event | None = None
    """Set when it is done, once somebody waits for it."""


class Gather:
    """Reads samples and completes blocks with them. Thread-safe. Owner: the hierarchy.

    Invariant, under the lock: a sample in `_tasks` is queued or being read by one thread of
    this process, or being added to its block, or it is done and has not been taken. A task leaves
    `_tasks` only when it has been added; so no sample that is asked for again is read again.

    Args:
        intake: reads samples of the source; not owned.
        flow: limits the requests in flight.
    """

    def __init__(
        self,
        intake: Intake,
        flow: Flow,
        targets: Targets,
        arrivals: Arrivals,
        counters: Counters,
        notes: Notes,
    ) -> None:
        reader = intake.reader
        self._reader, self._flow, self._targets = reader, flow, targets
        self._intake = intake
        self._arrivals, self._counters, self._notes = arrivals, counters, notes
        self._most_together = _TOGETHER if reads_together(reader) else 1
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Threads that read wait for samples here; the filler waits in `_idle`."""
        self._idle = threading.Condition(self._lock)
        self._background = Background()
        self._paces = False
        """A thread waits until a sample that nobody waits for may be read."""
        self._tasks: dict[int, _Task] = {}
        self._queue: list[tuple[bool, int, _Task]] = []
        """A heap of (True if nobody waits for it, ticket, task); stale entries are passed over."""
        self._ticket = itertools.count()
        self._running = 0
        self._spare = 0
        """Tasks that are queued and that nobody waits for."""
        self._failed: set[int] = set()
        """Samples that could not be read, and are left to whoever needs them."""
        self._pieces = {
            number: Pieces(tier, reader.layout)
            for number, tier in enumerate(targets.tiers)
            if tier.writable
        }
        self._rooms = {n: Room(targets.tiers[n]) for n in self._pieces if estimates_sizes(reader)}
        self._own = threading.local()
        self._stopping = threading.Event()
        self._crew: list[Workers] = []
        self._grow()

    def expect(
        self,
        samples: Sequence[int],
        blocks: Sequence[int],
        places: Sequence[int],
    ) -> None:
        """Begin to read samples that are going to be taken, in this order."""
        for sample, block, place in zip(samples, blocks, places, strict=True):
            if self._gathers(block):
                with self._lock:
                    self._want(sample, block, place)

    def take(self, sample: int, block: int, place: int) -> tuple[Buffer, str] | None:
        """Return a sample's payload and where it came from, when it is here.

        None for a sample that is not gathered: its block is in a tier, or is streamed.

        Raises SourceError or CorruptBlock when it cannot be read, or not in time.
        """
        deadline = time.monotonic() + self._arrivals.fill_timeout_s
        # Those that were expected are here, though their blocks may have been completed since.
        while self._gathers(block) or self._expected(sample):
            task = self._awaited(sample, block, place, deadline)
            if task.error is not None:
                raise task.error
            if task.payload is not None:
                return task.payload, task.kind
            if time.monotonic() > deadline:
                self._notes.add(
                    f"a sample of block {block} of {self._reader.path} did not come within "
                    f"{self._arrivals.fill_timeout_s:.0f} s: the process that reads it is slow or "
                    "stopped; it is read once more"
                )
                return None
            time.sleep(_POLL_S)  # Another process of the node is reading it.
        return None

    def _expected(self, sample: int) -> bool:
        return bool(self._tasks) and os.getpid() == self._process and sample in self._tasks

    def _awaited(self, sample: int, block: int, place: int, deadline: float) -> _Task:
        """Return the task of a sample when it is done. Raises SourceError after the deadline."""
        with self._lock:
            task = self._want(sample, block, place)
            if not task.done and task.ended is None:
                task.ended = threading.Event()
        while not task.done:
            assert task.ended is not None
            if not task.ended.wait(_LOOK_S) and time.monotonic() > deadline:
                raise self._late(sample)
            if self._stopping.is_set() and not task.done:
                raise SourceError(f"sample {sample} was given up: the tiers are being closed")
        with self._lock:
            task.wanted = False
            if task.added and self._tasks.get(sample) is task:
                del self._tasks[sample]
        return task

    def forget(self, samples: Sequence[int]) -> None:
        """Let go of samples that were expected and are not going to be taken."""
        with self._lock:
            for sample in samples:
                task = self._tasks.get(sample)
                if task is None or not task.wanted or task.ended is not None:
                    continue
                task.wanted = False
                if task.added:
                    del self._tasks[task.sample]
                elif not task.begun:
                    del self._tasks[task.sample]
                    if self._targets.is_pinned(task.block):
                        self._add(_Task(task.sample, task.block, task.place, wanted=False))

    def offer(self, sample: int, block: int, place: int, closing: threading.Event) -> bool:
        """Have a sample read when there is nothing more urgent; waits while many are offered.

        False for one that need not be: it is here, or has failed.

        Args:
            closing: ends the waiting when it is set.
        """
        if not self._keeps(block) or sample in self._failed or self._has(block, place):
            return False
        with self._lock:
            while self._spare >= self._flow.most and not self._ends(closing):
                self._idle.wait(_LOOK_S)
            if sample not in self._tasks:
                self._add(_Task(sample, block, place, wanted=False))
        return True

    def drain(self, closing: threading.Event) -> None:
        """Wait until the samples that were offered have been read, or `closing` is set."""
        with self._lock:
            while (self._spare or self._running) and not self._ends(closing):
                self._idle.wait(_LOOK_S)

    def _ends(self, closing: threading.Event) -> bool:
        return self._stopping.is_set() or closing.is_set()

    def complete(self, block: int) -> bool:
        """Publish a block all of whose samples are here; True if it is in its tier, or never will
        be."""
        if not self._keeps(block):
            return True
        if self._arrivals.look(block) >= 0:
            return True
        number = self._targets.number(block)
        samples = self._reader.layout.samples_of(block).tolist()
        here = self._pieces[number].places(block)
        if len(here) == len(samples):
            self._finish(block, number)
            return not self._keeps(block)
        return all(n in self._failed for place, n in enumerate(samples) if place not in here)

    def stop(self) -> None:
        """End all waits; requests under way end by themselves."""
        self._stopping.set()
        with self._lock:
            self._work.notify_all()
            self._idle.notify_all()

    def close(self) -> None:
        """Stop after the requests under way. A source that hangs is not waited for."""
        self.stop()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for crew in self._crew:
            crew.close(max(0.0, deadline - time.monotonic()))
        for pieces in self._pieces.values():
            pieces.close()

    def _late(self, sample: int) -> SourceError:
        return SourceError(
            f"{self._reader.name(sample)} was not read within {self._arrivals.fill_timeout_s:.0f} "
            "s: the source hangs, or is slower than that (DLIO_FILL_TIMEOUT sets the deadline)"
        )

    def _gathers(self, block: int) -> bool:
        """True for a block that was not seen in a tier and that is not streamed, in the process
        that owns the threads."""
        if os.getpid() != self._process or self._arrivals.seen(block):
            return False
        return self._targets.is_pinned(block) or self._targets.number(block) < 0

    def _keeps(self, block: int) -> bool:
        """True for a block that is to be completed in its tier."""
        number = self._targets.number(block)
        return (
            self._targets.is_pinned(block)
            and number in self._pieces
            and self._arrivals.can_fill(block)
            and not self._arrivals.seen(block)
        )

    def _has(self, block: int, place: int) -> bool:
        return self._pieces[self._targets.number(block)].has(block, place)

    def _want(self, sample: int, block: int, place: int) -> _Task:
        """Return the task of a sample that somebody needs; made, or moved forward, if need be."""
        self._background.wanted()
        task = self._tasks.get(sample)
        if task is None or (task.added and not task.wanted):
            task = _Task(sample, block, place, wanted=True)
            self._add(task)
        elif not task.wanted:
            task.wanted = True
            if not task.begun:
                self._spare -= 1
                heapq.heappush(self._queue, (False, next(self._ticket), task))
        return task

    def _add(self, task: _Task) -> None:
        self._tasks[task.sample] = task
        self._spare += not task.wanted
        heapq.heappush(self._queue, (not task.wanted, next(self._ticket), task))
        self._work.notify()

    def _grow(self) -> None:
        """Have as many threads as there may be requests in flight."""
        missing = self._flow.limit - sum(map(len, self._crew))
        if missing > 0 and not self._stopping.is_set():
            crew = Workers(
                "dlio-gather", self._run, missing, wake=self.stop, stop_timeout_s=_STOP_TIMEOUT_S
            )
            self._crew.append(crew)
            with suppress(RuntimeError):  # The interpreter is ending: the others go on.
                crew.start()

    def _run(self, _: int) -> None:
        while (tasks := self._turn()) is not None:
            if tasks:
                self._read(tasks)
            del tasks  # A thread that waits holds no sample.

    def _turn(self) -> list[_Task] | None:
        """Return the next samples for one request; None at the end."""
        with self._lock:
            while not self._stopping.is_set():
                tasks: list[_Task] = []
                delay = self._background.delay()
                if self._running < self._flow.limit:
                    tasks = self._next(delay == 0.0)
                if tasks:
                    self._running += 1
                    if not tasks[0].wanted:
                        self._background.begins()
                    return tasks
                paces = 0.0 < delay < _LOOK_S and bool(self._queue) and not self._paces
                self._paces |= paces
                self._work.wait(delay if paces else _LOOK_S)
                self._paces &= not paces
            return None

    def _next(self, spare_too: bool) -> list[_Task]:
        tasks: list[_Task] = []
        while self._queue and len(tasks) < self._most_together:
            spare, _, task = self._queue[0]
            if task.begun or spare is task.wanted or self._tasks.get(task.sample) is not task:
                heapq.heappop(self._queue)  # It was moved forward, or forgotten.
                continue
            if spare and (not spare_too or (tasks and tasks[0].wanted)):
                break  # Those that somebody waits for do not wait for others.
            heapq.heappop(self._queue)
            task.begun = True
            self._spare -= spare
            tasks.append(task)
        return tasks

    def _read(self, tasks: list[_Task]) -> None:
        """Read the samples that no other process has or is reading; add them to their blocks."""
        mine: list[_Task] = []
        spare, began = not tasks[0].wanted, time.thread_time()
        try:
            mine += [task for task in tasks if self._claim(task)]
            if mine:
                self._ask(mine)
        except Exception as error:
            for task in mine:
                task.error = error
        finally:
            for task in mine:
                if self._targets.number(task.block) in self._pieces:
                    self._pieces[self._targets.number(task.block)].release(task.sample)
            self._done(tasks, spare, time.thread_time() - began)

    def _claim(self, task: _Task) -> bool:
        """True if this thread is to read the sample; otherwise it is here, or is being read."""
        if not self._keeps(task.block):
            # In its tier by now; or in no tier, so that its only reader is whoever wants it.
            return self._arrivals.look(task.block) < 0
        number = self._targets.number(task.block)
        pieces = self._pieces[number]
        if not pieces.claim(task.sample):
            return False
        # In this order: a block is published before its pieces are removed.
        if not pieces.has(task.block, task.place) and self._arrivals.look(task.block) < 0:
            return True
        if task.wanted:
            task.payload = pieces.read(task.block, task.place)
            task.kind = self._targets.tiers[number].kind
            if task.payload is None and self._arrivals.look(task.block) < 0:
                return True  # Damaged.
        pieces.release(task.sample)
        return False

    def _ask(self, tasks: list[_Task]) -> None:
        """Ask the source. An error of several samples is found with each on its own."""
        samples = np.array([task.sample for task in tasks], np.int64)
        began = self._flow.begins()
        try:
            payloads = self._intake.samples(samples, tasks[0].block)
        except (SourceError, CorruptBlock) as error:
            if len(tasks) == 1:
                tasks[0].error = error
                return
            for task in tasks:
                self._ask([task])
            return
        # All of this thread's work since its last request: where that is much, more threads gain
        # nothing.
        now = time.thread_time()
        computed, self._own.computed = now - getattr(self._own, "computed", 0.0), now
        self._flow.ends(began, computed, crowded=bool(self._queue))
        # Whoever waits for samples does not wait until they are in a tier.
        self._hand_over(tasks, payloads)
        for task, payload in zip(tasks, payloads, strict=True):
            self._counters.add_bytes("source", len(payload))
            if self._keeps(task.block):
                self._keep(task, payload)

    def _hand_over(self, tasks: Sequence[_Task], payloads: Sequence[Buffer]) -> None:
        with self._lock:
            for task, payload in zip(tasks, payloads, strict=True):
                task.payload = payload
                if task.wanted:
                    task.done = True
                    if task.ended is not None:
                        task.ended.set()

    def _keep(self, task: _Task, payload: Buffer) -> None:
        number = self._targets.number(task.block)
        try:
            if number in self._rooms:
                self._rooms[number].take(len(payload))
            if len(self._reader.layout.samples_of(task.block)) == 1:
                self._publish(task.block, number, lambda: [payload])  # A large one is copied once.
            elif self._pieces[number].add(task.block, task.place, payload):
                self._finish(task.block, number)
        except OSError as error:  # Of the tier; TierError is one.
            if not self._stopping.is_set():
                self._arrivals.fill_up(number, error)

    def _finish(self, block: int, number: int) -> None:
        """Make a block of its samples, all of which are here, and publish it."""
        pieces = self._pieces[number]
        self._publish(block, number, lambda: pieces.read_all(block), lambda: pieces.remove(block))

    def _publish(
        self,
        block: int,
        number: int,
        payloads: Callable[[], Sequence[Buffer] | None],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Put a block into its tier, unless another process or thread does so.

        Args:
            payloads: returns those of the block; None if they are not all there any more.
            then: called when the block is in the tier.
        """
        tier = self._targets.tiers[number]
        if not tier.claim(block):
            return
        try:
            if not tier.has(block):
                made = payloads()
                if made is None:
                    return
                self._arrivals.put(block, number, made)
            self._arrivals.look(block)
            then()
        finally:
            tier.release(block)

    def _done(self, tasks: list[_Task], spare: bool, computed_s: float) -> None:
        with self._lock:
            self._running -= 1
            if spare:
                self._background.ends(computed_s)
            for task in tasks:
                task.done = task.added = True
                if task.ended is not None:
                    task.ended.set()
                if task.error is not None:
                    self._failed.add(task.sample)
                if not task.wanted:
                    self._tasks.pop(task.sample, None)
            self._grow()
            free = self._flow.limit - self._running - 1
            if self._queue and free > 0:
                self._work.notify(free)
            self._idle.notify_all()


def locate(
    reader: Reader, samples: npt.NDArray[np.int64]
) -> tuple[list[int], list[int], list[int]]:
    """Return (samples, blocks, places) as `Gather.expect` takes them."""
    blocks, places = reader.layout.locate(samples)
    return samples.tolist(), blocks.tolist(), places.tolist()

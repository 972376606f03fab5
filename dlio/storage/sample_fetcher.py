"""The sample path: samples are read one by one, as they are needed, and make up their blocks.

    SampleFiller      offers the node's samples in the order of the epoch (a background thread)
    SampleFetcher     has each sample read once, those that somebody waits for first
    ReadQueue         the samples that are to be read, in the order in which they are read
    BackgroundLimit   leaves the processor and the storage to the trainer
    PartialBlocks     keeps samples until their block is complete (`dlio.storage.partial_blocks`)

Threads read the samples that are wanted, in the order in which they were, and those that the filler
offers when no other waits: as many at a time as the reader's `Flow` says. A sample that was read is
added to its block, and the block appears in its tier with its last one. Among the processes of a
node each sample is read by one: the others wait for it, or find it. `dlio.storage` says when this
path acts, and when `dlio.storage.block_fetcher` does.
"""

import heapq
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.flow import Flow
from dlio.data.reader_contract import Reader, abilities_of
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, TierFull
from dlio.plan.order import Order
from dlio.storage.block_fetcher import BlockFetcher, Fetcher, Filler
from dlio.storage.counters import RunNotes
from dlio.storage.partial_blocks import PartialBlocks
from dlio.storage.source_requests import SourceRequests, members
from dlio.storage.tier import Tier, TierTargets
from dlio.util.folders import file_sizes
from dlio.util.forks import new_lock
from dlio.util.threads import Workers
from dlio.util.units import format_bytes

# Constants

_SHARE: Final = 0.25
"""Of one processor, and of the requests in flight, for samples that nobody waits for."""
_RECENT_S: Final = 2.0
"""After this time without samples that somebody waits for, nothing is limited."""
_WEIGHT: Final = 0.2
"""Of the newest measurement in the mean."""
_TOGETHER: Final = 32
"""Samples of one request, at most."""
_RUN_BYTES: Final = 1 << 20
"""Bytes of neighbours that one request asks for, at most."""
_POLL_S: Final = 0.002
_LOOK_S: Final = 0.2
_STOP_TIMEOUT_S: Final = 5.0
_CALM: Final = 4
"""Divisor of the requests that may be in flight, while enough samples are ready."""
_CHUNK: Final = 1 << 10
"""Positions of the order that the filler looks at together."""
_FILLER_WAIT_S: Final = 0.05


# Limits


class BackgroundLimit:
    """Limits the requests that nobody waits for, while a trainer works. The caller holds a lock.

    Samples that are read ahead of all need fill tiers early, which hides a storage that is slow or
    uneven. Where it is fast, reading them is work of the processor rather than waiting, and takes
    the processors and the interpreter's lock from the trainer: such work may take a share of one
    processor. Where the storage's bandwidth is the limit, a rank that reads ahead takes it from the
    ranks that wait, for which it waits in turn: so few of its requests are in flight at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wanted_at = -_RECENT_S
        self._next_at = 0.0
        self._computed_s = 0.0
        """Mean processor time of a request."""
        self._running = 0

    def wanted(self) -> None:
        """Say that somebody waits, or is going to wait, for a sample, or takes one. No lock is
        needed."""
        # Taking counts, too: a rank with 5 s of announced batches left was idle by this measure,
        # read ahead without a limit, and had one late batch in the last steps of each epoch.
        self._wanted_at = self._clock()

    def delay(self) -> float:
        """Seconds until a request may begin; 0 for now."""
        return 0.0 if self._is_free() else max(0.0, self._next_at - self._clock())

    def has_room(self, most: int) -> bool:
        """True if fewer requests are in flight than may be, where `most` of all kinds may be."""
        return self._is_free() or self._running < max(1, int(_SHARE * most))

    def begins(self) -> None:
        """Say that a request begins."""
        self._running += 1
        self._next_at = max(self._next_at, self._clock()) + self._computed_s / _SHARE

    def ends(self, computed_s: float) -> None:
        """Say that a request has ended, and its processor time in seconds."""
        self._running -= 1
        self._computed_s += _WEIGHT * (computed_s - self._computed_s)

    def _is_free(self) -> bool:
        return self._clock() - self._wanted_at >= _RECENT_S


class TierRoom:
    """Keeps a tier within its capacity where sizes become known as samples come. Thread-safe.

    The folder is looked at again when half of the room that was left may be used up, so that
    processes that share it exceed the capacity by little.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = new_lock()
        self._left = 0
        """Bytes that may be added before the folder is looked at again."""

    def take(self, count: int) -> None:
        """Say that `count` bytes are added. Raises TierFull where the capacity is used up."""
        with self._lock:
            if self._left < count:
                room = self._tier.spec.capacity - sum(
                    file_sizes(self._tier.folder, ".blk", ".part")
                )
                if room < count:
                    raise TierFull(
                        f"tier {self._tier.path} has no room for more: samples are larger than the "
                        f"first ones, and its {format_bytes(self._tier.spec.capacity)} are used up"
                    )
                # Listing the folder takes longer with each block: it is not done for each sample.
                self._left = max(count, room // 2)
            self._left -= count


# The queue


@dataclass(slots=True, eq=False)
class SampleRead:
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
    """The kind of the tier that had it, or `source`."""
    error: Exception | None = None
    ended: threading.Event | None = None
    """Set when it is done, once somebody waits for it."""


class ReadQueue:
    """Samples that are queued, being read, or read and not taken yet. The caller holds a lock."""

    def __init__(self, reader: Reader) -> None:
        self._sizes = reader.sizes
        self._most = _TOGETHER if abilities_of(reader).multi_get else 1
        self._joins = not reader.objects and abilities_of(reader).random_access
        self._tasks: dict[int, SampleRead] = {}
        self._queue: list[tuple[bool, int, SampleRead]] = []
        """A heap of (True if nobody waits for it, ticket, task); stale entries are passed over."""
        self._ticket = itertools.count()
        self.spare = 0
        """Tasks that are queued and that nobody waits for."""
        self.ready = 0
        """Tasks that are done and that somebody is going to take."""

    def __contains__(self, sample: int) -> bool:
        return sample in self._tasks

    def holds(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the samples that have a task; None if none has. Needs no lock."""
        return members(self._tasks, samples) if self._tasks else None

    @property
    def queued(self) -> bool:
        """True if there may be something to read."""
        return bool(self._queue)

    def get(self, sample: int) -> SampleRead | None:
        """Return the task of a sample, if there is one."""
        return self._tasks.get(sample)

    def add(self, task: SampleRead) -> None:
        """Queue a new task, or one that is to be read again."""
        self._tasks[task.sample] = task
        self.spare += not task.wanted
        heapq.heappush(self._queue, (not task.wanted, next(self._ticket), task))

    def want(self, task: SampleRead) -> None:
        """Say that somebody is going to take a task's sample: if it is queued, it moves forward."""
        if not task.wanted:
            task.wanted = True
            self.ready += task.done
            if not task.begun:
                self.spare -= 1
                heapq.heappush(self._queue, (False, next(self._ticket), task))

    def let_go(self, task: SampleRead) -> None:
        """Say that nobody is going to take a task's sample any more; its task ends with that."""
        self.ready -= task.wanted and task.done
        task.wanted = False
        if task.added:
            self.remove(task)

    def finish(self, task: SampleRead) -> None:
        """Say that a task's sample can be taken, or has failed."""
        if not task.done:
            task.done = True
            self.ready += task.wanted
        if task.ended is not None:
            task.ended.set()

    def remove(self, task: SampleRead) -> None:
        """Forget a task, unless another one has taken its place."""
        if self._tasks.get(task.sample) is task:
            del self._tasks[task.sample]

    def begin(self, spare_too: bool) -> list[SampleRead]:
        """Return the tasks of the next request, which begins. With `spare_too` it may be of those
        that nobody waits for; never together with others."""
        tasks: list[SampleRead] = []
        while self._queue and len(tasks) < self._most:
            spare, _, task = self._queue[0]
            if task.begun or spare is task.wanted or self._tasks.get(task.sample) is not task:
                heapq.heappop(self._queue)  # It was moved forward, or forgotten.
                continue
            if spare and (not spare_too or (tasks and tasks[0].wanted)):
                break  # Those that somebody waits for do not wait for others.
            heapq.heappop(self._queue)
            for each in (task, *self._neighbours(task)):
                each.begun = True
                self.spare -= not each.wanted
                tasks.append(each)
        return tasks

    def _neighbours(self, first: SampleRead) -> list[SampleRead]:
        """Return the tasks of the samples that lie behind one in its block, for its request."""
        run: list[SampleRead] = []
        # Records that follow one another in a file take one request.
        size = int(self._sizes[first.sample]) if self._joins else _RUN_BYTES
        while size < _RUN_BYTES and len(run) + 1 < _TOGETHER:
            task = self._tasks.get(first.sample + len(run) + 1)
            if task is None or task.begun or task.block != first.block:
                break
            size += int(self._sizes[task.sample])
            if task.wanted is not first.wanted or size > _RUN_BYTES:
                break
            run.append(task)
        return run


def by_block(tasks: Sequence[SampleRead]) -> dict[int, list[SampleRead]]:
    """Group tasks by their blocks."""
    groups: dict[int, list[SampleRead]] = {}
    for task in tasks:
        groups.setdefault(task.block, []).append(task)
    return groups


# Fetching


class SampleFetcher(Fetcher):
    """Reads samples and completes blocks with them. Thread-safe. Owner: the hierarchy.

    Invariant, under the lock: a sample in `_tasks` is queued or being read by one thread of
    this process, or being added to its block, or it is done and has not been taken. A task leaves
    `_tasks` only when it has been added; so no sample that is asked for again is read again.
    """

    def __init__(
        self,
        requests: SourceRequests,
        flow: Flow,
        targets: TierTargets,
        blocks: BlockFetcher,
        notes: RunNotes,
    ) -> None:
        reader = requests.reader
        self._reader, self._flow, self._targets = reader, flow, targets
        self._requests = requests
        self._blocks, self._counters, self._notes = blocks, notes.counters, notes
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Threads that read wait for samples here; the filler waits in `_idle`."""
        self._idle = threading.Condition(self._lock)
        self._background = BackgroundLimit()
        self._paces = False
        """A thread waits until a sample that nobody waits for may be read."""
        self._tasks = ReadQueue(reader)
        self._taken: deque[SampleRead] = deque()
        """Tasks whose samples were taken, and which have not been let go of yet."""
        self._running = 0
        self._lacking = sys.maxsize
        """Samples beyond which no more are urgent; see `pace`."""
        self._failed: set[int] = set()
        """Samples that could not be read; whoever needs one gets the error."""
        self._pieces = {
            number: PartialBlocks(tier, reader)
            for number, tier in enumerate(targets.tiers)
            if tier.writable
        }
        self._rooms = {
            n: TierRoom(targets.tiers[n])
            for n in self._pieces
            if abilities_of(reader).sizes_are_estimates
        }
        # Processor time at the end of each thread's last request, see `_ask`.
        self._own = threading.local()
        self._stopping = threading.Event()
        self._crew: list[Workers] = []
        self._grow()

    def hurry(self, samples: npt.NDArray[np.int64], then: Callable[[], object]) -> None:
        """Begin to read the samples of a first batch, and call `then` now."""
        pins = self._targets.pinned[self._reader.layout.block_of(samples)]
        self.expect(samples[pins >= 0])  # Samples of streamed blocks come with these.
        then()

    def expect(self, samples: npt.NDArray[np.int64]) -> None:
        """Begin to read samples that are going to be taken, in this order."""
        if not len(samples):
            return
        whole = self._reader.layout.locate(samples)
        blocks, places = whole[0].tolist(), whole[1].tolist()
        fetches = {block: self._fetches(block) for block in set(blocks)}
        if not any(fetches.values()):
            return
        # All under one lock: with 32 reading threads that contend for it, announcing 400 samples
        # one by one took 0.7 s.
        with self._lock:
            self._release_taken()
            for sample, block, place in zip(samples.tolist(), blocks, places, strict=True):
                if fetches[block]:
                    self._want(sample, block, place)

    def pace(self, lacking: int) -> None:
        """Read few samples at a time while `lacking` of them are ready to be taken."""
        # A rank that is ahead leaves the storage to those that it is going to wait for, and the
        # interpreter's lock to its own threads that decode. Two ranks that share one bandwidth took
        # it from each other otherwise: an epoch of 19.8 s in place of 15.1.
        if os.getpid() != self._process:
            return  # A thread that this process lacks may have held the lock.
        with self._lock:
            self._release_taken()
            calm = self._is_calm()
            self._lacking = lacking
            if calm and not self._is_calm():
                self._work.notify_all()

    def take(self, sample: int, block: int, place: int) -> tuple[Buffer, str] | None:
        """Return a sample's payload and where it came from, when it is here.

        None for a sample that is not fetched alone: its block is in a tier, or is streamed.

        Raises SourceError or CorruptBlock when it cannot be read, or not in time.
        """
        self._background.wanted()
        ready = self._ready(sample)
        if ready is not None:
            return ready
        deadline = time.monotonic() + self._blocks.fill_timeout_s
        # Those that were expected are here, though their blocks may have been completed since.
        while self._fetches(block) or (os.getpid() == self._process and sample in self._tasks):
            task = self._awaited(sample, block, place, deadline)
            if task.error is not None:
                raise task.error
            if task.payload is not None:
                return task.payload, task.kind
            if time.monotonic() > deadline:
                self._notes.add(
                    f"a sample of block {block} of {self._reader.path} did not come within "
                    f"{self._blocks.fill_timeout_s:.0f} s: the process that reads it is slow or "
                    "stopped; it is read once more"
                )
                return None
            time.sleep(_POLL_S)  # Another process of the node is reading it.
        return None

    def holds(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the samples that were expected or offered, and not let go of yet."""
        self._background.wanted()  # As by `take`, for samples that are read without it.
        return self._tasks.holds(samples) if os.getpid() == self._process else None

    def _ready(self, sample: int) -> tuple[Buffer, str] | None:
        """Take a sample that is here, without the lock."""
        # With the lock, taking the 400 samples of a batch took 0.25 s: its owner waits for the
        # interpreter's, with 31 other threads.
        task = self._tasks.get(sample) if os.getpid() == self._process else None
        if task is None or not task.done or task.payload is None:
            return None
        payload = task.payload
        self._taken.append(task)
        return payload, task.kind

    def _release_taken(self) -> None:
        """Let go of the samples that were taken without the lock."""
        while self._taken:
            self._tasks.let_go(self._taken.popleft())

    def _awaited(self, sample: int, block: int, place: int, deadline: float) -> SampleRead:
        """Return the task of a sample when it is done. Raises SourceError after the deadline."""
        with self._lock:
            self._release_taken()
            task = self._want(sample, block, place)
            if not task.done and task.ended is None:
                task.ended = threading.Event()
        while not task.done:
            assert task.ended is not None
            if not task.ended.wait(_LOOK_S) and time.monotonic() > deadline:
                raise SourceError(
                    f"{self._reader.name(sample)} was not read within "
                    f"{self._blocks.fill_timeout_s:.0f} s: the source hangs, or is slower than "
                    "that (DLIO_FILL_TIMEOUT sets the deadline)"
                )
            if self._stopping.is_set() and not task.done:
                raise SourceError(f"sample {sample} was given up: the tiers are being closed")
        with self._lock:
            self._tasks.let_go(task)
        return task

    def forget(self, samples: npt.NDArray[np.int64]) -> None:
        """Let go of samples that were expected and are not going to be taken."""
        with self._lock:
            self._release_taken()
            for sample in samples.tolist():
                task = self._tasks.get(sample)
                if task is None or not task.wanted or task.ended is not None:
                    continue
                self._tasks.let_go(task)
                if not task.begun:
                    self._tasks.remove(task)
                    if self._targets.is_pinned(task.block):
                        self._add(SampleRead(task.sample, task.block, task.place, wanted=False))

    def offer(self, sample: int, block: int, place: int, closing: threading.Event) -> bool:
        """Queue a sample to be read when nothing is more urgent; waits while many are queued.

        False for one that need not be: it is here, or has failed. `closing` ends the waiting when
        it is set.
        """
        if not self._keeps(block) or sample in self._failed:
            return False
        if self._pieces[self._targets.number(block)].places(block, [place]):
            return False
        with self._lock:
            # No more are offered than can be in flight: wanted samples overtake them, but the queue
            # holds memory.
            while self._tasks.spare >= self._flow.most and not self._ends(closing):
                self._idle.wait(_LOOK_S)
            if sample not in self._tasks:
                self._add(SampleRead(sample, block, place, wanted=False))
        return True

    def drain(self, closing: threading.Event) -> None:
        """Wait until the samples that were offered have been read, or `closing` is set."""
        with self._lock:
            while (self._tasks.spare or self._running) and not self._ends(closing):
                self._idle.wait(_LOOK_S)
            self._release_taken()

    def _ends(self, closing: threading.Event) -> bool:
        return self._stopping.is_set() or closing.is_set()

    def complete(self, block: int) -> bool:
        """Publish a block all of whose samples are here; True if it is in its tier, or never will
        be."""
        if not self._keeps(block):
            return True
        if self._blocks.look(block) >= 0:
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

    def _fetches(self, block: int) -> bool:
        """True for a block that was not seen in a tier and that is not streamed, in the process
        that owns the threads."""
        if os.getpid() != self._process or self._blocks.seen(block):
            return False
        return self._targets.is_pinned(block) or self._targets.number(block) < 0

    def _keeps(self, block: int) -> bool:
        """True for a block that is to be completed in its tier."""
        number = self._targets.number(block)
        return (
            self._targets.is_pinned(block)
            and number in self._pieces
            and self._blocks.can_fill(block)
            and not self._blocks.seen(block)
        )

    def _want(self, sample: int, block: int, place: int) -> SampleRead:
        """Return the task of a sample that somebody needs; made, or moved forward, if need be."""
        self._background.wanted()
        task = self._tasks.get(sample)
        if task is None or (task.added and not task.wanted):
            task = SampleRead(sample, block, place, wanted=True)
            self._add(task)
        self._tasks.want(task)
        return task

    def _add(self, task: SampleRead) -> None:
        self._tasks.add(task)
        self._work.notify()

    def _grow(self) -> None:
        """Start threads until there are as many as there may be requests in flight."""
        # Threads are made as the flow raises its limit: beginning with 16 requests in place of 4
        # delayed the first batch from 0.8 to 1.4 s on two cores, since all wait for the
        # interpreter's lock.
        missing = self._flow.limit - sum(map(len, self._crew))
        if missing > 0 and not self._stopping.is_set():
            crew = Workers(
                "dlio-gather", self._run, missing, wake=self.stop, stop_timeout_s=_STOP_TIMEOUT_S
            )
            self._crew.append(crew)
            with suppress(RuntimeError):  # The interpreter is ending: the other threads suffice.
                crew.start()

    def _run(self, _: int) -> None:
        while (tasks := self._turn()) is not None:
            if tasks:
                self._read(tasks)
            del tasks  # A thread that waits holds no sample.

    def _turn(self) -> list[SampleRead] | None:
        """Return the next samples for one request; None at the end."""
        with self._lock:
            while not self._stopping.is_set():
                tasks: list[SampleRead] = []
                delay = self._background.delay()
                if self._running < self._limit():
                    room = self._background.has_room(self._flow.limit)
                    tasks = self._tasks.begin(spare_too=room and not delay)
                if tasks:
                    self._running += 1
                    if not tasks[0].wanted:
                        self._background.begins()
                    return tasks
                paces = 0.0 < delay < _LOOK_S and self._tasks.queued and not self._paces
                self._paces |= paces
                self._work.wait(delay if paces else _LOOK_S)
                self._paces &= not paces
            return None

    def _limit(self) -> int:
        return max(1, self._flow.limit // _CALM) if self._is_calm() else self._flow.limit

    def _is_calm(self) -> bool:
        return self._tasks.ready >= self._lacking

    def _read(self, tasks: list[SampleRead]) -> None:
        """Read the samples that no other process has or is reading; add them to their blocks."""
        mine: list[SampleRead] = []
        spare, began = not tasks[0].wanted, time.thread_time()
        try:
            for block, group in by_block(tasks).items():
                mine += self._claim(block, group)
            if mine:
                self._ask(mine)
        except Exception as error:
            for task in mine:
                task.error = error
        finally:
            for block, group in by_block(mine).items():
                number = self._targets.number(block)
                if number in self._pieces:
                    self._pieces[number].release([task.sample for task in group])
            self._done(tasks, spare, time.thread_time() - began)

    def _claim(self, block: int, tasks: list[SampleRead]) -> list[SampleRead]:
        """Return those samples of a block that this thread is to read: the others are here, or are
        being read."""
        if not self._keeps(block):
            # In its tier by now; or in no tier, so that its only reader is whoever wants it.
            return tasks if self._blocks.look(block) < 0 else []
        number = self._targets.number(block)
        pieces = self._pieces[number]
        free = set(pieces.claim([task.sample for task in tasks]))
        mine: list[SampleRead] = []
        try:
            claimed = [task for task in tasks if task.sample in free]
            # In this order: a block is published by giving its pieces another name.
            here = pieces.places(block, [task.place for task in claimed]) if claimed else set()
            left = [task for task in claimed if task.place not in here]
            if left and self._blocks.look(block) < 0:
                mine += left
            for task in claimed:
                if task.place in here and task.wanted:
                    task.payload = pieces.read(block, task.place)
                    task.kind = self._targets.tiers[number].kind
                    if task.payload is None and self._blocks.look(block) < 0:
                        mine.append(task)  # Damaged.
            return mine
        finally:
            pieces.release(sorted(free.difference(task.sample for task in mine)))

    def _ask(self, tasks: list[SampleRead]) -> None:
        """Ask the source. An error of several samples is found with each on its own."""
        samples = np.array([task.sample for task in tasks], np.int64)
        began = self._flow.begins()
        try:
            payloads = self._requests.samples(samples, tasks[0].block)
        except (SourceError, CorruptBlock) as error:
            # Of several, each is asked for again on its own, so that the error is that of the bad
            # one.
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
        self._flow.ends(began, computed, crowded=self._tasks.queued and not self._is_calm())
        # Whoever waits for samples does not wait until they are in a tier.
        with self._lock:
            for task, payload in zip(tasks, payloads, strict=True):
                task.payload = payload
                if task.wanted:
                    self._tasks.finish(task)
        blocks: dict[int, dict[int, Buffer]] = {}
        for task, payload in zip(tasks, payloads, strict=True):
            self._counters.add_bytes("source", len(payload))
            blocks.setdefault(task.block, {})[task.place] = payload
        for block, by_place in blocks.items():
            if self._keeps(block):
                self._keep(block, by_place)

    def _keep(self, block: int, samples: Mapping[int, Buffer]) -> None:
        """Add samples, by place, to their block."""
        number = self._targets.number(block)
        try:
            if number in self._rooms:
                self._rooms[number].take(sum(map(len, samples.values())))
            if len(self._reader.layout.samples_of(block)) == 1:
                # A large one is copied once.
                payloads = list(samples.values())
                self._publish(block, number, lambda: self._blocks.put(block, number, payloads))
            elif self._pieces[number].add(block, samples):
                self._finish(block, number)
        except OSError as error:  # Of the tier; TierError is one.
            if not self._stopping.is_set():
                self._blocks.fill_up(number, error)

    def _finish(self, block: int, number: int) -> None:
        """Make a block of its samples, all of which are here."""
        pieces = self._pieces[number]
        complete = partial(self._blocks.complete, block, number, pieces)
        self._publish(block, number, complete, partial(pieces.remove, block))

    def _publish(
        self,
        block: int,
        number: int,
        publish: Callable[[], None],
        published: Callable[[], None] = lambda: None,
    ) -> None:
        """Put a block into its tier, unless another process or thread does so. If the block is in
        the tier, `published` is called instead."""
        tier = self._targets.tiers[number]
        if not tier.claim(block):
            return
        try:
            (published if tier.has(block) else publish)()
            self._blocks.look(block)
        finally:
            tier.release(block)

    def _done(self, tasks: list[SampleRead], spare: bool, computed_s: float) -> None:
        with self._lock:
            self._release_taken()
            self._running -= 1
            if spare:
                self._background.ends(computed_s)
            for task in tasks:
                task.added = True
                self._tasks.finish(task)
                if task.error is not None:
                    self._failed.add(task.sample)
                if not task.wanted:
                    self._tasks.remove(task)
            self._grow()
            free = self._limit() - self._running - 1
            if self._tasks.queued and free > 0:
                self._work.notify(free)
            self._idle.notify_all()


# Filling in the background


class SampleFiller(Filler):
    """A filler of the sample path: one thread, which offers samples until their blocks are
    complete. `wanted` is a mask of the blocks."""

    def __init__(
        self, fetcher: SampleFetcher, reader: Reader, order: Order, wanted: npt.NDArray[np.bool_]
    ) -> None:
        self._fetcher, self._reader, self._order = fetcher, reader, order
        self._wanted = wanted
        super().__init__(threads=1)

    def _fill(self) -> None:
        for start in range(0, len(self._order), _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, len(self._order)), dtype=np.int64)
            self._offer(self._order.samples(positions))
        missing = np.flatnonzero(self._wanted).tolist()
        while not self._closing.is_set():
            self._fetcher.drain(self._closing)
            missing = [block for block in missing if not self._fetcher.complete(block)]
            if not missing:
                return
            # Samples that the order leaves out, or that another process was reading.
            for block in missing:
                self._offer(self._reader.layout.samples_of(block))
            self._closing.wait(_FILLER_WAIT_S)

    def _offer(self, samples: npt.NDArray[np.int64]) -> None:
        blocks, places = self._reader.layout.locate(samples)
        here = self._wanted[blocks]
        rows = (samples[here].tolist(), blocks[here].tolist(), places[here].tolist())
        for sample, block, place in zip(*rows, strict=True):
            if self._closing.is_set():
                return
            self._fetcher.offer(sample, block, place, self._closing)

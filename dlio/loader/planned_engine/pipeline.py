"""The pipeline: an epoch's steps become batches, made by threads ahead of their use.

The user's thread takes batches in order and, each time, begins another step. Native threads make
the samples whose place is known, if they know how: one call submits a batch of them, one waits for
it. All others go through a queue to decode threads of Python, and so do those that native threads
give back. Threads take samples, not batches, so that one slow sample delays no other. Samples from
peers are queued by the shuffle's thread when they arrive. Both queues are ordered by step.

    Shuffle.attach -> NativePool.submit -> native threads -> _collect ->  Batch.done -> take -> user
              or   -> queue of parts    -> decode threads            ->

A batch lives in memory of a pool. Its tensors are handed to the user without a copy, and the
memory is used again only when nobody holds them any more: a steady epoch allocates nothing, and
`list(loader)` is safe.

A thread puts whatever is raised in its batch's place, SystemExit and CancelledError of a user's
transform included: if they ended the thread, the user's would wait for its batch until a deadline.
"""

import ctypes
import itertools
import queue
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.comm.funnel import wait_serving
from dlio.data.schema import Buffer
from dlio.errors import CommTimeout, CorruptBlock, DlioError, SourceError
from dlio.image.image_warnings import WARNINGS
from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.contract import BatchData
from dlio.loader.passes import PassCounters
from dlio.loader.planned_engine.batch_builders import BatchBuilder, BatchFactory
from dlio.loader.planned_engine.mixup_partners import BatchPartners
from dlio.loader.planned_engine.native_pool import (
    ARRIVED,
    DECODED,
    NativeArrays,
    NativeInput,
    NativeJob,
    NativePool,
    arrived_locations,
)
from dlio.loader.shuffle.sample_message import UncheckedPayload
from dlio.loader.shuffle.sample_shuffle import Shuffle, StepSamples
from dlio.loader.trace import Spans
from dlio.storage.block import PayloadScratch
from dlio.storage.hierarchy import Hierarchy
from dlio.util.caller_modes import CallerModes
from dlio.util.threads import Workers

# A thread that gives the interpreter's lock up waits for it behind all others: with 16 threads, a
# call for each sample made 3,090 samples/s, tasks of 8 by one call 5,600 (docs/LOG.md, #gpu-26).
_SAMPLES_A_TASK = 8
"""At most; fewer of a small batch, so that all threads work on it, and end together."""
_LARGE_BYTES: Final = 512 << 10
"""Larger samples are read and made one at a time, so that a thread's memory stays small."""
_POLL_S = 0.2
_MOST_REFUSED = 1 / 16
"""Share of samples that native threads leave, beyond which it takes several of Python's."""
_NO_TIER: Final = {ARRIVED: "peer", -1: "source"}
_LEAST_READY = 2
"""Batches of which the samples are urgent, at least."""
_SKIPPED: Final = (SourceError, CorruptBlock)
"""Errors that on_error="skip" leaves out: samples that cannot be read, checked or decoded."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """The work on a pass's samples, the same for all its steps. Made by the engine."""

    hierarchy: Hierarchy
    factory: BatchFactory
    counters: PassCounters
    spans: Spans | None
    """Trace of the pass, if one is wanted."""
    epoch: int
    """Number of the epoch, for crops."""
    steps: int
    threads: int
    pool: NativePool | None
    """Native threads, which other passes may use as well; None without any."""
    order: int
    """Of the first batch, among those of the pool's passes: lower ones are made first."""
    ahead: int
    """Batches under way at a time."""
    together: int
    """Batches that may be made as one, at most."""
    skip: bool
    """Leave out samples that cannot be read, checked or decoded."""
    timeout_s: float
    """For one batch, before the run is taken to be stuck."""
    peer_timeout_s: float
    """For samples from a peer, before they are read from the source."""
    partners_of: Callable[[int, npt.NDArray[np.int64]], BatchPartners] | None = None
    """Returns the partners of a step's samples, if batches are mixed."""


@dataclass(slots=True)
class Batch:
    """One step's samples of this rank, or those of several, on their way to becoming tensors."""

    step: StepSamples
    """Of several steps, that of the last has the samples of all."""
    sizes: list[int]
    """Samples of each step."""
    builder: BatchBuilder | None
    """Holds the batch's memory, until `data` is made of it; from then on the user's tensors alone
    may hold it."""
    failed: dict[int, BaseException]
    """Error of each slot that failed; slot -1 is the whole batch."""
    left: int
    """Samples that are not made yet."""
    jobs: list[NativeJob] = field(default_factory=list)
    """Parts that native threads are making."""
    data: list[BatchData] = field(default_factory=list)
    """The finished batches, one for each step; None for those that failed."""
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def let_go(self) -> None:
        """Forget what it is made of: it and the listener of its step refer to each other, and would
        hold the memory, 19 MB of 128 pictures, until Python looks for cycles."""
        self.step.listener = None
        self.data.clear()

    def slots(self) -> list[range]:
        """Return the slots of each step."""
        ends = list(itertools.accumulate(self.sizes))
        return [range(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def failed_of(self, slots: range) -> dict[int, BaseException]:
        """Return the errors of a step's slots, and that of the whole."""
        if len(self.sizes) == 1:
            return self.failed
        return {slot: each for slot, each in self.failed.items() if slot in slots or slot == -1}


_StageSeconds = defaultdict[str, float]


class _Work(IntEnum):
    """Work of a decode thread on slots of a batch."""

    MAKE = 0
    FIND = 1
    """Look them up on a device, and queue the others."""
    TRANSFORM = 2
    """Do the user's transform: native threads have made the crops."""
    FINISH = 3
    """Make the batch of its slots."""


_Task = tuple[int, int, Batch | None, list[int], _Work]
"""(step, ticket, batch or None to end a thread, slots, the work on them)."""


class Pipeline:
    """Batches of one epoch, in order. Owner: the engine, which closes it.

    While at least half of the batches ahead are complete, one thread works; the others leave the
    processors and the interpreter's lock to the trainer until fewer are. While there are samples
    for a quarter, and at least two, few requests are sent to the source at a time.
    """

    def __init__(self, shuffle: Shuffle, context: PassContext) -> None:
        self._shuffle, self._context = shuffle, context
        self._hierarchy, self._clock = context.hierarchy, context.counters.clock
        # Ordered by step, not by arrival: a sample that a peer sends late for the next batch goes
        # before samples of later ones.
        self._queue: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._ticket = itertools.count()
        self._under_way: deque[Batch] = deque()
        self._next_step = 0
        self._taken_steps = 0
        self._together = 1
        """Steps that are begun as one: more from one to the next, so that the first batch comes
        soon."""
        self._is_native = False
        """The batch that was begun last was left to native threads as a whole, none of whose reads
        waits for another batch to begin."""
        self._late = 0
        """Batches under way that are only read: the user's thread hands what native threads have
        read to Python's when it takes the next batch, and they would rest until then."""
        self._lock = threading.Lock()
        self._complete = 0
        """Batches that are done, and not taken yet."""
        self._hierarchy.fetcher.pace(sys.maxsize)  # Another pass may have had samples enough.
        self._hurry = threading.Event()
        self._hurry.set()
        self._pool, self._ended = context.pool, ctypes.c_int64(0)
        # For the samples that native threads leave, one is enough as long as it is little.
        first = context.threads if self._pool is None else 1
        self._modes = CallerModes()  # For the user's functions.
        run = self._modes.within(self._run)
        self._workers = Workers("dlio-decode", run, first, wake=self._wake)
        self._workers.start()
        context.counters.python_threads.extend(self._workers.threads)
        self._others: Workers | None = None

    # The user's thread

    def start(self) -> None:
        """Begin batches until as many are under way as may be."""
        context = self._context
        ahead = max(context.ahead, 2 * self._together) + self._late
        is_native = self._is_native and not self._late
        if is_native and 2 * (self._next_step - self._taken_steps) > ahead:
            # Several are begun one after another: the first finds the processor's caches full of
            # other data, and takes as long as three that follow it.
            return
        while self._next_step < min(self._taken_steps + ahead, context.steps):
            # With batches under way, the next window may wait for one of them to be taken: waiting
            # for it here deadlocked with windows of two steps.
            if self._under_way and not self._shuffle.planned(self._next_step):
                break
            if not self._begin_several():
                self._shuffle.attach(self._next_step, self._begin_batch, context.timeout_s)
                self._next_step += 1
            # Batches whose samples are brought first are not to wait for others.
            self._together = min(4 * self._together, context.together) if self._is_native else 1

    def _begin_several(self) -> bool:
        """Begin the batches of the next steps as one, if that may be."""
        steps: list[StepSamples] = []
        if self._together > 1:
            steps = self._shuffle.take_own(self._next_step, self._together)
        if not steps:
            return False
        samples, blocks, places, senders = (
            np.concatenate([getattr(step, name) for step in steps])
            for name in ("samples", "blocks", "places", "senders")
        )
        payloads: list[UncheckedPayload | None] = [None] * len(samples)
        whole = StepSamples(
            steps[-1].number, samples, blocks, places, senders, payloads, is_own=True
        )
        queue_slots = self._begin_batch(whole, [len(step.samples) for step in steps])
        queue_slots(range(len(samples)))
        self._next_step += len(steps)
        return True

    def batches(self, taken: Callable[[int], None]) -> BatchStream:
        """Yield the batches in order, or the error in a batch's place. `taken` is called with the
        number of each step when its batch is complete."""
        while True:
            self.start()
            if not self._under_way:
                return
            self._wait(self._under_way[0])
            batch = self._under_way.popleft()
            self._completed(batch, -1)
            self._shuffle.consumed(batch.step.number)
            self._taken_steps += len(batch.sizes)
            taken(batch.step.number)
            results = [self._result(batch, *each) for each in enumerate(batch.slots())]
            batch.let_go()
            del batch  # It would hold the user's tensors while this generator rests.
            results.reverse()
            while results:
                yield results.pop()

    def _result(self, batch: Batch, part: int, slots: range) -> BatchResult:
        """Return one of a batch's batches as it is handed out, or the error in its place."""
        name, count = self._hierarchy.reader.name, len(slots)
        samples = batch.step.samples[slots.start : slots.stop]
        failed = batch.failed and batch.failed_of(slots)
        if failed:
            error = _first_failure(failed)
            if self._is_lost(failed):
                slot = min(failed)
                is_named = isinstance(error, _SKIPPED) or getattr(error, "__notes__", None)
                if slot >= 0 and not is_named:
                    error.add_note(f"for sample {name(int(batch.step.samples[slot]))!r}")
                return BatchResult(None, count, samples, error)
            for slot in sorted(failed):
                self._context.counters.skipped.append(name(int(batch.step.samples[slot])))
            samples = batch.step.samples[list(_intact(slots, failed))]
        warned = WARNINGS.among(self._hierarchy.reader, samples)
        self._context.counters.warned += map(name, warned)
        return BatchResult(batch.data[part], len(samples), samples, epoch=self._context.epoch)

    def close(self) -> None:
        """Stop the threads after the task that each is at."""
        if not len(self._workers):
            return  # Of a forked child, which may end without most of Python.
        self._workers.close()
        if self._others is not None:
            self._others.close()
        self._shuffle.close()
        if self._pool is not None:  # Nobody submits to it any more.
            self._pool.give_up([job for batch in self._under_way for job in batch.jobs])
        self._hierarchy.fetcher.pace(sys.maxsize)
        for batch in self._under_way:
            self._hierarchy.fetcher.forget(batch.step.samples)
            batch.let_go()

    def _wait(self, batch: Batch) -> None:
        started = time.monotonic()
        gave_up = False
        while not wait_serving(partial(self._is_done, batch), _POLL_S):
            waited = time.monotonic() - started
            if waited > self._context.peer_timeout_s and not gave_up:
                self._shuffle.give_up(batch.step.number)
                gave_up = True
            if waited > self._context.timeout_s:
                raise CommTimeout(
                    f"step {batch.step.number} was not complete after {waited:.0f} s, "
                    f"{batch.left} of its samples are still being read: the source "
                    f"{self._hierarchy.reader.path} may hang (DLIO_TIMEOUT sets the deadline)"
                )
            if self._workers.stopping.is_set():
                raise DlioError("the loader was closed while a batch was awaited: keep it open")
            self._shuffle.check()

    def _is_done(self, batch: Batch, timeout_s: float) -> bool:
        """Wait for a batch, or for a part of any; True if the batch is done."""
        if self._pool is not None:
            for each in self._under_way:
                if any(not job.c.left for job in each.jobs):
                    self._collect(each)
                elif each.jobs and not each.jobs[-1].c.next:
                    break  # Of dozens of batches, those behind it have not begun either.
            if not batch.done.is_set():
                # Samples that arrive may begin a job meanwhile; a batch that is done ends this.
                self._pool.wait(None, timeout_s, self._ended)
            return batch.done.is_set()
        return batch.done.wait(timeout_s)

    def _submit(self, batch: Batch, slots: Sequence[int]) -> Sequence[int]:
        """Have native threads make those of a batch's slots that they can; return the others."""
        builder, recipe, step = batch.builder, self._context.factory.native, batch.step
        if self._pool is None or recipe is None or not recipe.pays:
            return slots
        if builder is None or (memory := builder.native) is None or not slots:
            return slots
        # As numbers one by one, a range takes longer than all the rest.
        if isinstance(slots, range):
            rows = np.arange(slots.start, slots.stop)
        else:
            rows = np.array(slots, np.int64)
        if builder.has_inputs:
            return self._submit_part(batch, builder, builder.native_input(rows), memory)
        if not step.is_own and (step.senders[rows] >= 0).any():
            # A message brings samples of one kind alone: those of its sender.
            here = np.array([slot for slot in slots if step.payloads[slot] is not None], np.int64)
            sent = arrived_locations([step.payloads[slot] for slot in here.tolist()])
            arrived = NativeInput(here, sent, step.blocks[here], self._hierarchy)
            self._submit_part(batch, builder, arrived, memory)
            rows = np.setdiff1d(rows, here)
        where = step.samples, step.blocks, step.places
        if not isinstance(slots, range) or len(slots) < len(step.samples):
            where = step.samples[rows], step.blocks[rows], step.places[rows]
        located = self._hierarchy.locate(*where)
        given = NativeInput(rows, located, where[1], self._hierarchy)
        return self._submit_part(batch, builder, given, memory)

    def _submit_part(
        self, batch: Batch, builder: BatchBuilder, given: NativeInput, memory: NativeArrays
    ) -> list[int]:
        """Have native threads make those of the slots that are known; return the others."""
        pool, recipe = self._pool, self._context.factory.native
        assert pool is not None
        assert recipe is not None
        known = given.known()
        if known.any():
            builder.make_room(given, known)
            order = self._context.order + batch.step.number
            job = NativeJob(recipe, order, given, memory, pool.threads, known)
            batch.jobs.append(job)
            pool.submit(job)
        if known.all():
            return []
        return list(map(int, np.unique(given.slots[~known])))

    def _collect(self, batch: Batch) -> None:
        """Count the samples of a batch that native threads have made, and queue the others."""
        pool, recipe = self._pool, self._context.factory.native
        assert pool is not None
        assert recipe is not None
        for job in [job for job in batch.jobs if pool.has_ended(job)]:
            batch.jobs.remove(job)
            hierarchy = job.hierarchy or self._hierarchy
            refused = job.refused()
            if refused:
                # Native threads would leave the same samples again.
                recipe.count(job.slots, len(refused))
                hierarchy.failed(job.unread())
                if recipe.refused > _MOST_REFUSED * recipe.tried:
                    self._begin_others()
                self._queue_parts(batch, refused)
            spent: _StageSeconds = defaultdict(float)
            spent["decode"] = job.make_s
            made = job.slots - len(refused)
            if (batch.step.senders >= 0).any():
                for slot in job.made():
                    # A message's memory goes with its last sample.
                    batch.step.payloads[slot] = None
            for tier, count in job.bytes_by_tier().items():
                if tier == DECODED:
                    self._hierarchy.counters.add("decoded", made)
                    self._hierarchy.counters.add("decode_saved_s", made * job.saved_s)
                    continue
                place = _NO_TIER.get(tier) or hierarchy.tiers[tier].kind
                hierarchy.counters.add_bytes(place, count)
                if place == "source":
                    hierarchy.counters.add("single_bytes", count)
                # Nearly all samples of a batch are in one tier.
                spent[place] += job.read_s * count / job.payload_bytes
            # A batch without any that is made may be done by now.
            if made and batch.builder is not None and batch.builder.transforms:
                self._clock.add_all(spent)
                self._begin_others()
                self._queue_parts(batch, job.made(), _Work.TRANSFORM)
            elif made:
                later = batch.builder is not None and batch.builder.finishes_slowly
                self._made(batch, made, job.began, spent, later)

    def _begin_others(self) -> None:
        """Start those of Python's threads that are not needed while native threads do it all."""
        with self._lock:  # The shuffle's thread calls it, too.
            if self._pool is not None and self._others is None:
                more = self._context.threads - 1
                self._others = Workers(
                    "dlio-decode-more", self._modes.within(self._run_other), more
                )
                self._others.start()
                self._context.counters.python_threads.extend(self._others.threads)

    def _begin_batch(
        self, step: StepSamples, sizes: list[int] | None = None
    ) -> Callable[[Sequence[int]], None]:
        """Begin a step's batch, or those of several steps of such sizes; return the listener that
        queues its slots."""
        context, count = self._context, len(step.samples)
        partners = None
        if context.partners_of is not None:
            partners = context.partners_of(step.number, step.samples)
        sizes = sizes or [count]
        builder = context.factory.begin(context.epoch, step.samples, sizes, partners)
        batch = Batch(step, sizes, builder, builder.failed, count)
        # The listener below lives as long as the step, and must not hold the builder: the memory
        # would not return to the pool with the user's tensors.
        may_be_decoded, finds_whole = builder.may_be_decoded, builder.finds_whole
        if count == 0:
            self._finish(batch)
        self._under_way.append(batch)
        self._is_native = False
        self._late = int(builder.native is not None and builder.transforms)

        def queue_slots(ready: Sequence[int]) -> None:
            slots = list(self._submit(batch, ready))
            self._is_native = not slots
            if len(slots) > _MOST_REFUSED * count:
                self._begin_others()
            if not may_be_decoded:
                missing = [slot for slot in slots if step.payloads[slot] is None]
                self._hierarchy.fetcher.expect(step.samples[missing])
            if finds_whole:
                self._queue.put((step.number, next(self._ticket), batch, slots, _Work.FIND))
            else:
                self._queue_parts(batch, slots)

        return queue_slots

    def _queue_parts(self, batch: Batch, slots: list[int], work: _Work = _Work.MAKE) -> None:
        count, threads = len(batch.step.samples), self._context.threads
        each = min(_SAMPLES_A_TASK, max(1, count // threads))
        if work is _Work.TRANSFORM:  # In halves of a thread's share: a task takes 20 µs of its own.
            each = max(each, -(-count // (2 * threads)))
        for start in range(0, len(slots), each):
            part = slots[start : start + each]
            self._queue.put((batch.step.number, next(self._ticket), batch, part, work))

    def _completed(self, batch: Batch, sign: int) -> None:
        """Count the batches of one that is done, or taken: 1 or -1."""
        ahead = self._context.ahead
        with self._lock:
            self._complete += sign * len(batch.sizes)
            lacking = max(_LEAST_READY, ahead // 4) - self._complete
            self._hierarchy.fetcher.pace(max(0, lacking) * batch.sizes[0])
            if 2 * self._complete < ahead or self._workers.stopping.is_set():
                self._hurry.set()
            else:
                self._hurry.clear()

    def _wake(self) -> None:
        with self._lock:  # From now on `_completed` does not clear it.
            self._hurry.set()
        for _ in range(self._context.threads):
            self._queue.put((-1, next(self._ticket), None, [], _Work.MAKE))

    # Decode threads

    def _run_other(self, number: int) -> None:
        self._run(number + 1)

    def _run(self, number: int) -> None:
        scratch: list[PayloadScratch | None] = [PayloadScratch() for _ in range(_SAMPLES_A_TASK)]
        if self._context.factory.keeps_payloads:
            scratch = [None] * _SAMPLES_A_TASK
        while not self._workers.stopping.is_set():
            _, _, batch, slots, work = self._queue.get()
            if batch is None:
                return
            if number and not self._hurry.is_set():
                # For the first thread, or for all when there is a hurry. Threads that decode delay
                # a training loop, which gives up the lock in each operation: a ResNet-50 ran at
                # 0.32 to 0.43 of its speed next to 16 of them.
                self._queue.put((batch.step.number, next(self._ticket), batch, slots, work))
                del batch  # An idle thread that held it would keep its memory, and its errors.
                self._hurry.wait()
                continue
            self._hierarchy.counters.take_waits()  # Of other work of this thread.
            began = time.perf_counter()
            spent: _StageSeconds = defaultdict(float)
            if work is _Work.FIND:
                slots = self._find(batch, slots, spent)
            elif work is _Work.TRANSFORM:
                assert batch.builder is not None
                try:
                    spent["transform"] = batch.builder.transform(slots)
                except BaseException as error:
                    batch.failed.update(dict.fromkeys(slots, error))
                spent["decode"] = time.perf_counter() - began - spent["transform"]
            elif work is _Work.FINISH:
                self._finish(batch)
            else:
                self._make(batch, slots, scratch, spent)
            if slots:
                self._made(batch, len(slots), began, spent)
            if self._pool is not None and batch.done.is_set():
                self._pool.wake()  # The user's thread waits for native threads.
            del batch

    def _made(
        self, batch: Batch, count: int, began: float, spent: _StageSeconds, later: bool = False
    ) -> None:
        """Count slots that are made; finish the batch with the last, or queue that for `later`."""
        with batch.lock:
            batch.left -= count
            is_last = batch.left == 0
        self._clock.add_all(spent)
        if self._context.spans is not None:
            self._context.spans.add("decode", began, step=batch.step.number, samples=count)
        if is_last and later:
            self._begin_others()
            self._queue.put((batch.step.number, next(self._ticket), batch, [], _Work.FINISH))
        elif is_last:
            self._finish(batch)

    def _find(self, batch: Batch, slots: list[int], spent: _StageSeconds) -> list[int]:
        """Take those of the samples that a device has; queue the others. Return the slots taken."""
        assert batch.builder is not None
        rest = self._take(batch, slots, batch.builder.find, spent)
        others = set(rest)
        self._queue_parts(batch, rest)
        return [slot for slot in slots if slot not in others]

    def _make(
        self,
        batch: Batch,
        slots: list[int],
        scratch: Sequence[PayloadScratch | None],
        spent: _StageSeconds,
    ) -> None:
        """Make samples in their slots: from the first of five places that has each, which are a
        tier of decoded images, a peer, and the three that `Hierarchy.read` knows."""
        builder, step = batch.builder, batch.step
        assert builder is not None
        if builder.may_be_decoded:
            slots = self._take(batch, slots, builder.take_decoded, spent)
        # One by one unless the kind gains from more: a payload is decoded while it is in the cache.
        groups = [[slot] for slot in slots]
        if builder.makes_together and len(slots) > 1:
            sizes = self._hierarchy.reader.sizes[step.samples[slots]].tolist()
            is_large = [size > _LARGE_BYTES for size in sizes]
            small = [slot for slot, large in zip(slots, is_large, strict=True) if not large]
            groups = [small] if small else []
            groups += [[slot] for slot, large in zip(slots, is_large, strict=True) if large]
        for group in groups:
            if builder.reads_directly and step.payloads[group[0]] is None:
                self._read_directly(batch, builder, group[0], spent)
                continue
            there, payloads = [], []
            for slot, own in zip(group, scratch, strict=False):
                try:
                    payloads.append(self._payload(step, slot, own, spent))
                    there.append(slot)
                except BaseException as error:
                    batch.failed[slot] = error
            if not there:
                continue
            began, transforming = time.perf_counter(), 0.0
            try:
                transforming = builder.make_many(there, payloads)
            except BaseException as error:
                batch.failed.update(dict.fromkeys(there, error))
            self._spend("decode", time.perf_counter() - began - transforming, spent)
            if transforming:
                spent["transform"] += transforming

    def _take(
        self,
        batch: Batch,
        slots: list[int],
        take: Callable[[list[int]], tuple[list[int], float]],
        spent: _StageSeconds,
    ) -> list[int]:
        """Make those of the samples that a tier keeps decoded; return the other slots."""
        began = time.perf_counter()
        try:
            rest, saved_s = take(slots)
        except BaseException as error:
            batch.failed.update(dict.fromkeys(slots, error))
            return []
        if len(rest) < len(slots):
            for slot in set(slots).difference(rest):
                batch.step.payloads[slot] = None  # A message's memory goes with its last sample.
            counters = self._hierarchy.counters
            counters.add("decoded", len(slots) - len(rest))
            counters.add("decode_saved_s", saved_s)
        spent["decode"] += time.perf_counter() - began
        return rest

    def _payload(
        self,
        step: StepSamples,
        slot: int,
        scratch: PayloadScratch | None,
        spent: _StageSeconds,
    ) -> Buffer:
        """Return a sample's payload from the first of three places that has it."""
        began = time.perf_counter()
        hierarchy = self._hierarchy
        payload = self._sent(step, slot) if step.payloads[slot] is not None else None
        place = "peer"
        if payload is None:
            payload, place = hierarchy.read(
                int(step.samples[slot]), int(step.blocks[slot]), int(step.places[slot]), scratch
            )
        if place != "source":  # Reads of the source are counted where they happen.
            hierarchy.counters.add_bytes(place, len(payload))
        self._spend(place, time.perf_counter() - began, spent)
        return payload

    def _spend(self, stage: str, seconds: float, spent: _StageSeconds) -> None:
        """Count a piece of work, without the reads within it: these are of other stages."""
        for place, waited_s in self._hierarchy.counters.take_waits().items():
            spent[place] += waited_s
            seconds -= waited_s
        spent[stage] += seconds

    def _sent(self, step: StepSamples, slot: int) -> Buffer | None:
        """Return the payload that a peer sent; None if it was damaged or given up."""
        sealed = step.payloads[slot]
        step.payloads[slot] = None  # The message's memory goes with its last sample.
        payload: Buffer | None = None if sealed is None else sealed.open()
        if payload is None:
            self._hierarchy.counters.add("late")
        return payload

    def _read_directly(
        self, batch: Batch, builder: BatchBuilder, slot: int, spent: _StageSeconds
    ) -> None:
        """Read a payload directly into the batch's memory."""
        began, step, hierarchy = time.perf_counter(), batch.step, self._hierarchy
        where = int(step.samples[slot]), int(step.blocks[slot]), int(step.places[slot])
        try:
            place, count = builder.read_directly(
                slot, lambda into: hierarchy.read_into(*where, into)
            )
        except BaseException as error:
            batch.failed[slot] = error
            return
        if place != "source":
            hierarchy.counters.add_bytes(place, count)
        self._spend(place, time.perf_counter() - began, spent)

    def _finish(self, batch: Batch) -> None:
        """Make the batch of its slots, and mark it as done."""
        began = time.perf_counter()
        try:
            builder = batch.builder
            assert builder is not None
            if builder.decodes_whole and not self._is_lost(batch.failed):
                builder.decode_whole(_intact(range(len(batch.step.samples)), batch.failed))
                settled = time.perf_counter()
                self._clock.add("decode", settled - began)
                began = settled
            is_whole = len(batch.sizes) == 1 and not batch.failed
            for slots in batch.slots():
                failed = batch.failed and batch.failed_of(slots)
                data = None
                if not self._is_lost(failed):
                    data = builder.finish(None if is_whole else _intact(slots, failed))
                batch.data.append(data)
        except BaseException as error:
            batch.failed = {-1: error}
            if isinstance(error, KeyboardInterrupt):
                raise  # Of the user's thread, which alone gets it.
        finally:
            batch.builder = None  # From now on the batch's tensors alone hold its memory.
            self._clock.add("collate", time.perf_counter() - began)
            self._completed(batch, 1)
            batch.done.set()

    def _is_lost(self, failed: dict[int, BaseException]) -> bool:
        """True if a batch failed as a whole, or a sample that may not be left out."""
        return bool(failed) and (
            -1 in failed
            or not (self._context.skip and isinstance(_first_failure(failed), _SKIPPED))
        )


def _intact(slots: range, failed: dict[int, BaseException]) -> Sequence[int]:
    """Return the slots that have not failed."""
    return [k for k in slots if k not in failed] if failed else slots


def _first_failure(failed: dict[int, BaseException]) -> BaseException:
    """Return the failure of the first slot; the user's own errors before dlio's, which may be
    their consequence."""
    errors = [failed[slot] for slot in sorted(failed)]
    return next((error for error in errors if not isinstance(error, DlioError)), errors[0])

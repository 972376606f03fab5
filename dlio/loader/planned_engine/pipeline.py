"""The pipeline: an epoch's steps become batches, decoded by threads ahead of their use.

The user's thread takes batches in order and, each time, queues the samples of another step. Decode
threads take samples, not batches, so that one slow sample delays no other. Samples from peers are
queued by the shuffle's thread when they arrive. The queue is ordered by step.

    Shuffle.attach -> queue of parts -> decode threads -> Batch.done -> take -> user

A batch lives in memory of a pool. Its tensors are handed to the user without a copy, and the
memory is used again only when nobody holds them any more: a steady epoch allocates nothing, and
`list(loader)` is safe.

A thread puts whatever is raised in its batch's place, SystemExit and CancelledError of a user's
transform included: if they ended the thread, the user's would wait for its batch until a deadline.
"""

import functools
import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dlio.comm import Communicator
from dlio.comm.funnel import waiting
from dlio.data.schema import Buffer
from dlio.errors import CommTimeout, CorruptBlock, DlioError, SourceError
from dlio.loader.batch_stream import BatchResult, BatchStream, PassCounters
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.loader.planned_engine.batch_builders import BatchBuilder, BatchFactory
from dlio.loader.planned_engine.mixup_partners import EpochPartners
from dlio.loader.shuffle.sample_message import MessageMemory
from dlio.loader.shuffle.sample_shuffle import Shuffle, StepSamples
from dlio.loader.shuffle.windows import windows_of
from dlio.loader.trace import Spans
from dlio.plan.block_order import BlockOrder
from dlio.plan.epoch import EpochPlan, WindowPlan, plan_epoch
from dlio.plan.tail_order import blocks_of
from dlio.storage.block_filler import filler_threads
from dlio.storage.block_stream import BlockStream
from dlio.storage.mount import Mount
from dlio.storage.scratch import PayloadScratch
from dlio.util.threads import Workers

_SAMPLES_A_TASK = 8
"""At most; fewer of a small batch, so that all threads work on it, and end together."""
_LARGE_BYTES: Final = 512 << 10
"""Larger samples are read and made one at a time, so that a thread's memory stays small."""
_POLL_S = 0.2
_LEAST_READY = 2
"""Batches of which the samples are urgent, at least."""
_SKIPPED: Final = (SourceError, CorruptBlock)
"""Errors that on_error="skip" leaves out: samples that cannot be read, checked or decoded."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """A pass, with all that its work needs. Made by the engine."""

    plan: EpochPlan
    """Which rank gets which samples in each step."""
    epoch: int
    """Number of the epoch, for crops."""
    data: Dataset
    mounted: Mount
    comm: Communicator
    """For this loader's messages alone."""
    factory: BatchFactory
    threads: int
    ahead: int
    """Batches under way at a time."""
    generation: int
    """Number of this pass over the loader, the same on all ranks."""
    alone: bool
    """True if this rank exchanges no samples with others."""
    skip: bool
    """Leave out samples that cannot be read, checked or decoded."""
    spans: Spans | None
    memory: MessageMemory
    counters: PassCounters
    timeout_s: float
    """For one batch, before the run is taken to be stuck."""
    peer_timeout_s: float
    """For samples from a peer, before they are read from the source."""
    partners: EpochPartners | None = None
    """Partners of the samples, if batches are mixed."""


@dataclass(slots=True)
class Batch:
    """One step's samples of this rank, on their way to becoming tensors."""

    step: StepSamples
    builder: BatchBuilder | None
    """Holds the batch's memory, until `data` is made of it; from then on the user's tensors alone
    may hold it."""
    failed: dict[int, BaseException]
    """Error of each slot that failed; slot -1 is the whole batch."""
    left: int
    """Samples that are not made yet."""
    data: BatchData = None
    """The finished batch, if nothing failed."""
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


_Task = tuple[int, int, Batch | None, list[int], bool]
"""(step, ticket, batch or None to end a thread, slots, True to look them up on a device first)."""


def run_pass(context: PassContext) -> BatchStream:
    """Yield the batches of a pass; None first, when its work has begun."""
    plan, hierarchy = context.plan, context.mounted.hierarchy
    with ExitStack() as stack:
        planner = _hurry_first_batch(context)
        streamed = None
        if (blocks := blocks_of(plan.order)) is not None:
            # Before the shuffle starts, so that samples of these blocks are not read one by one.
            streamed = stack.enter_context(_streamed_blocks(context, blocks))
        shuffle = Shuffle(
            context.comm,
            hierarchy,
            plan,
            context.generation,
            context.memory,
            planner,
            alone=context.alone,
        )
        pipeline = Pipeline(shuffle, context)
        stack.callback(pipeline.close)
        pipeline.start()
        yield None
        while (batch := pipeline.take()) is not None:
            if streamed is not None:
                done = min(batch.step.number + 1, shuffle.sent)
                streamed.done(plan.position + done * plan.global_batch)
            result = _result_of(batch, context)
            del batch  # It holds the user's tensors.
            yield result
            del result


def _hurry_first_batch(context: PassContext) -> WindowPlan | None:
    """Start filling the tiers, the first batch's samples first; return the planner used for it."""
    mounted, plan = context.mounted, context.plan
    if not mounted.hierarchy.missing():
        return None
    planner = plan_epoch(plan)
    first = planner.window(range(min(1, plan.steps)))
    wanted = np.concatenate([first.samples[first.senders < 0], *first.sends.values()])
    # A sample of a mixture may occur twice, and is read once.
    _, firsts = np.unique(wanted, return_index=True)
    wanted = wanted[np.sort(firsts)]
    mounted.hierarchy.hurry(wanted, functools.partial(mounted.fill, plan.order))
    return planner


@contextmanager
def _streamed_blocks(context: PassContext, order: BlockOrder) -> Iterator[BlockStream]:
    """Bring the blocks of this pass that no tier pins, ahead of their use."""
    mounted, plan = context.mounted, context.plan
    steps = context.ahead
    if mounted.ranks.nodes > 1:
        # Messages of two windows are under way.
        sample_bytes = float(mounted.hierarchy.reader.sizes.mean())
        steps += 2 * max(map(len, windows_of(plan, sample_bytes)))
    window = int(np.diff(order.edges).max(initial=1))
    here = (plan.home == mounted.nodes.here) & (mounted.placement.home < 0)
    streamed = BlockStream(
        mounted.hierarchy,
        order,
        here,
        plan.position,
        ahead=steps * plan.global_batch + window,
        progress=mounted.stream_progress,
        generation=context.generation,
        threads=filler_threads(mounted.block_bytes, mounted.requests),
    )
    try:
        yield streamed
    finally:
        streamed.close()


def _result_of(batch: Batch, context: PassContext) -> BatchResult:
    """Return a batch as it is handed out, or the error in its place."""
    samples, reader = batch.step.samples, context.data.reader
    if batch.failed:
        error = _first_failure(batch.failed)
        if -1 in batch.failed or not context.skip or not isinstance(error, _SKIPPED):
            slot = min(batch.failed)
            is_named = isinstance(error, _SKIPPED) or getattr(error, "__notes__", None)
            if slot >= 0 and not is_named:
                error.add_note(f"for sample {reader.name(int(samples[slot]))!r}")
            return BatchResult(None, len(samples), samples, error)
        for slot in sorted(batch.failed):
            context.counters.skipped.append(reader.name(int(samples[slot])))
        samples = samples[[k for k in range(len(samples)) if k not in batch.failed]]
    made, batch.data = batch.data, None
    return BatchResult(made, len(samples), samples, epoch=context.epoch)


class Pipeline:
    """Batches of one epoch, in order. Owner: `run_pass`, which closes it.

    While at least half of the batches ahead are complete, one thread works; the others leave the
    processors and the interpreter's lock to the trainer until fewer are. While there are samples
    for a quarter, and at least two, few requests are sent to the source at a time.
    """

    def __init__(self, shuffle: Shuffle, context: PassContext) -> None:
        self._shuffle, self._context = shuffle, context
        self._hierarchy, self._clock = context.mounted.hierarchy, context.counters.clock
        self._queue: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._ticket = itertools.count()
        self._under_way: deque[Batch] = deque()
        self._next_step = 0
        self._lock = threading.Lock()
        self._complete = 0
        """Batches that are done, and not taken yet."""
        self._hierarchy.pace(sys.maxsize)  # Another pass may have had samples enough.
        self._hurry = threading.Event()
        self._hurry.set()
        self._workers = Workers("dlio-decode", self._run, context.threads, wake=self._wake)
        self._workers.start()

    # The user's thread

    def start(self) -> None:
        """Begin batches until as many are under way as may be."""
        context = self._context
        while len(self._under_way) < context.ahead and self._next_step < context.plan.steps:
            # With batches under way, the next window may wait for one of them to be taken.
            if self._under_way and not self._shuffle.planned(self._next_step):
                break
            self._shuffle.attach(self._next_step, self._begin_batch, context.timeout_s)
            self._next_step += 1

    def take(self) -> Batch | None:
        """Return the next batch, complete; None after the last.

        Samples that could not be read or decoded are in its `failed`.
        """
        self.start()
        if not self._under_way:
            return None
        batch = self._under_way.popleft()
        self._wait(batch)
        self._completed(-1, len(batch.step.samples))
        self._shuffle.consumed(batch.step.number)
        return batch

    def close(self) -> None:
        """Stop the threads after the task that each is at."""
        self._workers.close()
        self._shuffle.close()
        self._hierarchy.pace(sys.maxsize)
        for batch in self._under_way:
            self._hierarchy.forget(batch.step.samples)

    def _wait(self, batch: Batch) -> None:
        started = time.monotonic()
        gave_up = False
        while not waiting(batch.done.wait, _POLL_S):
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

    def _begin_batch(self, step: StepSamples) -> Callable[[list[int]], None]:
        """Begin a step's batch; return the listener that queues its slots."""
        context, count = self._context, len(step.samples)
        partners = context.partners
        mixed = None if partners is None else partners.of_step(step.number, step.samples)
        builder = context.factory.begin(context.epoch, step.samples, mixed)
        batch = Batch(step, builder, builder.failed, count)
        # The listener below lives as long as the step, and must not hold the builder: the memory
        # would not return to the pool with the user's tensors.
        may_be_decoded, finds_whole = builder.may_be_decoded, builder.finds_whole
        if count == 0:
            self._finish(batch)
        self._under_way.append(batch)

        def queue_slots(slots: list[int]) -> None:
            if not may_be_decoded:
                missing = [slot for slot in slots if step.payloads[slot] is None]
                self._hierarchy.expect(step.samples[missing])
            if finds_whole:
                self._queue.put((step.number, next(self._ticket), batch, slots, True))
            else:
                self._queue_parts(batch, slots)

        return queue_slots

    def _queue_parts(self, batch: Batch, slots: list[int]) -> None:
        count, threads = len(batch.step.samples), self._context.threads
        each = min(_SAMPLES_A_TASK, max(1, count // threads))
        for start in range(0, len(slots), each):
            part = slots[start : start + each]
            self._queue.put((batch.step.number, next(self._ticket), batch, part, False))

    def _completed(self, change: int, samples: int) -> None:
        """Count batches, of so many samples, that are done or taken."""
        ahead = self._context.ahead
        with self._lock:
            self._complete += change
            lacking = max(_LEAST_READY, ahead // 4) - self._complete
            self._hierarchy.pace(max(0, lacking) * samples)
            if 2 * self._complete < ahead or self._workers.stopping.is_set():
                self._hurry.set()
            else:
                self._hurry.clear()

    def _wake(self) -> None:
        with self._lock:  # From now on `_completed` does not clear it.
            self._hurry.set()
        for _ in range(len(self._workers)):
            self._queue.put((-1, next(self._ticket), None, [], False))

    # Decode threads

    def _run(self, number: int) -> None:
        scratch: list[PayloadScratch | None] = [PayloadScratch() for _ in range(_SAMPLES_A_TASK)]
        if self._context.factory.keeps_payloads:
            scratch = [None] * _SAMPLES_A_TASK
        while not self._workers.stopping.is_set():
            _, _, batch, slots, is_sought = self._queue.get()
            if batch is None:
                return
            if number and not self._hurry.is_set():
                # For the first thread, or for all when there is a hurry.
                self._queue.put((batch.step.number, next(self._ticket), batch, slots, is_sought))
                del batch  # An idle thread that held it would keep its memory, and its errors.
                self._hurry.wait()
                continue
            began = time.perf_counter()
            spent: dict[str, float] = {}
            if is_sought:
                slots = self._find(batch, slots, spent)
            else:
                self._make(batch, slots, scratch, spent)
            if slots:
                self._made(batch, len(slots), began, spent)
            del batch

    def _made(self, batch: Batch, count: int, began: float, spent: dict[str, float]) -> None:
        """Count slots that are made; finish the batch with the last."""
        with batch.lock:
            batch.left -= count
            is_last = batch.left == 0
        self._clock.add_all(spent)
        if self._context.spans is not None:
            self._context.spans.add("decode", began, step=batch.step.number, samples=count)
        if is_last:
            self._finish(batch)

    def _find(self, batch: Batch, slots: list[int], spent: dict[str, float]) -> list[int]:
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
        spent: dict[str, float],
    ) -> None:
        """Make samples in their slots: from the first of five places that has each, which are a
        tier of decoded images, a peer, and the three that `Hierarchy.read` knows."""
        builder, step = batch.builder, batch.step
        assert builder is not None
        if builder.may_be_decoded:
            slots = self._take(batch, slots, builder.take_decoded, spent)
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
            _add(spent, "decode", time.perf_counter() - began - transforming)
            if transforming:
                _add(spent, "transform", transforming)

    def _take(
        self,
        batch: Batch,
        slots: list[int],
        take: Callable[[list[int]], tuple[list[int], float]],
        spent: dict[str, float],
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
        _add(spent, "decode", time.perf_counter() - began)
        return rest

    def _payload(
        self, step: StepSamples, slot: int, scratch: PayloadScratch | None, spent: dict[str, float]
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
        _add(spent, place, time.perf_counter() - began)
        return payload

    def _sent(self, step: StepSamples, slot: int) -> Buffer | None:
        """Return the payload that a peer sent; None if it was damaged or given up."""
        sealed = step.payloads[slot]
        step.payloads[slot] = None  # The message's memory goes with its last sample.
        payload: Buffer | None = None if sealed is None else sealed.open()
        if payload is None:
            self._hierarchy.counters.add("late")
        return payload

    def _read_directly(
        self, batch: Batch, builder: BatchBuilder, slot: int, spent: dict[str, float]
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
        _add(spent, place, time.perf_counter() - began)

    def _finish(self, batch: Batch) -> None:
        """Make the batch of its slots, and mark it as done."""
        began = time.perf_counter()
        try:
            builder = batch.builder
            assert builder is not None
            if not self._is_lost(batch):
                builder.decode_whole(_intact(batch))
                settled = time.perf_counter()
                self._clock.add("decode", settled - began)
                began = settled
            if not self._is_lost(batch):
                batch.data = builder.finish(_intact(batch) if batch.failed else None)
        except BaseException as error:
            batch.failed = {-1: error}
        finally:
            batch.builder = None
            self._clock.add("collate", time.perf_counter() - began)
            self._completed(1, len(batch.step.samples))
            batch.done.set()

    def _is_lost(self, batch: Batch) -> bool:
        """True if a sample failed that may not be left out."""
        return bool(batch.failed) and not (
            self._context.skip and isinstance(_first_failure(batch.failed), _SKIPPED)
        )


def _add(spent: dict[str, float], stage: str, seconds: float) -> None:
    spent[stage] = spent.get(stage, 0.0) + seconds


def _intact(batch: Batch) -> Sequence[int]:
    """Return the slots that have not failed."""
    slots = range(len(batch.step.samples))
    return [k for k in slots if k not in batch.failed] if batch.failed else slots


def _first_failure(failed: dict[int, BaseException]) -> BaseException:
    """Return the failure of the first slot; the user's own errors before dlio's, which may be
    their consequence."""
    errors = [failed[slot] for slot in sorted(failed)]
    return next((error for error in errors if not isinstance(error, DlioError)), errors[0])

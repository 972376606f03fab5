"""The pipeline: an epoch's steps become batches, decoded by threads ahead of their use.

The user's thread takes batches in order and, each time, has another step's samples queued. Decode
threads take samples, not batches, so that one slow sample delays no other. Samples from peers are
queued by the shuffle's thread when they arrive. The queue is ordered by step.

A batch lives in memory of a pool. Its tensors are handed to the user without a copy, and the
memory is used again only when nobody holds them any more: a steady epoch allocates nothing, and
`list(loader)` is safe.

A thread puts whatever is raised in its batch's place, SystemExit and CancelledError of a user's
transform included: if they ended the thread, the user's would wait for its batch until a deadline.
"""

import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dlio.comm.funnel import waiting
from dlio.data.schema import Buffer
from dlio.errors import CommTimeout, CorruptBlock, DlioError, SourceError
from dlio.loader.batch_stream import StageTimes
from dlio.loader.contract import BatchData
from dlio.loader.planned_engine.mixup_partners import EpochPartners
from dlio.loader.planned_engine.slots import (
    BatchBuilder,
    CachedSlots,
    DirectSlots,
    ManyCachedSlots,
    ManySlots,
    SettledSlots,
    Slots,
)
from dlio.loader.shuffle.sample_shuffle import Shuffle, StepSamples
from dlio.loader.trace import Spans
from dlio.storage.block import PayloadScratch
from dlio.storage.hierarchy import Hierarchy
from dlio.util.threads import Workers

_SAMPLES_A_TASK = 8
"""At most; fewer of a small batch, so that all threads work on it, and end together."""
_LARGE_BYTES: Final = 512 << 10
"""Larger samples are read and made one at a time, so that a thread's memory stays small."""
_POLL_S = 0.2
_LEAST_READY = 2
"""Batches of which the samples are urgent, at least."""
SKIPPED: Final = (SourceError, CorruptBlock)
"""Errors that on_error="skip" leaves out: samples that cannot be read, checked or decoded."""


class _Unsought(list[int]):
    """Slots that are to be looked up together before they are made one by one."""


@dataclass(slots=True)
class Batch:
    """One step's samples of this rank, on their way to becoming tensors."""

    step: StepSamples
    slots: Slots | None
    """Memory of the batch, until `data` is made of it."""
    cached: CachedSlots | None
    """`slots`, if samples may be in a tier of decoded images."""
    direct: DirectSlots | None
    """`slots`, if payloads can be read into them."""
    many: ManySlots | None
    """`slots`, if several are made at a time."""
    left: int
    """Samples that are not made yet."""
    failed: dict[int, BaseException] = field(default_factory=dict)
    """Error of each slot that failed; slot -1 is the whole batch."""
    data: BatchData = None
    """The finished batch, if nothing failed."""
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def release(self) -> None:
        """Let go of the memory, which the user's tensors alone may hold from now on."""
        self.slots = self.cached = self.direct = self.many = None


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """The work on samples, the same for all steps of an epoch."""

    hierarchy: Hierarchy
    maker: BatchBuilder
    clock: StageTimes
    epoch: int
    threads: int
    ahead: int
    """Batches that are under way at a time."""
    timeout_s: float
    """For one batch, before the run is taken to be stuck."""
    peer_timeout_s: float
    """For samples from a peer, before they are read from the source."""
    skip: bool
    """Leave out samples that cannot be read, checked or decoded."""
    trace: Spans | None = None
    pairing: EpochPartners | None = None
    """Partners of the samples, if batches are mixed."""


class Pipeline:
    """Batches of one epoch, in order. Owner: the loader's iterator, which closes it.

    While at least half of the batches ahead are complete, one thread works; the others leave the
    processors and the interpreter's lock to the trainer until fewer are. While there are samples
    for a quarter, and at least two, few requests are sent to the source at a time.
    """

    def __init__(self, shuffle: Shuffle, steps: range, work: PipelineWork) -> None:
        self._shuffle = shuffle
        self._steps = steps
        self._work = work
        self._queue: queue.PriorityQueue[tuple[int, int, Batch | None, list[int]]] = (
            queue.PriorityQueue()
        )
        self._ticket = itertools.count()
        self._under_way: deque[Batch] = deque()
        self._next_step = steps.start
        self._lock = threading.Lock()
        self._complete = 0
        """Batches that are done, and not taken yet."""
        work.hierarchy.pace(sys.maxsize)  # Another pass may have had samples enough.
        self._hurry = threading.Event()
        self._hurry.set()
        self._workers = Workers("dlio-decode", self._run, work.threads, wake=self._wake)
        self._workers.start()

    def start(self) -> None:
        """Have as many batches under way as there may be."""
        while len(self._under_way) < self._work.ahead and self._next_step < self._steps.stop:
            # With batches under way, the next window may wait for one of them to be taken.
            if self._under_way and not self._shuffle.planned(self._next_step):
                break
            self._shuffle.attach(self._next_step, self._listen, self._work.timeout_s)
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
        self._work.hierarchy.pace(sys.maxsize)
        for batch in self._under_way:
            self._work.hierarchy.forget(batch.step.samples)

    def _completed(self, change: int, samples: int) -> None:
        """Count batches, of so many samples, that are done or taken."""
        with self._lock:
            self._complete += change
            lacking = max(_LEAST_READY, self._work.ahead // 4) - self._complete
            self._work.hierarchy.pace(max(0, lacking) * samples)
            if 2 * self._complete < self._work.ahead or self._workers.stopping.is_set():
                self._hurry.set()
            else:
                self._hurry.clear()

    def _wake(self) -> None:
        with self._lock:  # From now on `_completed` does not clear it.
            self._hurry.set()
        for _ in range(len(self._workers)):
            self._queue.put((-1, next(self._ticket), None, []))

    def _listen(self, step: StepSamples) -> Callable[[list[int]], None]:
        work, count = self._work, len(step.samples)
        pairing = work.pairing
        pairs = None if pairing is None else pairing.pairs(step.number, step.samples)
        slots = work.maker.begin(work.epoch, step.samples, pairs)
        cached = slots if isinstance(slots, CachedSlots) else None
        direct = slots if isinstance(slots, DirectSlots) else None
        many = slots if isinstance(slots, ManySlots) else None
        batch = Batch(step, slots, cached, direct, many, count)
        sought = slots if isinstance(slots, ManyCachedSlots) else None
        if count == 0:
            self._finish(batch)
        self._under_way.append(batch)

        def queue_slots(slots: list[int]) -> None:
            if cached is None:  # Otherwise the tier of decoded images may have them.
                missing = [slot for slot in slots if step.payloads[slot] is None]
                work.hierarchy.expect(step.samples[missing])
            if sought is not None and sought.whole:
                self._queue.put((step.number, next(self._ticket), batch, _Unsought(slots)))
            else:
                self._queue_parts(batch, slots, list if sought is None else _Unsought)

        return queue_slots

    def _queue_parts(
        self, batch: Batch, slots: list[int], kind: Callable[[list[int]], list[int]] = list
    ) -> None:
        count, threads = len(batch.step.samples), self._work.threads
        each = min(_SAMPLES_A_TASK, max(1, count // threads))
        for start in range(0, len(slots), each):
            part = kind(slots[start : start + each])
            self._queue.put((batch.step.number, next(self._ticket), batch, part))

    def _wait(self, batch: Batch) -> None:
        started = time.monotonic()
        gave_up = False
        while not waiting(batch.done.wait, _POLL_S):
            waited = time.monotonic() - started
            if waited > self._work.peer_timeout_s and not gave_up:
                self._shuffle.give_up(batch.step.number)
                gave_up = True
            if waited > self._work.timeout_s:
                raise CommTimeout(
                    f"step {batch.step.number} was not complete after {waited:.0f} s, "
                    f"{batch.left} of its samples are still being read: the source "
                    f"{self._work.hierarchy.reader.path} may hang (DLIO_TIMEOUT sets the deadline)"
                )
            if self._workers.stopping.is_set():
                raise DlioError("the loader was closed while a batch was awaited: keep it open")
            self._shuffle.check()

    def _run(self, number: int) -> None:
        own = [PayloadScratch() for _ in range(_SAMPLES_A_TASK)]
        scratch = None if self._work.maker.owns_payloads else own[0]
        while not self._workers.stopping.is_set():
            _, _, batch, slots = self._queue.get()
            if batch is None:
                return
            if number and not self._hurry.is_set():
                # For the first thread, or for all when there is a hurry.
                self._queue.put((batch.step.number, next(self._ticket), batch, slots))
                del batch
                self._hurry.wait()
                continue
            began = time.perf_counter()
            spent: dict[str, float] = {}
            if isinstance(slots, _Unsought):
                slots = self._take_many(batch, slots, spent)
                if not slots:
                    del batch
                    continue
            elif batch.many is not None and len(slots) > 1:
                self._make_many(batch, batch.many, slots, own, spent)
            else:
                self._make_each(batch, slots, scratch, spent)
            with batch.lock:
                batch.left -= len(slots)
                last = batch.left == 0
            self._work.clock.add_all(spent)
            if self._work.trace is not None:
                self._work.trace.add("decode", began, step=batch.step.number, samples=len(slots))
            if last:
                self._finish(batch)
            del batch

    def _finish(self, batch: Batch) -> None:
        """Make the batch of its slots, and mark it as done."""
        began = time.perf_counter()
        try:
            slots = batch.slots
            assert slots is not None
            if isinstance(slots, SettledSlots) and not self._is_lost(batch):
                batch.failed.update(slots.settle(_intact(batch)))
                settled = time.perf_counter()
                self._work.clock.add("decode", settled - began)
                began = settled
            if not self._is_lost(batch):
                batch.data = slots.finish(_intact(batch) if batch.failed else None)
        except BaseException as error:
            batch.failed = {-1: error}
        finally:
            batch.release()
            self._work.clock.add("collate", time.perf_counter() - began)
            self._completed(1, len(batch.step.samples))
            batch.done.set()

    def _is_lost(self, batch: Batch) -> bool:
        """True if a sample failed that may not be left out."""
        return bool(batch.failed) and not (
            self._work.skip and isinstance(first_failure(batch), SKIPPED)
        )

    def _make(
        self, batch: Batch, slot: int, scratch: PayloadScratch | None, spent: dict[str, float]
    ) -> None:
        """Make one sample in its slot: from the first of four places that has it."""
        began = time.perf_counter()
        if batch.cached is not None and self._take_cached(batch.cached, batch.step, slot):
            spent["decode"] = spent.get("decode", 0.0) + time.perf_counter() - began
            return
        if batch.direct is not None and batch.step.payloads[slot] is None:
            self._read_direct(batch.direct, batch.step, slot, spent)
            return
        payload = self._payload(batch.step, slot, scratch, spent)
        read = time.perf_counter()
        assert batch.slots is not None
        transforming = batch.slots.make(slot, int(batch.step.samples[slot]), payload)
        _add_made(spent, time.perf_counter() - read, transforming)

    def _make_each(
        self,
        batch: Batch,
        slots: list[int],
        scratch: PayloadScratch | None,
        spent: dict[str, float],
    ) -> None:
        for slot in slots:
            try:
                self._make(batch, slot, scratch, spent)
            except BaseException as error:
                batch.failed[slot] = error

    def _make_many(
        self,
        batch: Batch,
        many: ManySlots,
        slots: list[int],
        scratch: list[PayloadScratch],
        spent: dict[str, float],
    ) -> None:
        """Make samples in their slots, the small ones together; for each task one scratch."""
        sizes = self._work.hierarchy.reader.sizes[batch.step.samples[slots]]
        small, payloads = [], []
        for slot, size, own in zip(slots, sizes.tolist(), scratch, strict=False):
            if size > _LARGE_BYTES:
                continue
            try:
                payloads.append(self._payload(batch.step, slot, own, spent))
                small.append(slot)
            except BaseException as error:
                batch.failed[slot] = error
        read = time.perf_counter()
        samples = batch.step.samples[small].tolist()
        transforming = 0.0
        try:
            failed, transforming = many.make_many(small, samples, payloads)
            batch.failed.update(failed)
        except BaseException as error:
            batch.failed.update(dict.fromkeys(small, error))
        _add_made(spent, time.perf_counter() - read, transforming)
        large = [slot for slot, size in zip(slots, sizes, strict=True) if size > _LARGE_BYTES]
        self._make_each(batch, large, scratch[0], spent)

    def _payload(
        self, step: StepSamples, slot: int, scratch: PayloadScratch | None, spent: dict[str, float]
    ) -> Buffer:
        """Return a sample's payload from the first of three places that has it."""
        began = time.perf_counter()
        hierarchy = self._work.hierarchy
        payload = self._sent(step, slot) if step.payloads[slot] is not None else None
        place = "peer"
        if payload is None:
            payload, place = hierarchy.read(
                int(step.samples[slot]), int(step.blocks[slot]), int(step.places[slot]), scratch
            )
        if place != "source":  # Reads of the source are counted where they happen.
            hierarchy.counters.add_bytes(place, len(payload))
        spent[place] = spent.get(place, 0.0) + time.perf_counter() - began
        return payload

    def _take_many(self, batch: Batch, slots: list[int], spent: dict[str, float]) -> list[int]:
        """Make those of the samples that a tier keeps decoded; queue the others. Return the slots
        that are made."""
        began = time.perf_counter()
        assert isinstance(batch.slots, ManyCachedSlots)
        try:
            rest, saved_s = batch.slots.take_cached_many(slots)
        except BaseException as error:
            batch.failed.update(dict.fromkeys(slots, error))
            return slots
        others = set(rest)
        made = [slot for slot in slots if slot not in others]
        for slot in made:
            batch.step.payloads[slot] = None
        counters = self._work.hierarchy.counters
        counters.add("decoded", len(made))
        counters.add("decode_saved_s", saved_s)
        spent["decode"] = time.perf_counter() - began
        self._queue_parts(batch, rest)
        return made

    def _take_cached(self, cached: CachedSlots, step: StepSamples, slot: int) -> bool:
        """True if the sample is made of an image that a tier keeps decoded."""
        saved_s = cached.take_cached(slot, int(step.samples[slot]))
        if saved_s is None:
            return False
        step.payloads[slot] = None
        counters = self._work.hierarchy.counters
        counters.add("decoded")
        counters.add("decode_saved_s", saved_s)
        return True

    def _sent(self, step: StepSamples, slot: int) -> Buffer | None:
        """Return the payload that a peer sent; None if it was damaged or given up."""
        sealed = step.payloads[slot]
        step.payloads[slot] = None  # The message's memory goes with its last sample.
        payload: Buffer | None = None if sealed is None else sealed.open()
        if payload is None:
            self._work.hierarchy.counters.add("late")
        return payload

    def _read_direct(
        self, direct: DirectSlots, step: StepSamples, slot: int, spent: dict[str, float]
    ) -> None:
        """Read a payload directly into the batch's memory."""
        hierarchy = self._work.hierarchy
        began = time.perf_counter()
        pieces = direct.pieces(slot)
        place = hierarchy.read_into(
            int(step.samples[slot]), int(step.blocks[slot]), int(step.places[slot]), pieces
        )
        direct.filled(slot, pieces)
        if place != "source":
            hierarchy.counters.add_bytes(place, sum(len(piece) for piece in pieces))
        spent[place] = spent.get(place, 0.0) + time.perf_counter() - began


def _add_made(spent: dict[str, float], seconds: float, transforming: float) -> None:
    """Count the seconds in which samples were made, in part by the user's transform."""
    spent["decode"] = spent.get("decode", 0.0) + seconds - transforming
    if transforming:
        spent["transform"] = spent.get("transform", 0.0) + transforming


def _intact(batch: Batch) -> list[int]:
    """Return the slots that have not failed."""
    return [k for k in range(len(batch.step.samples)) if k not in batch.failed]


def first_failure(batch: Batch) -> BaseException:
    """Return the failure of the first slot; the user's own errors before dlio's, which may be
    their consequence."""
    errors = [batch.failed[slot] for slot in sorted(batch.failed)]
    return next((error for error in errors if not isinstance(error, DlioError)), errors[0])

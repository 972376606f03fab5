"""The pipeline: an epoch's steps become batches, decoded by threads ahead of their use.

The user's thread takes batches in order and, each time, has another step's samples queued;
decode threads take samples, not batches, so that one slow sample delays no other. What arrives
from peers is queued by the shuffle's thread when it arrives. The queue is ordered by step.

A batch lives in memory from a pool. Its tensors are handed to the user without a copy, and the
memory is used again only when nobody holds them any more: a steady epoch allocates nothing, and
`list(loader)` is safe.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Self

from dlio.comm.funnel import waiting
from dlio.data.schema import Buffer
from dlio.errors import CommTimeout, CorruptBlock, DlioError, SourceError
from dlio.loader.planned.makers import Maker, Slots
from dlio.loader.stats import Clock
from dlio.loader.trace import Spans
from dlio.shuffle.shuffle import Shuffle, Step
from dlio.storage.block import Scratch
from dlio.storage.hierarchy import Hierarchy

_SAMPLES_A_TASK = 8
"""At most; fewer of a small batch, so that all threads work on it, and end together."""
_TASKS_A_THREAD = 4
_POLL_S = 0.2
_JOIN_TIMEOUT_S = 5.0
SKIPPED: Final = (SourceError, CorruptBlock)
"""What on_error="skip" leaves out: samples that cannot be read, checked or decoded."""


@dataclass(slots=True)
class Batch:
    """One step's samples of this rank, on their way to becoming tensors."""

    step: Step
    slots: Slots | None
    """Its memory, until `data` is made of it."""
    left: int
    failed: dict[int, Exception] = field(default_factory=dict)
    data: Any = None
    """What the user gets, when it is done and nothing failed."""
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done with samples, the same for all steps of an epoch."""

    hierarchy: Hierarchy
    maker: Maker
    clock: Clock
    epoch: int
    threads: int
    ahead: int
    """Batches that are under way at a time."""
    timeout_s: float
    """For one batch, before the run is taken to be stuck."""
    peer_timeout_s: float
    """For what a peer owes, before it is read from the source."""
    skip: bool
    """Leave out samples that cannot be read, checked or decoded."""
    trace: Spans | None = None


class Pipeline:
    """Batches of one epoch, in order. Owner: the loader's iterator, which closes it."""

    def __init__(self, shuffle: Shuffle, steps: range, work: Work) -> None:
        self._shuffle = shuffle
        self._steps = steps
        self._work = work
        self._queue: queue.PriorityQueue[tuple[int, int, Batch | None, list[int]]] = (
            queue.PriorityQueue()
        )
        self._ticket = itertools.count()
        self._under_way: deque[Batch] = deque()
        self._next_step = steps.start
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"dlio-decode-{k}", daemon=True)
            for k in range(work.threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Have as many batches under way as there may be."""
        while len(self._under_way) < self._work.ahead and self._next_step < self._steps.stop:
            # With batches under way, the next window may wait for one of them to be taken.
            if self._under_way and not self._shuffle.planned(self._next_step):
                break
            self._shuffle.attach(self._next_step, self._listen, self._work.timeout_s)
            self._next_step += 1

    def take(self) -> Batch | None:
        """The next batch, complete; None after the last.

        Samples that could not be read or decoded are in its `failed`.
        """
        self.start()
        if not self._under_way:
            return None
        batch = self._under_way.popleft()
        self._wait(batch)
        self._shuffle.consumed(batch.step.number)
        return batch

    def close(self) -> None:
        """Stop the threads after the sample that each is at."""
        self._closing.set()
        for _ in self._threads:
            self._queue.put((-1, next(self._ticket), None, []))
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        self._shuffle.close()

    def _listen(self, step: Step) -> Callable[[list[int]], None]:
        work, count = self._work, len(step.samples)
        batch = Batch(step, work.maker.begin(work.epoch, step.samples), count)
        if count == 0:
            self._finish(batch)
        self._under_way.append(batch)

        each = min(_SAMPLES_A_TASK, max(1, count // (_TASKS_A_THREAD * work.threads)))

        def queue_slots(slots: list[int]) -> None:
            for start in range(0, len(slots), each):
                part = slots[start : start + each]
                self._queue.put((step.number, next(self._ticket), batch, part))

        return queue_slots

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
            self._shuffle.check()

    def _run(self) -> None:
        scratch = None if self._work.maker.owns_payloads else Scratch()
        while not self._closing.is_set():
            _, _, batch, slots = self._queue.get()
            if batch is None:
                return
            began = time.perf_counter()
            spent: dict[str, float] = {}
            for slot in slots:
                try:
                    self._make(batch, slot, scratch, spent)
                except Exception as error:
                    batch.failed[slot] = error
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
        """Make the batch of its slots, and say that it is done."""
        began = time.perf_counter()
        try:
            kept: list[int] | None = None
            if batch.failed:
                error = first_failure(batch)
                if not (self._work.skip and isinstance(error, SKIPPED)):
                    return
                kept = [k for k in range(len(batch.step.samples)) if k not in batch.failed]
            assert batch.slots is not None
            batch.data = batch.slots.finish(kept)
        except Exception as error:
            batch.failed = {-1: error}
        finally:
            # Nothing but what the user gets may hold the batch's memory: it is to be used again.
            batch.slots = None
            self._work.clock.add("collate", time.perf_counter() - began)
            batch.done.set()

    def _make(
        self, batch: Batch, slot: int, scratch: Scratch | None, spent: dict[str, float]
    ) -> None:
        """One sample, from payload to its slot."""
        hierarchy, step = self._work.hierarchy, batch.step
        sample = int(step.samples[slot])
        began = time.perf_counter()
        assert batch.slots is not None
        saved_s = batch.slots.kept(slot, sample)
        if saved_s is not None:
            step.payloads[slot] = None
            hierarchy.counters.add("decoded")
            hierarchy.counters.add("decode_saved_s", saved_s)
            spent["decode"] = spent.get("decode", 0.0) + time.perf_counter() - began
            return
        payload: Buffer | None = None
        if (sealed := step.payloads[slot]) is not None:
            step.payloads[slot] = None  # The message's memory goes with its last sample.
            payload = sealed.open()
            if payload is None:
                hierarchy.counters.add("late")
        pieces = batch.slots.pieces(slot) if payload is None else None
        if pieces is not None:
            place = hierarchy.read_into(
                sample, int(step.blocks[slot]), int(step.places[slot]), pieces
            )
            batch.slots.filled(slot, pieces)
            if place != "source":
                hierarchy.counters.add_bytes(place, sum(len(piece) for piece in pieces))
            spent[place] = spent.get(place, 0.0) + time.perf_counter() - began
            return
        if payload is None:
            payload, place = hierarchy.read(
                sample, int(step.blocks[slot]), int(step.places[slot]), scratch
            )
        else:
            place = "peer"
        if place != "source":  # Reads of the source are counted where they happen.
            hierarchy.counters.add_bytes(place, len(payload))
        read = time.perf_counter()
        transforming = batch.slots.make(slot, sample, payload)
        made = time.perf_counter()
        spent[place] = spent.get(place, 0.0) + read - began
        spent["decode"] = spent.get("decode", 0.0) + made - read - transforming
        if transforming:
            spent["transform"] = spent.get("transform", 0.0) + transforming


def first_failure(batch: Batch) -> Exception:
    """The failure of the first slot; the user's own errors before ours, which may follow."""
    errors = [batch.failed[slot] for slot in sorted(batch.failed)]
    return next((error for error in errors if not isinstance(error, DlioError)), errors[0])

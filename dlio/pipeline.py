"""The pipeline: an epoch's steps become batches, decoded by threads ahead of their use.

The user's thread takes batches in order and, each time, has another step's samples queued;
decode threads take samples, not batches, so that one slow sample delays no other. What arrives
from peers is queued by the shuffle's thread when it arrives. The queue is ordered by step.

A batch lives in memory from a pool. Its tensors are handed to the user without a copy, and the
memory is used again only when nobody holds them any more: a steady epoch allocates nothing, and
`list(loader)` is safe.
"""

import itertools
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from dlio.decode import Decoder
from dlio.errors import CommTimeout, CorruptBlock, DlioError, SourceError
from dlio.sample import decode_sample
from dlio.schema import Buffer
from dlio.shuffle import Shuffle, Step
from dlio.storage.block import Scratch
from dlio.storage.hierarchy import Hierarchy

_SAMPLES_A_TASK = 8
_POLL_S = 0.2
_JOIN_TIMEOUT_S = 5.0

Transform = Callable[[Any], object]


class BatchMemory:
    """Arrays for batches of images, used again as soon as nobody else refers to them.

    Page-locked ones are left to torch's own caching allocator: a copy to the GPU may be under way
    when the last reference goes, and torch knows until when.

    Args:
        shape: of one batch, (batch size, height, width, 3).
        pinned: page-locked, for asynchronous copies to a GPU.
    """

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape = shape
        self._pinned = pinned
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def take(self) -> npt.NDArray[np.uint8]:
        if self._pinned:
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=True).numpy()
        for k in range(len(self._arrays)):
            # Two references: the list's and the call's. A tensor made of it holds another.
            if sys.getrefcount(self._arrays[k]) == 2:
                return self._arrays[k]
        fresh = np.empty(self._shape, np.uint8)
        self._arrays.append(fresh)
        return fresh


@dataclass(slots=True)
class Batch:
    """One step's samples of this rank, on their way to becoming tensors."""

    step: Step
    images: npt.NDArray[np.uint8]
    """Shape (batch size, height, width, 3); the first len(step.samples) are used."""
    labels: npt.NDArray[np.int64]
    uniforms: npt.NDArray[np.float64]
    made: list[object]
    """Samples that are no crops, or what the user's transform returned, by slot."""
    left: int
    failed: dict[int, Exception] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finished(self, count: int) -> None:
        with self.lock:
            self.left -= count
            if self.left == 0:
                self.done.set()


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done with samples, the same for all steps of an epoch."""

    hierarchy: Hierarchy
    decoder: Decoder
    fields: tuple[str, str] | None
    """Image and label, which become crops; None where samples are taken as they are."""
    memory: BatchMemory
    epoch: int
    transform: Transform | None
    threads: int
    ahead: int
    """Batches that are under way at a time."""
    timeout_s: float
    """For one batch, before the run is taken to be stuck."""
    peer_timeout_s: float
    """For what a peer owes, before it is read from the source."""


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

    def take(self) -> Batch | None:
        """The next batch, complete; None after the last.

        Samples that could not be read or decoded are in its `failed`.
        """
        while len(self._under_way) < self._work.ahead and self._next_step < self._steps.stop:
            # With batches under way, the next window may wait for one of them to be taken.
            if self._under_way and not self._shuffle.planned(self._next_step):
                break
            self._shuffle.attach(self._next_step, self._listen, self._work.timeout_s)
            self._next_step += 1
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
        batch = Batch(
            step=step,
            images=work.memory.take(),
            labels=np.zeros(count, np.int64),
            uniforms=work.decoder.draw(work.epoch, step.samples),
            made=[None] * count if work.transform is not None or work.fields is None else [],
            left=count,
        )
        if count == 0:
            batch.done.set()
        self._under_way.append(batch)

        def queue_slots(slots: list[int]) -> None:
            for start in range(0, len(slots), _SAMPLES_A_TASK):
                part = slots[start : start + _SAMPLES_A_TASK]
                self._queue.put((step.number, next(self._ticket), batch, part))

        return queue_slots

    def _wait(self, batch: Batch) -> None:
        started = time.monotonic()
        gave_up = False
        while not batch.done.wait(_POLL_S):
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
        scratch = Scratch()
        while not self._closing.is_set():
            _, _, batch, slots = self._queue.get()
            if batch is None:
                return
            for slot in slots:
                try:
                    self._make(batch, slot, scratch)
                except Exception as error:
                    batch.failed[slot] = error
            batch.finished(len(slots))

    def _make(self, batch: Batch, slot: int, scratch: Scratch) -> None:
        """One sample, from payload to pixels in its slot."""
        work, step = self._work, batch.step
        hierarchy = work.hierarchy
        sample = int(step.samples[slot])
        payload: Buffer | None = step.payloads[slot]
        if payload is None:
            # Tensors of a whole sample share its payload's memory, which must be its own then.
            own = None if work.fields is None else scratch
            payload, place = hierarchy.read(
                sample, int(step.blocks[slot]), int(step.places[slot]), own
            )
        else:
            step.payloads[slot] = None  # The message's memory goes with its last sample.
            place = "peer"
        if place != "source":  # Reads of the source are counted where they happen.
            hierarchy.counters.add_bytes(place, len(payload))
        reader = hierarchy.reader
        if work.fields is None:
            whole = decode_sample(reader.schema, payload, reader.name(sample))
            batch.made[slot] = whole if work.transform is None else work.transform(whole)
            return
        try:
            values = reader.schema.split(payload)
        except CorruptBlock as error:
            raise SourceError(f"{reader.path}: sample {reader.name(sample)!r}: {error}") from error
        image, label = work.fields
        work.decoder.decode(
            values[image], reader.name(sample), batch.uniforms[slot], batch.images[slot]
        )
        batch.labels[slot] = values[label]
        if work.transform is not None:
            pixels = torch.from_numpy(batch.images[slot]).permute(2, 0, 1)
            batch.made[slot] = work.transform(pixels)


def default_timeout_s() -> float:
    return float(os.environ.get("DLIO_TIMEOUT", "300"))


def first_failure(batch: Batch) -> Exception:
    """The failure of the first slot; the user's own errors before ours, which may follow."""
    errors = [batch.failed[slot] for slot in sorted(batch.failed)]
    return next((error for error in errors if not isinstance(error, DlioError)), errors[0])

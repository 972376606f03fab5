"""Any map-style data set, in threads: what torch's workers do, without processes.

A sample is the unit of work where the data set has no `__getitems__`, so one slow sample delays
no other batch; batches come out in order. What torch's contract says of exceptions, collate_fn,
pinning and timeouts holds; threads are no workers, though: `get_worker_info()` is None in them.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch._utils import ExceptionWrapper

from dlio.loader.feed import Fed, Feed
from dlio.loader.passes import Pass
from dlio.loader.stats import Stats
from dlio.loader.trace import Spans

_POLL_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 5.0
_PARTS: Final = 4
"""Tasks of a batch for each thread, so that they end together."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """What is done with a batch's indices."""

    dataset: Any
    collate: Callable[[Any], Any]
    batched: bool
    """Whether an index batch is a list, to be collated; otherwise one index."""
    threads: int
    ahead: int
    """Batches under way at a time."""
    in_order: bool
    timeout_s: float
    """For one batch; 0 waits for ever."""
    skip: bool
    """Leave out samples for which the data set raises."""
    pin: Callable[[Any], Any] | None
    init: Callable[[int], None] | None
    """Called in each thread before its first sample."""


@dataclass(slots=True)
class _Batch:
    indices: Any
    items: list[Any]
    left: int
    failed: dict[int, BaseException] = field(default_factory=dict)
    data: Any = None
    done: bool = False


def thread_feed(work: Fetching, batches: Pass, stats: Stats, trace: Spans | None) -> Feed:
    """The batches of a pass. Raises, in a batch's place, what torch's workers would."""
    indices = iter(batches)
    with _Threads(work, stats, trace) as threads:
        exhausted = False

        def submit() -> bool:
            while threads.under_way < work.ahead:
                try:
                    threads.submit(next(indices))
                except StopIteration:
                    return True
            return False

        exhausted = submit()
        yield None
        while threads.under_way:
            batch = threads.take()
            if not exhausted:
                exhausted = submit()
            fed = _fed(batch, work)
            del batch
            if fed is None:
                batches.consumed()  # All its samples are left out: there is nothing to hand over.
                continue
            yield fed
            del fed


def _fed(batch: _Batch, work: Fetching) -> Fed | None:
    count = len(batch.items) if work.batched else 1
    numbers = batch.indices if work.batched else [batch.indices]
    if batch.failed and (not work.skip or -1 in batch.failed):
        first = min(batch.failed)
        return Fed(None, count, numbers, batch.failed[first])
    if batch.failed:
        numbers = [n for k, n in enumerate(numbers) if k not in batch.failed]
        if not numbers:
            return None
    data, batch.data = batch.data, None
    return Fed(data, len(numbers), numbers)


class _Threads:
    """The threads of one pass and what they are at. Owner: the feed, which closes it."""

    def __init__(self, work: Fetching, stats: Stats, trace: Spans | None) -> None:
        self._work, self._stats, self._trace = work, stats, trace
        self._tasks: queue.SimpleQueue[tuple[_Batch, range] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting: deque[_Batch] = deque()
        self._closing = threading.Event()
        together = getattr(work.dataset, "__getitems__", None)
        self._together = together if work.batched and together else None
        self._ready: dict[int, BaseException] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(k,), name=f"dlio-fetch-{k}", daemon=True)
            for k in range(work.threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for _thread in self._threads:
            self._tasks.put(None)
        with self._changed:
            self._changed.notify_all()
        for worker in self._threads:
            worker.join(_JOIN_TIMEOUT_S)

    @property
    def under_way(self) -> int:
        return len(self._waiting)

    def submit(self, indices: Any) -> None:
        if not self._work.batched:
            batch = _Batch(indices, [None], 1)
        else:
            batch = _Batch(indices, [None] * len(indices), 0)
        count = len(batch.items)
        size = max(1, count // (_PARTS * self._work.threads))
        if self._together is not None or not count:
            size = max(1, count)
        parts = [range(at, min(at + size, count)) for at in range(0, max(1, count), size)]
        batch.left = len(parts)
        with self._changed:
            self._waiting.append(batch)
        for part in parts:
            self._tasks.put((batch, part))

    def take(self) -> _Batch:
        """The next batch that is done; the oldest, unless any will do."""
        deadline = time.monotonic() + self._work.timeout_s
        with self._changed:
            while True:
                ready = self._first_done()
                if ready is not None:
                    self._waiting.remove(ready)
                    return ready
                self._changed.wait(_POLL_S)
                if self._work.timeout_s and time.monotonic() > deadline:
                    raise RuntimeError(
                        f"DataLoader timed out after {self._work.timeout_s:g} seconds"
                    )

    def _first_done(self) -> _Batch | None:
        if self._work.in_order:
            return self._waiting[0] if self._waiting[0].done else None
        return next((batch for batch in self._waiting if batch.done), None)

    def _run(self, number: int) -> None:
        init_error: BaseException | None = None
        if self._work.init is not None:
            try:
                self._work.init(number)
            except Exception:
                init_error = _wrapped(f"in DataLoader worker thread {number}")
        while (task := self._tasks.get()) is not None and not self._closing.is_set():
            batch, part = task
            began = time.perf_counter()
            if init_error is not None:
                batch.failed[-1] = init_error
            else:
                self._fetch(number, batch, part)
            self._stats.clock.add("fetch", time.perf_counter() - began)
            if self._trace is not None:
                self._trace.add("fetch", began, samples=len(part))
            with self._changed:
                batch.left -= 1
                last = batch.left == 0
            if last:
                self._finish(number, batch)
            del batch, task

    def _fetch(self, number: int, batch: _Batch, part: range) -> None:
        work = self._work
        if self._together is not None:
            try:
                batch.items = list(self._together(batch.indices))
            except Exception:
                batch.failed[-1 if work.skip else 0] = _wrapped(
                    f"in DataLoader worker thread {number}, for samples {batch.indices}"
                )
            return
        for slot in part:
            index = batch.indices[slot] if work.batched else batch.indices
            try:
                batch.items[slot] = work.dataset[index]
            except Exception:
                batch.failed[slot] = _wrapped(
                    f"in DataLoader worker thread {number}, for sample {index!r}"
                )

    def _finish(self, number: int, batch: _Batch) -> None:
        work = self._work
        began = time.perf_counter()
        try:
            if batch.failed and not work.skip:
                return
            items: Any = [item for slot, item in enumerate(batch.items) if slot not in batch.failed]
            for slot in sorted(batch.failed):
                if slot >= 0:
                    name = f"{type(work.dataset).__name__}[{batch.indices[slot]!r}]"
                    self._stats.skipped.append(name)
            if items or not batch.failed:
                batch.data = work.collate(items if work.batched else items[0])
                if work.pin is not None:
                    batch.data = work.pin(batch.data)
        except Exception:
            batch.failed[-1] = _wrapped(f"in DataLoader worker thread {number}, while collating")
        finally:
            # A batch that waits to be taken holds no second copy of its samples.
            batch.items = [None] * len(batch.items)
            self._stats.clock.add("collate", time.perf_counter() - began)
            with self._changed:
                batch.done = True
                self._changed.notify_all()


def _wrapped(where: str) -> BaseException:
    """The exception under way as torch's loader re-raises those of its workers: of the same type
    where that can be, with its traceback in its text."""
    original = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
    try:
        original.reraise()  # type: ignore[no-untyped-call]
    except BaseException as error:
        return error.with_traceback(None)
    raise AssertionError("reraise() raises")


def pin_with(device: str | None) -> Callable[[Any], Any]:
    """What puts a batch of any structure into page-locked memory."""

    def pin(data: Any) -> Any:
        return torch.utils.data._utils.pin_memory.pin_memory(data, device)  # type: ignore[no-untyped-call]

    return pin


def torch_feed(begin: Callable[[], Iterator[Any]], skip: int) -> Feed:
    """The batches of torch's own engines: processes, iterable data sets, no workers at all.

    Args:
        begin: makes the iterator.
        skip: batches that an earlier pass has had.
    """
    iterator = begin()
    for _ in range(skip):
        with suppress(StopIteration):
            next(iterator)
    yield None
    while True:
        try:
            data = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield Fed(None, 0, None, error)
            continue
        fed = Fed(data, _length(data))
        del data
        yield fed
        del fed


def _length(data: Any) -> int:
    """Samples of a batch of any structure: the length of its first tensor or list."""
    if isinstance(data, torch.Tensor):
        return len(data) if data.ndim else 1
    if isinstance(data, dict) and data:
        return _length(next(iter(data.values())))
    if isinstance(data, tuple | list) and data:
        return _length(data[0]) if isinstance(data[0], torch.Tensor | dict | tuple) else len(data)
    return 1

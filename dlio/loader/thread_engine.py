"""The engine for any map-style data set: the work of torch's worker processes, done by threads.

A sample is the unit of work where the data set has no `__getitems__`, so one slow sample delays
no other batch; batches come out in order. Exceptions, collate_fn, pinning and timeouts follow
torch's contract. `get_worker_info()` is true in each thread.

Whatever a user's function raises comes in its batch's place; see `dataset_threads`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sized
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from dlio.loader.batch_stream import BatchResult, BatchStream, RunningPass
from dlio.loader.contract import BatchData, CollateFn, UserDataset
from dlio.loader.dataset_threads import DatasetThreads, timed_out, worker_error
from dlio.loader.loader_options import LoaderOptions, pinning
from dlio.loader.passes import Pass, PassCounters
from dlio.loader.shared_draws import SharedDraws
from dlio.loader.trace import Spans
from dlio.storage.mount import Mount
from dlio.util.thread_copies import own_copy

_PARTS: Final = 4
"""Tasks of a batch for each thread, so that they end together."""


class ThreadEngine:
    """Makes batches by threads that ask a map-style data set."""

    def __init__(self) -> None:
        self.base_seed: int | None = None
        """torch's base seed as it was drawn last; thread k has `base_seed` + k."""
        self.was_drawn = False
        """True from the draw of a pass's base seed until the pass begins."""
        self._draws = SharedDraws()
        self._kept: list[UserDataset] = []
        """The threads' data sets as they are since the first pass of persistent workers."""
        self._kept_collates: list[CollateFn] = []

    def begin(
        self,
        options: LoaderOptions,
        dataset: UserDataset,
        collate: CollateFn,
        threads: int,
        mounted: Mount | None,
        batches: Pass,
        spans: Spans | None,
        draws_seed: bool = True,
    ) -> RunningPass:
        """Begin the work of a pass.

        `dataset` is the loader's own, or dlio's view of it, with tiers `mounted` behind it;
        `draws_seed` is False if the base seed of this pass has been drawn.
        """
        factor = 2 if options.prefetch_factor is None else max(1, options.prefetch_factor)
        # A thread has its own, as a worker process of torch's has. Persistent workers were given
        # theirs once: attributes that a user assigns later do not reach them.
        datasets = self._kept if dataset is options.dataset else []
        collates = self._kept_collates
        if len(datasets) != threads:
            pairs = [own_copy((dataset, collate)) for _ in range(threads)]
            datasets, collates = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if options.persistent_workers and dataset is options.dataset:
            self._kept, self._kept_collates = datasets, collates
        work = _BatchWork(
            options=options,
            datasets=datasets,
            collates=collates,
            threads=threads,
            ahead=threads * factor,
            pin=pinning(options),
            seed=self.base_seed_of(options) if draws_seed else self.base_seed or 0,
            draws=self._draws,
        )
        stats = PassCounters(None if mounted is None else mounted.hierarchy, threads, "threads")
        feed = _feed(work, batches, stats, spans)
        next(feed)
        return RunningPass(batches, stats, feed, spans, workers=work.running)

    def draws(self, options: LoaderOptions) -> bool:
        """True if a pass draws a base seed: persistent workers keep theirs."""
        return self.base_seed is None or not options.persistent_workers

    def draw_base_seed(
        self, options: LoaderOptions, generator: torch.Generator | None = None
    ) -> int:
        """Draw the base seed that torch's loader draws before a sampler draws its numbers; return
        it. Drawn from torch's generator, the options' one, or the given one."""
        if self.base_seed is None or not options.persistent_workers:
            source = generator or options.generator
            drawn = torch.empty((), dtype=torch.int64).random_(generator=source)
            self.base_seed = int(drawn.item())
        return self.base_seed

    def base_seed_of(self, options: LoaderOptions) -> int:
        """Return the base seed of a pass that begins now; drawn, if it has not been."""
        drawn, self.was_drawn = self.was_drawn, False
        if drawn and self.base_seed is not None:
            return self.base_seed
        return self.draw_base_seed(options)


@dataclass(frozen=True, slots=True)
class _BatchWork:
    options: LoaderOptions
    datasets: list[UserDataset]
    """One for each thread."""
    collates: list[CollateFn]
    threads: int
    ahead: int
    """Batches under way at a time."""
    pin: Callable[[BatchData], BatchData] | None
    seed: int
    """torch's base seed."""
    draws: SharedDraws
    running: list[threading.Thread] = field(default_factory=list)
    """The threads, once they run."""

    def prepare(self, number: int) -> None:
        """Call the user's `worker_init_fn` in a thread, if threads are the user's workers.

        In threads by which dlio reads a data set itself, as a loader without workers does, too, it
        would seed the random numbers of the user's own process.
        """
        options = self.options
        if options.worker_init_fn is not None and options.num_workers and options.in_threads:
            options.worker_init_fn(number)

    @property
    def skip(self) -> bool:
        """Leave out samples for which the data set raises."""
        return self.options.on_error == "skip"


@dataclass(slots=True)
class _ThreadBatch:
    indices: Any
    """As the sampler has yielded them."""
    numbers: list[Any]
    """The same, one for each sample."""
    samples: Any
    """A list; or a collection of any type, from a data set's `__getitems__`."""
    left: int
    """Tasks that are not done yet."""
    failed: dict[int, BaseException] = field(default_factory=dict)
    """Error of each slot that failed; slot -1 is the whole batch."""
    data: BatchData = None
    done: bool = False
    is_drawn: bool = True
    """False for an error of the sampler, which stands for no batch."""


def _feed(work: _BatchWork, batches: Pass, stats: PassCounters, spans: Spans | None) -> BatchStream:
    """Yield the batches of a pass, and the exceptions that torch's workers would raise."""
    indices = iter(batches)
    with closing(_ThreadPass(work, stats, spans)) as threads:

        def submit() -> bool:
            while threads.under_way < work.ahead:
                try:
                    drawn = next(indices)
                except StopIteration:
                    return True
                except Exception as error:
                    # The batches that were drawn before it come first.
                    threads.submit_error(error, is_drawn=False)
                    return True
                threads.submit(drawn)
            return False

        exhausted = submit()
        yield None
        while threads.under_way:
            batch = threads.take()
            if batch is None:
                yield BatchResult(None, 0, None, timed_out(work.options.timeout), in_place=False)
                continue
            if not exhausted:
                exhausted = submit()
            fed = _fed(batch, work)
            del batch
            if fed is None:
                batches.consumed()  # All its samples are left out: there is nothing to hand over.
                continue
            yield fed
            del fed


def _fed(batch: _ThreadBatch, work: _BatchWork) -> BatchResult | None:
    numbers = batch.numbers
    count = len(numbers)
    # The first of its samples, not the first in time: the same error in each run.
    if batch.failed and (not work.skip or -1 in batch.failed):
        first = min(batch.failed)
        return BatchResult(None, count, numbers, batch.failed[first], in_place=batch.is_drawn)
    if batch.failed:
        numbers = [n for k, n in enumerate(numbers) if k not in batch.failed]
        if not numbers:
            return None
    data, batch.data = batch.data, None
    return BatchResult(data, len(numbers), numbers)


class _ThreadPass:
    """The batches of one pass, on their way through threads. Closed by the feed, its owner."""

    def __init__(self, work: _BatchWork, stats: PassCounters, spans: Spans | None) -> None:
        self._work, self._stats, self._spans = work, stats, spans
        self._changed = threading.Condition()
        self._waiting: deque[_ThreadBatch] = deque()
        asks_together = bool(getattr(work.datasets[0], "__getitems__", None))
        self._together = work.options.batched and asks_together
        self._threads = DatasetThreads[tuple[_ThreadBatch, range]](
            "dlio-fetch",
            work.threads,
            work.prepare,
            self._serve,
            work.datasets.__getitem__,
            lambda: work.seed,
            stopped=self._notify,
        )
        self._threads.workers.start()
        work.running.extend(self._threads.workers.threads)
        stats.python_threads.extend(work.running)

    def close(self) -> None:
        self._threads.workers.close()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def under_way(self) -> int:
        return len(self._waiting)

    def submit(self, indices: Any) -> None:
        """Queue the samples of a batch."""
        numbers = [indices]
        if self._work.options.batched:
            try:
                numbers = list(indices)
            except Exception as error:
                self.submit_error(error)
                return
            if not isinstance(indices, Sized):
                indices = numbers  # An iterator, which is used up.
        count = len(numbers)
        batch = _ThreadBatch(indices, numbers, [None] * count, 0)
        # Several tasks a thread, so that one slow sample holds up only its own task.
        size = max(1, count // (_PARTS * self._work.threads))
        if self._together or not count:
            size = max(1, count)
        parts = [range(at, min(at + size, count)) for at in range(0, max(1, count), size)]
        batch.left = len(parts)
        with self._changed:
            self._waiting.append(batch)
        for part in parts:
            self._threads.put((batch, part))

    def submit_error(self, error: BaseException, is_drawn: bool = True) -> None:
        """Queue an error in place of a batch, or after the last one."""
        failed = _ThreadBatch(None, [], [], 0, failed={-1: error}, done=True, is_drawn=is_drawn)
        with self._changed:
            self._waiting.append(failed)

    def take(self) -> _ThreadBatch | None:
        """Return the next batch that is done: the oldest one, unless any order will do. None if it
        is not done in time; a later call waits on. Raises as `DatasetThreads.wait_for`."""
        self._work.draws.waiting(True)
        try:
            return self._threads.wait_for(self._take_done, self._work.options.timeout)
        finally:
            self._work.draws.waiting(False)

    def _take_done(self, wait_s: float) -> _ThreadBatch | None:
        with self._changed:
            ready = self._first_done()
            if ready is None:
                self._changed.wait(wait_s)
                ready = self._first_done()
            if ready is not None:
                self._waiting.remove(ready)
            return ready

    def _first_done(self) -> _ThreadBatch | None:
        if self._work.options.in_order:
            return self._waiting[0] if self._waiting[0].done else None
        return next((batch for batch in self._waiting if batch.done), None)

    def _serve(self, number: int, task: tuple[_ThreadBatch, range], refusal: Any) -> None:
        batch, part = task
        began = time.perf_counter()
        if refusal is not None:
            # A new one each time: once raised it holds the frames of who waited for it.
            batch.failed[-1] = _error_of(refusal)
        else:
            self._fetch(number, batch, part)
        self._stats.clock.add("fetch", time.perf_counter() - began)
        if self._spans is not None:
            self._spans.add("fetch", began, samples=len(part))
        with self._changed:
            batch.left -= 1
            last = batch.left == 0
        if last:
            self._finish(number, batch)

    def _fetch(self, number: int, batch: _ThreadBatch, part: range) -> None:
        work, dataset = self._work, self._work.datasets[number]
        if self._together:
            try:
                # The data set may answer with anything that the collate function takes, also with
                # one object.
                batch.samples = dataset.__getitems__(batch.indices)
            except BaseException:
                batch.failed[-1 if work.skip else 0] = _error_of(
                    worker_error(number, f", for samples {batch.indices}")
                )
            return
        for slot in part:
            index = batch.numbers[slot]
            try:
                looks = work.threads > 1 and work.draws.looks
                sample = work.draws.fetch(dataset, index) if looks else dataset[index]
                batch.samples[slot] = sample
            except BaseException:
                batch.failed[slot] = _error_of(worker_error(number, f", for sample {index!r}"))

    def _finish(self, number: int, batch: _ThreadBatch) -> None:
        work = self._work
        began = time.perf_counter()
        try:
            if batch.failed and not work.skip:
                return
            samples = batch.samples
            if batch.failed:
                samples = [s for slot, s in enumerate(samples) if slot not in batch.failed]
            # By name for `stats()["skipped"]`: users look there for samples to repair.
            for slot in sorted(batch.failed):
                if slot >= 0:
                    name = f"{type(work.datasets[number]).__name__}[{batch.numbers[slot]!r}]"
                    self._stats.skipped.append(name)
            if not batch.failed or samples:
                batch.data = work.collates[number](samples if work.options.batched else samples[0])
                # By the thread that made the batch. torch has a thread for it, since worker
                # processes cannot pin memory for the loader's.
                if work.pin is not None:
                    batch.data = work.pin(batch.data)
        except BaseException:
            batch.failed[-1] = _error_of(worker_error(number, ", while collating"))
        finally:
            batch.samples = []  # A batch that waits to be taken holds no second copy of them.
            self._stats.clock.add("collate", time.perf_counter() - began)
            with self._changed:
                batch.done = True
                self._changed.notify_all()


def _error_of(wrapper: Any) -> BaseException:
    try:
        wrapper.reraise()
    except BaseException as error:
        return error.with_traceback(None)
    raise AssertionError("reraise() raises")

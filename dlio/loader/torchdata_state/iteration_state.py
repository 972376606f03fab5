"""A loader's iterator with a state, and the state that its next pass begins with."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch.utils.data import (
    IterDataPipe,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dlio.loader.batch_stream import BatchStream, RunningPass
from dlio.loader.contract import State, StatefulObject
from dlio.loader.delivery import moved
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.passes import PassCounters
from dlio.loader.sampler_pass import BatchesPass
from dlio.loader.third_party import fit_loop
from dlio.loader.torch_engine import fed_by, plain_loader
from dlio.loader.torch_private import distributed_settings, share_seed
from dlio.loader.torchdata_state.inline_iterator import InlineIterator
from dlio.loader.torchdata_state.parallel_iterator import ParallelIterator, ResumeState
from dlio.loader.torchdata_state.stateful_samplers import StatefulRandom, with_state
from dlio.loader.torchdata_state.transports import (
    ProcessTransport,
    ThreadTransport,
    Transport,
    same,
)
from dlio.loader.torchdata_state.worker_server import FetchOptions, TaskSampler, WorkerServer, start
from dlio.util.printable import tell_once

_RANDOM: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's samplers that draw and have no state."""


class IterationState:
    """The iterator of a loader's last pass, and the state that the next one begins with.

    The workers' states are collected `every` so many batches; 0 for never after the first, so that
    a resumed pass reads them again.
    """

    def __init__(self, options: LoaderOptions, every: int) -> None:
        self._every = every
        self.iterator: InlineIterator | ParallelIterator | None = None
        self._is_ahead = False
        """True if the iterator was made for its state, before the pass began."""
        self.loaded: State | None = None
        """The state that the next pass continues from."""
        self._before: State | None = None
        """The state before the batch that was handed out last; None if nobody needs it."""
        # torch's RandomSampler draws from a generator that the loader shares with it: its order can
        # be resumed only by a sampler that notes the generator's state before it draws. A subclass
        # may draw in another way, and is left alone.
        random: StatefulRandom | None = None
        if options.shuffle and not options.iterable and type(options.sampler) is RandomSampler:
            random = StatefulRandom(options.sampler, options.generator)
        self._random = random

    def begun(
        self, options: LoaderOptions, length: int | None, epoch: int, passes_end: bool = False
    ) -> RunningPass:
        """Begin a pass, as engines do; `length` of an iterable data set, if the user has asked for
        it. With `passes_end`, a loaded state after a pass's last batch continues with the next one,
        where torchdata's loader would have a pass without a batch.

        Raises MismatchedState for a loaded state of another number of workers.
        """
        keeps = options.persistent_workers and options.num_workers > 0
        # `state_dict` before the first batch needs the workers' states, so it has made the iterator
        # already.
        is_ahead, self._is_ahead = self._is_ahead, False
        theirs = self.iterator if is_ahead else None
        steps: int | None = None
        with suppress(TypeError):  # A sampler without a length.
            sampler: Any = options.batch_sampler or options.sampler
            steps = None if options.iterable else len(sampler)
        # The state may be that of the end of a pass.
        while theirs is None or theirs.finished:
            if keeps and isinstance(self.iterator, ParallelIterator):
                theirs = self.iterator
                pipes = isinstance(options.dataset, IterDataPipe)
                theirs.again(share_seed(options.generator, None) if pipes else None)
            else:
                theirs = self._make(options, length)
            if passes_end and steps and theirs.yielded == steps:
                next(theirs, None)  # Now it is finished.
        engine = "threads" if _in_threads(options) and options.num_workers else "torch"
        self._before = None
        looks_back = steps is None and fit_loop.fits()

        def note() -> None:
            if looks_back:
                self._before = theirs.state_dict()

        feed = _feed(theirs, options.device, options.persistent_workers, note)
        next(feed)  # Up to its first `yield None`.
        workers = getattr(theirs, "_workers", ())
        counters = PassCounters(None, options.num_workers, engine)
        if engine == "threads":
            counters.python_threads.extend(workers)
        return RunningPass(
            BatchesPass(epoch, None, steps), counters, feed, None, workers=workers, iterator=theirs
        )

    def state_dict(self, options: LoaderOptions, length: int | None, ahead: int = 0) -> State:
        """Return the state, or with `ahead` that of a batch before; before the first pass, this
        begins it."""
        if type(options.sampler) in _RANDOM and self._random is None:
            numbers = getattr(options.sampler, "generator", None)
            tell_once(
                f"a state with {type(options.sampler).__name__} has not its random numbers: a pass "
                "that is resumed has another order, as with torchdata's loader; "
                + ("save its generator's state as well, or " if numbers is not None else "")
                + "use shuffle=True, or dlio.DataLoader, whose states have them"
            )
        if ahead and self._before is not None:
            return self._before
        if self.iterator is None:
            self._make(options, length)
            self._is_ahead = True
        assert self.iterator is not None
        return self.iterator.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Have the next pass continue from a state; an empty one changes nothing."""
        self.close()
        if state:
            self.loaded = dict(state)

    def copied(self) -> "IterationState":
        """Return one for a copy of the loader, which begins where the next pass would."""
        made = copy.copy(self)
        made.iterator, made._is_ahead = None, False
        return made

    def close(self) -> None:
        """End the workers."""
        iterator, self.iterator, self._is_ahead = self.iterator, None, False
        if isinstance(iterator, ParallelIterator):
            iterator.close()

    def _make(
        self, options: LoaderOptions, length: int | None
    ) -> InlineIterator | ParallelIterator:
        self.close()
        loaded, self.loaded = self.loaded, None
        made: InlineIterator | ParallelIterator
        assert options.sampler is not None
        sampler = with_state(options.sampler, options.batch_sampler, self._random)
        if not options.num_workers:
            plain: Any = plain_loader(options, options.collate_fn, sampler)
            plain._IterableDataset_len_called = length
            numbers = None if self._random is None else options.generator
            own = sampler if options.iterable else None
            made = InlineIterator(plain, own, loaded, numbers)
        else:
            made = self._parallel(options, sampler, length, loaded)
        self.iterator = made
        return made

    def _parallel(
        self, options: LoaderOptions, sampler: Any, length: int | None, state: State | None
    ) -> ParallelIterator:
        workers = options.num_workers
        loaded = None if state is None else ResumeState(state, workers, options.iterable)
        # As torch counts: snapshots are due by the batches that may be under way.
        ahead = (options.prefetch_factor or 2) * workers
        draws = TaskSampler(
            sampler,
            workers,
            ahead,
            self._every,
            options.iterable,
            None if loaded is None else loaded.main,
        )
        # A loaded state brings the length that the user had asked for.
        if loaded is None:
            draws.len_called = length
        if isinstance(options.dataset, IterDataPipe):
            seed = share_seed(options.generator, None)
            if draws.shared_seed is None:
                draws.shared_seed = seed
        recipe = FetchOptions(
            int(options.iterable), options.batched, options.collate_fn, options.drop_last
        )
        server = WorkerServer(
            options.dataset,
            recipe,
            options.worker_init_fn,
            {} if loaded is None else loaded.workers,
            draws.shared_seed,
            distributed_settings(),
        )

        def make(first: int) -> Transport:
            if _in_threads(options):
                copies = options.iterable or isinstance(options.dataset, StatefulObject)
                is_loaded = loaded is not None
                return ThreadTransport(server, draws, options, first, ahead, copies, is_loaded)
            plain = plain_loader(options, same, draws, server, start)
            return ProcessTransport(plain, draws, first, loaded is not None)

        return ParallelIterator(make, draws, workers, self._every, loaded, options.dataset)


def _feed(
    iterator: InlineIterator | ParallelIterator,
    device: Any,
    keeps: bool,
    note: Callable[[], None],
) -> BatchStream:
    """Yield the batches, on a device; `note` is called before each is asked for. None is ahead of
    the user, so that the iterator's state is that of the batches handed out."""
    yield None
    note()
    try:
        for fed in fed_by(iterator):
            if device is not None and fed.error is None:
                fed.data = moved(fed.data, torch.device(device))
            yield fed
            del fed
            note()
    finally:
        if isinstance(iterator, ParallelIterator) and not keeps:
            iterator.close()


def _in_threads(options: LoaderOptions) -> bool:
    """True for threads: if they are asked for, or if the data set has no state of its own.
    torchdata's data sets with a state expect a process: its random numbers may be a part of it."""
    if options.workers is not None:
        return options.workers == "thread"
    return bool(options.in_threads) and not isinstance(options.dataset, StatefulObject)

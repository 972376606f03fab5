"""The batches of a pass as every engine yields them, and the user's iterator."""

import atexit
import inspect
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import DlioError
from dlio.loader.contract import BatchData, Index
from dlio.loader.passes import Pass, PassCounters
from dlio.loader.torch_private import profiler_enabled
from dlio.loader.trace import Spans
from dlio.loader.waiting_threads import LockWatch
from dlio.plan.epoch import EpochPlan


@dataclass(slots=True)
class BatchResult:
    """A batch, or the exception that is raised in its place."""

    data: BatchData
    samples: int
    """Number of samples in the batch."""
    indices: Sequence[Index] | npt.NDArray[np.int64] | None = None
    """Index of each sample; None if the engine does not know them."""
    error: BaseException | None = None
    epoch: int = 0
    """Epoch of the samples' random numbers, if the planned engine made the batch."""
    in_place: bool = True
    """False for an error that does not take a batch's place: the batch may still come."""

    def numbers(self) -> npt.NDArray[np.int64]:
        """The indices, if they are whole numbers; shape (samples,), or (0,) for other keys."""
        indices = self.indices
        if indices is None or not len(indices):
            return np.empty(0, np.int64)
        if isinstance(indices, np.ndarray) or isinstance(indices[0], int | np.integer):
            return np.asarray(indices, np.int64)
        return np.empty(0, np.int64)


BatchStream = Generator[BatchResult | None, None, None]
"""Batches in order. An engine takes the first item, None, which comes when its work has begun."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class RunningPass:
    """A pass whose batches an engine makes. Closed at exit, if a script leaves it open."""

    batches: Pass
    stats: PassCounters
    feed: BatchStream
    spans: Spans | None
    """Trace of the pass, if one is wanted."""
    plan: EpochPlan | None = None
    """Plan of the pass, if dlio makes it."""
    workers: Sequence[Any] = ()
    """The threads or processes that make the batches."""
    iterator: Any = None
    """torch's own iterator, if it makes the batches."""

    def __post_init__(self) -> None:
        _open.add(self)


# Weak: a loader that is dropped in the middle of a pass shall not live until the interpreter's
# exit.
_open: weakref.WeakSet[RunningPass] = weakref.WeakSet()


def _close_all() -> None:
    """Close the passes that a script has left open, while the interpreter can still do it: a feed
    that is collected later finds modules torn down."""
    for begun in list(_open):
        with suppress(ValueError):  # A thread of the user's is inside of it.
            begun.feed.close()


atexit.register(_close_all)
# The threads of these passes are the parent's: closing them in a child would wait for ever.
os.register_at_fork(after_in_child=_open.clear)


def _has_ended(feed: BatchStream) -> bool:
    return inspect.getgeneratorstate(feed) == inspect.GEN_CLOSED


class LoaderIterator(Iterator[BatchData]):
    """The iterator of one pass. An exception in place of a batch does not end it. `handed` is
    called with each batch when it is handed out, and with None at the end; `watch` is the
    loader's."""

    def __init__(
        self,
        begun: RunningPass,
        handed: Callable[[BatchResult | None], None],
        watch: LockWatch,
    ) -> None:
        self._watch = watch
        self._feed = begun.feed
        self._stats = begun.stats
        self._length = begun.batches.steps
        self._handed = handed
        self._workers = begun.workers
        self._num_workers = len(begun.workers)
        self._theirs = begun.iterator
        self._ended_by = ""
        """Cause that has ended the pass before its last batch; "" without one."""
        self.before_first: Callable[[LoaderIterator], None] | None = None
        """Called once, before the first batch."""

    def continue_as(self, other: "LoaderIterator") -> None:
        """Have the batches of another pass, which nobody else iterates over."""
        self.__dict__.update(other.__dict__)
        self.before_first = None

    def __len__(self) -> int:
        """Batches of the pass. Raises TypeError if the data set does not know."""
        if self._length is None:
            raise TypeError("the number of batches is unknown: the data set has no length")
        return self._length

    def __next__(self) -> BatchData:
        if self.before_first is not None:
            act, self.before_first = self.before_first, None
            act(self)
        if not profiler_enabled():
            return self._next()
        with torch.autograd.profiler.record_function("enumerate(DataLoader)#dlio.__next__"):
            return self._next()

    def _next(self) -> BatchData:
        if self._ended_by:
            # The end of the loop would look like that of the epoch.
            raise DlioError(
                f"this pass of the loader was ended by {self._ended_by}, before its last "
                "batch: begin another one with iter(loader)"
            )
        self._stats.wait_begins()
        try:
            fed = next(self._feed)
        except StopIteration:
            self._stats.end()
            self._handed(None)
            raise
        except BaseException as raised:
            self._stats.end()
            if _has_ended(self._feed):  # It may be in another thread's hands.
                self._ended_by = type(raised).__name__
            raise
        assert fed is not None
        if fed.in_place:
            self._handed(fed)
        self._stats.wait_ends(fed.samples)
        self._watch.look(self._stats)
        self._stats.count_sources(fed.numbers)
        if fed.error is not None:
            error, fed.error = fed.error, None
            try:
                if isinstance(error, StopIteration):
                    raise RuntimeError("a data set raised StopIteration") from error
                raise error
            finally:
                del error  # It holds this frame, and with it the pass.
        data, fed.data = fed.data, None
        return data

    def __getattr__(self, name: str) -> Any:
        # People who look into torch's iterator find there what they would of torch's loader.
        theirs = self.__dict__.get("_theirs")
        if theirs is None or not name.startswith("_") or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(theirs, name)

    def __getstate__(self) -> object:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled: pickle the loader")

    def _shutdown_workers(self) -> None:
        """torch's name for `close`, which ends persistent workers too."""
        self.close()
        if self._theirs is not None and hasattr(self._theirs, "_shutdown_workers"):
            self._theirs._shutdown_workers()

    def close(self) -> None:
        """End the pass; work that is under way is dropped."""
        if not _has_ended(self._feed):
            self._ended_by = "close()"
        self._feed.close()
        self._stats.end()

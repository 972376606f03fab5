"""Threads that ask a data set for samples, in the place of torch's worker processes.

Both ways of asking are built on `DatasetThreads`: sample by sample (`thread_engine`), and batch
by batch with states that are saved (`torchdata_state.transports`). It owns the threads and their
queues; the tasks, and where their results go, are the caller's.

Whatever a user's function raises becomes a result, SystemExit and CancelledError included: an
exception that ended a thread would leave the training loop waiting for its batch.
"""

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch

from dlio.errors import DlioError
from dlio.loader.contract import UserDataset
from dlio.loader.torch_private import ExceptionWrapper
from dlio.loader.torch_private import worker_module as _theirs
from dlio.util.caller_modes import CallerModes
from dlio.util.forks import new_lock
from dlio.util.threads import Workers

_POLL_S: Final = 0.2
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class DatasetThreads(Generic[_Task]):
    """Threads in which `torch.utils.data.get_worker_info()` is true.

    `prepare`, the user's `worker_init_fn`, is called in each thread with its number before its
    first task. Tasks are done by `serve(number, task, refusal)`, which must not raise; `refusal`
    wraps an error of `prepare`, None if nothing. Both run in the modes (`CallerModes`) of the
    thread that makes this object. Thread k finds `datasets[k]` and the seed `seed` + k in
    `get_worker_info()`. With `own_queues` a task is for one thread; otherwise any thread takes
    it. `stopped` is called once the threads are asked to stop, to end the caller's waits.
    """

    def __init__(
        self,
        name: str,
        count: int,
        prepare: Callable[[int], object],
        serve: Callable[[int, _Task, Any], None],
        datasets: Callable[[int], UserDataset],
        seed: Callable[[], int],
        own_queues: bool = False,
        stopped: Callable[[], None] | None = None,
    ) -> None:
        shared: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._queues = [queue.SimpleQueue() if own_queues else shared for _ in range(count)]

        # Kept by the threads alone, as long as they run: most are methods of the pass that owns
        # this object, which would hold each other.
        def run(number: int) -> None:
            set_worker_info(number, count, seed() + number, datasets(number))
            self._run(number, prepare, serve)

        def wake() -> None:
            for each in self._queues:
                each.put(None)
            if stopped is not None:
                stopped()

        self.workers = Workers(name, CallerModes().within(run), count, wake=wake)
        """The threads: started by the caller, once all exists that `serve` uses, and closed."""

    def put(self, task: _Task, thread: int = 0) -> None:
        """Queue a task; for one thread if each has a queue of its own."""
        self._queues[thread].put(task)

    def wait_for(
        self, ready: Callable[[float], _Result | None], timeout_s: float
    ) -> _Result | None:
        """Return the first result of `ready`, which waits for one for so many seconds at most, that
        is not None; None after `timeout_s`, where 0 waits without end.

        Raises DlioError if the loader is closed meanwhile, or if no thread is left.
        """
        deadline = time.monotonic() + timeout_s
        # Polled, although a result wakes the caller at once: threads that a fork has lost, or that
        # the interpreter has ended, can notify nobody.
        while (result := ready(_POLL_S)) is None:
            if self.workers.stopping.is_set():
                raise DlioError("the loader was closed while a batch was awaited: keep it open")
            if timeout_s and time.monotonic() > deadline:
                return None
            if not self.workers.alive() and (result := ready(0.0)) is None:
                raise DlioError(
                    "the loader's threads have ended before this batch was made, as they do "
                    "in a forked process: make a new iterator with iter(loader)"
                )
            if result is not None:
                return result
        return result

    def _run(
        self,
        number: int,
        prepare: Callable[[int], object],
        serve: Callable[[int, _Task, Any], None],
    ) -> None:
        refusal: Any = None
        try:
            try:
                prepare(number)
            except BaseException:
                refusal = worker_error(number)
            while (task := self._queues[number].get()) is not None:
                if self.workers.stopping.is_set():
                    break
                serve(number, task, refusal)
                del task  # Or a waiting thread would keep a batch's memory.
        finally:
            clear_worker_info()


def worker_error(number: int, where: str = "") -> Any:
    """Return torch's wrapper of the current exception, as its loader has for those of workers: of
    the same type where possible, with its traceback in its text."""
    make: Any = ExceptionWrapper  # torch gives its methods no types.
    return make(where=f"in DataLoader worker thread {number}{where}")


def timed_out(timeout_s: float) -> RuntimeError:
    """Return torch's error for a batch that is late."""
    return RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds")


# torch's `get_worker_info`, made true in each thread. torch keeps the information on a worker
# process in a global of its module. A thread needs its own, so that a data set which opens files,
# or seeds random numbers, by `get_worker_info()` works in threads as it does in processes. Users
# bind the function early (`from torch.utils.data import get_worker_info`), so it is not replaced:
# the body of torch's own function object is, once, when the first thread begins. Outside of dlio's
# threads it returns torch's own record.

_MOST_SEED: Final = 2**64

_here: Any = threading.local()
# By these names the body below finds its values, in torch's module as in this one.
_dlio_worker_info: Any = _here
_dlio_collates: Final = "torch.utils.data._utils.collate"
_worker_info: Any = None
_lock = new_lock()


def set_worker_info(number: int, threads: int, seed: int, dataset: UserDataset) -> None:
    """Set what `get_worker_info()` returns in this thread. `seed` is torch's base seed plus
    `number`: the generators of `rng` begin with it."""
    _install()
    about: dict[str, Any] = {
        "id": number,
        "num_workers": threads,
        "seed": seed,
        "dataset": dataset,
        "worker_method": "thread",
    }
    container: Any = getattr(_theirs, "_RNG", None)  # Of torch 2.13 on.
    if container is not None:
        about["rng"] = container(
            random_generator=random.Random(seed),  # noqa: S311 - torch's own for workers
            torch_generator=torch.Generator().manual_seed(seed),
            numpy_generator=np.random.default_rng(seed % _MOST_SEED),
        )
    make: Any = _theirs.WorkerInfo
    _here.info = make(**about)


def clear_worker_info() -> None:
    """Have `get_worker_info()` return torch's own in this thread."""
    _here.info = None


def _install() -> None:
    """Replace the body of torch's `get_worker_info`, once."""
    names: Any = vars(_theirs)
    # Replacing `__code__` keeps the function's identity, so names that users have bound early are
    # changed, too.
    if _theirs.get_worker_info.__code__ is _get_worker_info.__code__:
        return
    with _lock:
        names["_dlio_caller"] = _dlio_caller
        names["_dlio_collates"] = _dlio_collates
        names["_dlio_worker_info"] = _here
        _theirs.get_worker_info.__code__ = _get_worker_info.__code__


def _dlio_caller() -> str:
    """The name of the module that calls the function which calls this one."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _get_worker_info() -> object:
    # Runs as the body of torch's function: the names are those of torch's module. Its
    # default_collate asks in order to put batches into shared memory, which threads do not need.
    info = getattr(_dlio_worker_info, "info", None)
    if info is None or _dlio_caller() == _dlio_collates:
        return _worker_info
    return info


# A forked child does not belong to its parent's loader, whichever thread has forked it.
os.register_at_fork(after_in_child=clear_worker_info)

"""`get_worker_info` of torch, made true in each thread that asks a data set for samples.

torch keeps the information on a worker process in a global of its module. A thread needs its own,
so that a data set which opens files, or seeds random numbers, by `get_worker_info()` works in
threads as it does in processes. Users bind the function early (`from torch.utils.data import
get_worker_info`), so it is not replaced: the body of torch's own function object is, once, when
the first thread begins. Outside of dlio's threads it returns torch's own record.
"""

import os
import random
import sys
import threading
from typing import Any, Final

import numpy as np
import torch

from dlio.loader.contract import UserDataset
from dlio.loader.torch_private import worker_module as _theirs
from dlio.util.forks import new_lock

_MOST_SEED: Final = 2**64

_here: Any = threading.local()
# By these names the body below finds its values, in torch's module as in this one.
_dlio_worker_info: Any = _here
_dlio_collates: Final = "torch.utils.data._utils.collate"
_worker_info: Any = None
_lock = new_lock()


def set_worker_info(number: int, threads: int, seed: int, dataset: UserDataset) -> None:
    """Set what `get_worker_info()` returns in this thread.

    Args:
        number: of this thread among `threads`.
        seed: torch's base seed plus `number`; the generators of `rng` begin with it.
        dataset: that the thread asks.
    """
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

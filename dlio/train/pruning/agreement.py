"""One decision of all ranks: what they have seen is added up, and the first one's word is kept."""

import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.train.exchange.routes import doubling
from dlio.train.pruning.statistics import Statistics

_TAG: Final = 1
Array = npt.NDArray[np.float64]


def reduced(statistics: Statistics, comm: Communicator) -> Statistics:
    """As `merge` of what all ranks have seen. Collective."""
    if comm.size == 1:
        return statistics
    sums, peaks = statistics.sums(), statistics.peaks()
    comm.wait([comm.iallreduce(sums)], "statistics of neurons")
    greatest(peaks, comm)
    return statistics.reduced(sums, peaks)


def greatest(values: Array, comm: Communicator) -> None:
    """Overwrite `values`, shape (n,), with the greatest of all ranks', place by place; log2 p
    messages. Collective."""
    theirs = np.empty_like(values)
    for kind, peer in doubling(comm.rank, list(range(comm.size))):
        requests = []
        if kind != "send":
            requests.append(comm.irecv(theirs.view(np.uint8), peer, _TAG))
        if kind in ("send", "swap"):
            requests.append(comm.isend(values.copy().view(np.uint8), peer, _TAG))
        comm.wait(requests, "peaks of neurons")
        if kind == "take":
            values[:] = theirs
        elif kind != "send":
            np.maximum(values, theirs, out=values)


def of_first(value: Any, comm: Communicator) -> Any:
    """Rank 0's value, of JSON's types, on all ranks. Collective."""
    if comm.size == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8) if comm.rank == 0 else None
    length = np.array([0 if text is None else len(text)], np.int64)
    comm.bcast(length)
    held = np.empty(int(length[0]), np.uint8) if text is None else text.copy()
    comm.bcast(held)
    return json.loads(held.tobytes())


def total(values: list[float], comm: Communicator) -> list[float]:
    """Sums over ranks, the same numbers everywhere. Collective."""
    sums = np.array(values, np.float64)
    comm.wait([comm.iallreduce(sums)], "the loss of a trial")
    # Libraries may add in another order on another rank.
    comm.bcast(sums)
    found: list[float] = sums.tolist()
    return found

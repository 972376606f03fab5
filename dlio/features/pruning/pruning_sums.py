"""Reductions over ranks on which pruning bases one common decision."""

import numpy as np

from dlio.comm import Communicator
from dlio.features.pruning.input_statistics import Statistics


def reduced(statistics: Statistics, comm: Communicator) -> Statistics:
    """Merge the statistics of all ranks. Collective."""
    if comm.size == 1:
        return statistics
    sums, peaks = statistics.sums(), statistics.peaks()
    comm.wait([comm.iallreduce(sums)], "statistics of neurons")
    comm.wait([comm.iallreduce(peaks, "max")], "peaks of neurons")
    return statistics.reduced(sums, peaks)


def total(values: list[float], comm: Communicator) -> list[float]:
    """Sum values over ranks, with identical results on all ranks. Collective."""
    sums = np.array(values, np.float64)
    comm.wait([comm.iallreduce(sums)], "the loss of a trial")
    # An allreduce may add in a different order on each rank.
    comm.bcast(sums)
    result: list[float] = sums.tolist()
    return result

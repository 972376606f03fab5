"""MPI through mpi4py: two-sided messages and non-blocking collectives."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    from dlio.errors import CommError as _CommError

    raise _CommError(
        f"this process was started as an MPI rank, but no MPI library can be loaded ({error}): "
        "pip install 'dlio[mpi]', or load your site's MPI module"
    ) from error

from dlio.comm import Buffer, Communicator, Json, Request
from dlio.comm.single import SingleCommunicator
from dlio.comm.waiting import LONGEST_SLEEP_S, default_timeout_s, wait_all
from dlio.errors import CommError

_CANCEL_TIMEOUT_S = 1.0


def mpi_world() -> Communicator:
    """MPI's world, or a single process where it holds one rank."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommError(
            "this MPI library gives less than MPI_THREAD_MULTIPLE, which the background shuffle "
            "needs: use Open MPI 5 (pip install 'dlio[mpi]') or an MPI built with thread support"
        )
    if MPI.COMM_WORLD.size == 1:
        return SingleCommunicator()
    # A duplicate, so that the user's own messages on COMM_WORLD never meet ours.
    return MpiCommunicator(MPI.COMM_WORLD.Dup())


class _MpiRequest:
    def __init__(self, request: "MPI.Request") -> None:
        self._request = request

    def done(self) -> bool:
        return bool(self._request.Test())

    def cancel(self) -> bool:
        if self.done():
            return True
        self._request.Cancel()
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while not (done := self.done()) and time.monotonic() < deadline:
            time.sleep(LONGEST_SLEEP_S)
        return done


class MpiCommunicator:
    """The ranks of one MPI communicator, which it owns."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._timeout_s = default_timeout_s()

    def allgather(self, value: Json) -> list[Json]:
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(mine)
        self._join(
            self._comm.Iallgather(MPI.IN_PLACE, [lengths, 1, MPI.INT64_T]), "allgather of lengths"
        )
        starts = np.concatenate([[0], np.cumsum(lengths)])
        everything = np.empty(int(starts[-1]), np.uint8)
        layout = (lengths.tolist(), starts[:-1].tolist())
        self._join(self._comm.Iallgatherv(mine, [everything, layout, MPI.BYTE]), "allgather")
        return [
            json.loads(everything[starts[k] : starts[k + 1]].tobytes()) for k in range(self.size)
        ]

    def barrier(self) -> None:
        self._join(self._comm.Ibarrier(), "barrier")

    def bcast(self, array: npt.NDArray[Any], root: int = 0) -> None:
        self._join(self._comm.Ibcast(array, root), "broadcast")

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Isend([data, MPI.BYTE], dest, tag))

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Irecv([into, MPI.BYTE], source, tag))

    def iallreduce(self, array: npt.NDArray[Any]) -> Request:
        if array.dtype not in (np.float32, np.float64, np.int64):
            # Open MPI sums types it does not know, bfloat16 above all, into garbage.
            raise CommError(f"cannot sum {array.dtype}: convert it to float32 first")
        return _MpiRequest(self._comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM))

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        wait_all(requests, what, limit_s, f"rank {self.rank} of {self.size}")

    def dup(self) -> "MpiCommunicator":
        return MpiCommunicator(self._comm.Dup())

    def close(self) -> None:
        self._comm.Free()

    def _join(self, request: "MPI.Request", what: str) -> None:
        self.wait([_MpiRequest(request)], what)

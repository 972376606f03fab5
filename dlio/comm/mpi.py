"""MPI through mpi4py: two-sided messages and non-blocking collectives.

The background shuffle wants MPI_THREAD_MULTIPLE. Where the library gives MPI_THREAD_SERIALIZED, one
call is made at a time: none of ours waits inside MPI, but for those that all ranks make at once.
Where it gives less, the thread that has initialised it makes all calls (`dlio.comm.funnel`).
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

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

from dlio.comm.funnel import use_funnel
from dlio.comm.protocol import Buffer, Communicator, Json, Request
from dlio.comm.single import SingleCommunicator
from dlio.comm.waiting import LONGEST_SLEEP_S, default_timeout_s, wait_all
from dlio.errors import CommError

_CANCEL_TIMEOUT_S = 1.0


def mpi_world() -> Communicator:
    """MPI's world, or a single process where it holds one rank."""
    if MPI.COMM_WORLD.size == 1:
        return SingleCommunicator()
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
        _log.warning(_SERIALIZED if level == MPI.THREAD_SERIALIZED else _FUNNELED)
    # A duplicate, so that the user's own messages on COMM_WORLD never meet ours.
    return MpiCommunicator(MPI.COMM_WORLD.Dup())


_log = logging.getLogger("dlio")
T = TypeVar("T")
_SERIALIZED = (
    "this MPI library gives MPI_THREAD_SERIALIZED: dlio's threads call it one at a time, which is "
    "slower; the user's own calls must not be made while a loader is in use"
)
_FUNNELED = (
    "this MPI library lets only one thread call it: samples move between ranks only while that "
    "thread asks for a batch, not while it computes; Open MPI 5 (pip install 'dlio[mpi]'), an MPI "
    "built with thread support, or torchrun let them move all the time"
)


one_at_a_time: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
"""Held around calls, below MPI_THREAD_MULTIPLE."""
if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    one_at_a_time = threading.RLock()


def _caller() -> Callable[[Callable[[], Any]], Any]:
    """What makes MPI calls, as the library allows."""
    level = MPI.Query_thread()
    if level == MPI.THREAD_MULTIPLE:
        return lambda function: function()
    if level < MPI.THREAD_SERIALIZED:
        return use_funnel().call

    def call(function: Callable[[], Any]) -> Any:
        with one_at_a_time:
            return function()

    return call


_made = _caller()


def _call(function: Callable[[], T]) -> T:
    found: T = _made(function)
    return found


@cache
def _quiet() -> "MPI.Intracomm":
    """A communicator that no message comes on: Open MPI looks after the others only when it finds
    none on the one that it is asked about."""
    return MPI.COMM_SELF.Dup()


class _MpiRequest:
    def __init__(self, request: "MPI.Request", keep: object = None) -> None:
        self._request = request
        self._keep = keep  # mpi4py holds no memory that a reduction sends from.

    def done(self) -> bool:
        return _call(lambda: bool(self._request.Test()))

    def cancel(self) -> bool:
        if self.done():
            return True
        _call(lambda: self._request.Cancel())
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
        gathering = _call(lambda: self._comm.Iallgather(MPI.IN_PLACE, [lengths, 1, MPI.INT64_T]))
        self._join(gathering, "allgather of lengths")
        starts = np.concatenate([[0], np.cumsum(lengths)])
        everything = np.empty(int(starts[-1]), np.uint8)
        layout = (lengths.tolist(), starts[:-1].tolist())
        gathering = _call(lambda: self._comm.Iallgatherv(mine, [everything, layout, MPI.BYTE]))
        self._join(gathering, "allgather")
        return [
            json.loads(everything[starts[k] : starts[k + 1]].tobytes()) for k in range(self.size)
        ]

    def barrier(self) -> None:
        meeting = _call(lambda: self._comm.Ibarrier())
        self._join(meeting, "barrier")

    def bcast(self, array: npt.NDArray[Any], root: int = 0) -> None:
        telling = _call(lambda: self._comm.Ibcast(array, root))
        self._join(telling, "broadcast")

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return _call(lambda: _MpiRequest(self._comm.Isend([data, MPI.BYTE], dest, tag)))

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return _call(lambda: _MpiRequest(self._comm.Irecv([into, MPI.BYTE], source, tag)))

    def iallreduce(self, array: npt.NDArray[Any]) -> Request:
        if array.dtype not in (np.float32, np.float64, np.int64):
            # Open MPI sums types it does not know, bfloat16 above all, into garbage.
            raise CommError(f"cannot sum {array.dtype}: convert it to float32 first")
        # In place Open MPI takes four times as long, for 100 MB on 2 ranks.
        mine = array.copy()
        return _call(lambda: _MpiRequest(self._comm.Iallreduce(mine, array, MPI.SUM), mine))

    def iallreduce_device(self, tensor: Any) -> Request:
        """Sum a float32 tensor in a GPU's memory in place, where `sums_device_memory`. Its stream
        has been waited for."""
        return _call(lambda: _MpiRequest(self._comm.Iallreduce(MPI.IN_PLACE, tensor), tensor))

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        wait_all(requests, what, limit_s, f"rank {self.rank} of {self.size}")

    def poke(self) -> bool:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED or MPI.Is_finalized():
            return False
        _call(lambda: _quiet().Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG))
        return True

    def dup(self) -> "MpiCommunicator":
        return _call(lambda: MpiCommunicator(self._comm.Dup()))

    def split(self, group: int) -> Communicator:
        part: Any = _call(lambda: self._comm.Split(group, self.rank))
        if part.size > 1:
            return MpiCommunicator(part)
        _call(part.Free)
        return SingleCommunicator()

    def close(self) -> None:
        _call(lambda: self._comm.Free())

    def _join(self, request: "MPI.Request", what: str) -> None:
        self.wait([_MpiRequest(request)], what)

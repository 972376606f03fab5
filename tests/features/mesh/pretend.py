"""Ranks that are threads of one process, so that properties of layers take milliseconds."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from dlio.comm import Op, Request
from dlio.comm.comm_protocol import Array, Buffer
from dlio.comm.deadlines import wait_all
from dlio.comm.single import SingleCommunicator

_T = TypeVar("_T")
_DEADLINE_S = 60.0


class _Meeting:
    """The place where threads exchange messages."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.posted: list[object] = [None] * size
        self.mail: dict[tuple[int, int], SimpleQueue[bytes]] = {
            (source, dest): SimpleQueue() for source in range(size) for dest in range(size)
        }


class _Receive:
    def __init__(self, queue: "SimpleQueue[bytes]", into: Buffer) -> None:
        self._queue, self._into, self._done = queue, into, False

    def done(self) -> bool:
        if not self._done and not self._queue.empty():
            data = self._queue.get()
            memoryview(self._into).cast("B")[: len(data)] = data  # type: ignore[arg-type]
            self._done = True
        return self._done

    def cancel(self) -> bool:
        return True


class ThreadCommunicator(SingleCommunicator):
    """One of some ranks that are threads; as many as the machine's cores are not needed."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting = meeting

    def allgather(self, value: _T) -> list[_T]:
        self._meeting.posted[self.rank] = value
        self._meeting.barrier.wait(_DEADLINE_S)
        everyone = list(self._meeting.posted)
        self._meeting.barrier.wait(_DEADLINE_S)
        return everyone  # type: ignore[return-value]

    def bcast(self, array: Array, root: int = 0) -> None:
        array[...] = self.allgather(array.copy())[root]

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        self._meeting.mail[self.rank, dest].put(bytes(data))
        return super().iallreduce(np.zeros(0))

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return _Receive(self._meeting.mail[source, self.rank], into)

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        array[...] = np.sum(self.allgather(array.copy()), axis=0)
        return super().iallreduce(array)

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        wait_all(requests, what, timeout_s or _DEADLINE_S, f"thread {self.rank}")

    def dup(self) -> "ThreadCommunicator":
        return self

    def split(self, group: int) -> SingleCommunicator:
        groups = self.allgather(group)
        if groups.count(group) == 1:
            return SingleCommunicator()
        assert groups.count(group) == self.size
        return self


def on_ranks(size: int, run: Callable[[ThreadCommunicator], _T]) -> list[_T]:
    """Return the results of a function that runs on each of some ranks."""
    meeting = _Meeting(size)

    def work(rank: int) -> _T:
        try:
            return run(ThreadCommunicator(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(work, rank) for rank in range(size)]]

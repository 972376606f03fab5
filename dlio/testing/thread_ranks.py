"""Ranks that are threads of one process: a communicator for tests, without MPI.

It keeps every promise of `dlio.comm.Communicator`, copies each message, and reduces in the order
of ranks, so that all ranks get the same bytes.
"""

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from dlio.comm.comm_protocol import Array, Buffer, Op, Request
from dlio.comm.communicator_base import CommunicatorBase, check_memory, check_reducible
from dlio.comm.single import CompleteRequest
from dlio.errors import CommError

_T = TypeVar("_T")
_TIMEOUT_S: Final = 60.0
_REDUCTIONS: Final = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class _RankThreads:
    """All ranks of a `run_ranks`: if one fails, the others stop waiting for it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure: BaseException | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise CommError(f"another rank has failed: {self.failure!r}")


@dataclass
class _Collective:
    """One collective: the ranks' contributions, and groups that it makes."""

    values: dict[int, object] = field(default_factory=dict)
    groups: dict[object, "_RankGroup"] = field(default_factory=dict)


class _RankGroup:
    """Messages and collectives among some ranks. Thread-safe under `lock`."""

    def __init__(self, size: int, job: _RankThreads) -> None:
        self.size = size
        self.job = job
        self.lock = threading.Lock()
        self.messages: defaultdict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int, int], deque[_PendingReceive]] = defaultdict(
            deque
        )
        self.meetings: defaultdict[int, _Collective] = defaultdict(_Collective)

    def match(self, key: tuple[int, int, int]) -> None:
        """Hand messages to the receives that wait for them. `lock` is held."""
        while self.messages[key] and self.receives[key]:
            self.receives[key].popleft().arrived = self.messages[key].popleft()


class _PendingReceive:
    """A receive that waits for its message."""

    def __init__(self, group: _RankGroup, key: tuple[int, int, int], into: memoryview) -> None:
        self.arrived: bytes | None = None
        self._group, self._key, self._into = group, key, into
        self._taken = False

    def done(self) -> bool:
        """True if the message is in the buffer. Raises CommError if it is too long for that."""
        self._group.job.check()
        if self.arrived is None or self._taken:
            return self._taken
        if len(self.arrived) > len(self._into):
            raise CommError(f"{len(self.arrived)} bytes came where {len(self._into)} have room")
        self._into[: len(self.arrived)] = self.arrived
        self._taken = True
        return True

    def cancel(self) -> bool:
        """Give the receive up: the next one gets the message."""
        with self._group.lock:
            if self in self._group.receives[self._key]:
                self._group.receives[self._key].remove(self)
        return True


class _PendingReduction(CompleteRequest):
    """A reduction that waits for the other ranks."""

    def __init__(self, group: _RankGroup, meeting: _Collective, array: Array, op: str) -> None:
        self._group, self._meeting = group, meeting
        self._array, self._op = array, op
        self._taken = False

    def done(self) -> bool:
        """True if the result is in the array."""
        self._group.job.check()
        if self._taken or len(self._meeting.values) < self._group.size:
            return self._taken
        total = np.array(self._meeting.values[0])
        for rank in range(1, self._group.size):
            total = _REDUCTIONS[self._op](total, np.asarray(self._meeting.values[rank]))
        np.copyto(self._array, total)
        self._taken = True
        return True


class _Arrival(CompleteRequest):
    """Waits until all ranks have joined a collective."""

    def __init__(self, group: _RankGroup, meeting: _Collective) -> None:
        self._group, self._meeting = group, meeting

    def done(self) -> bool:
        """True if all ranks have joined."""
        self._group.job.check()
        return len(self._meeting.values) == self._group.size


class ThreadCommunicator(CommunicatorBase):
    """One of the ranks of `run_ranks`, used by one thread. See `dlio.comm.Communicator`."""

    def __init__(self, group: _RankGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group, self._timeout_s = group, group.job.timeout_s
        self._joined = 0
        self._closed = False

    def allgather(self, value: _T) -> list[_T]:
        """Return every rank's value, indexed by rank. Collective."""
        values = self._meet(json.dumps(value), "allgather").values
        return [json.loads(str(values[rank])) for rank in range(self.size)]

    def barrier(self) -> None:
        """Return once all ranks have called it. Collective."""
        self._meet(None, "a barrier")

    def bcast(self, array: Array, root: int = 0) -> None:
        """Overwrite a contiguous array with `root`'s. Collective."""
        check_memory(array)
        values = self._meet(array.copy() if self.rank == root else None, "a broadcast").values
        np.copyto(array, np.asarray(values[root]))

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        """Send a copy of `data` to rank `dest`. Raises CommError for a rank that does not exist."""
        key = (self._known(self.rank), self._known(dest), tag)
        with self._group.lock:
            self._group.messages[key].append(bytes(data))
            self._group.match(key)
        return CompleteRequest()  # The message has been copied.

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Receive at most `len(into)` bytes. Raises CommError for a rank that does not exist."""
        key = (self._known(source), self.rank, tag)
        memory = into.data if isinstance(into, np.ndarray) else memoryview(into)
        receive = _PendingReceive(self._group, key, memory)
        with self._group.lock:
            self._group.receives[key].append(receive)
            self._group.match(key)
        return receive

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        """Start an element-wise reduction, in place. Raises CommError for an unknown dtype."""
        check_reducible(array)
        return _PendingReduction(self._group, self._join(array.copy()), array, op)

    def dup(self) -> "ThreadCommunicator":
        """Return a communicator of the same ranks. Collective."""
        return self.split(0)

    def split(self, group: int) -> "ThreadCommunicator":
        """Return a communicator of the ranks that pass the same number. Collective."""
        meeting = self._meet(group, "dup or split")
        members = [rank for rank in range(self.size) if meeting.values[rank] == group]
        with self._group.lock:
            made = meeting.groups.setdefault(group, _RankGroup(len(members), self._group.job))
        return type(self)(made, members.index(self.rank))

    def close(self) -> None:
        """Release the communicator: using it afterwards raises CommError."""
        self._closed = True

    def _join(self, value: object) -> _Collective:
        if self._closed:
            raise CommError("this communicator is closed")
        with self._group.lock:
            meeting = self._group.meetings[self._joined]
            meeting.values[self.rank] = value
            if len(meeting.values) == self.size:
                del self._group.meetings[self._joined]  # Each rank holds it by now.
        self._joined += 1
        return meeting

    def _meet(self, value: object, what: str) -> _Collective:
        meeting = self._join(value)
        self.wait([_Arrival(self._group, meeting)], what)
        return meeting

    def _known(self, rank: int) -> int:
        if self._closed or not 0 <= rank < self.size or self.size == 1:
            raise CommError(f"rank {rank} does not exist, or is closed: there are {self.size}")
        return rank


def run_ranks(
    count: int,
    body: Callable[[ThreadCommunicator], None],
    *,
    kind: type[ThreadCommunicator] = ThreadCommunicator,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Run `body` on ranks that are threads of this process; raise the first rank's failure.

    Args:
        count: ranks.
        body: is called on each rank with its communicator.
        kind: class of the communicators.
        timeout_s: deadline in seconds of each wait between ranks.
    """
    job = _RankThreads(timeout_s)
    group = _RankGroup(count, job)

    def work(rank: int) -> None:
        try:
            body(kind(group, rank))
        except BaseException as error:
            with group.lock:
                job.failure = job.failure or error

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank-{rank}") for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if job.failure is not None:
        raise job.failure

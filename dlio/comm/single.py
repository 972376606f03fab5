"""A communicator for one process: every collective is complete when it starts."""

from collections.abc import Sequence
from typing import TypeVar

from dlio.comm.comm_protocol import Array, Buffer, Op, Request
from dlio.comm.communicator_base import check_memory, check_reducible
from dlio.errors import CommError

_T = TypeVar("_T")


class CompleteRequest:
    """A request that is complete from the start."""

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True


class SingleCommunicator:
    """A group of one rank."""

    rank = 0
    size = 1

    def allgather(self, value: _T) -> list[_T]:
        return [value]

    def tell(self, value: _T, root: int = 0) -> _T:
        return value

    def barrier(self) -> None:
        pass

    def bcast(self, array: Array, root: int = 0) -> None:
        check_memory(array)  # A program that runs alone must run with others, too.

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        raise CommError(f"one process has no rank {dest} to send to")

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        raise CommError(f"one process has no rank {source} to receive from")

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        check_reducible(array)
        return CompleteRequest()

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        pass

    def poke(self) -> bool:
        return False

    def dup(self) -> "SingleCommunicator":
        return self

    def split(self, group: int) -> "SingleCommunicator":
        return self

    def close(self) -> None:
        pass

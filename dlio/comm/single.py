"""One process: every collective is done when it begins."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from dlio.comm.protocol import Buffer, Json, Request
from dlio.errors import CommError


class _Done:
    """A request that has nothing to wait for."""

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True


class SingleCommunicator:
    """A group of one rank."""

    rank = 0
    size = 1

    def allgather(self, value: Json) -> list[Json]:
        return [value]

    def barrier(self) -> None:
        pass

    def bcast(self, array: npt.NDArray[Any], root: int = 0) -> None:
        pass

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        raise CommError(f"one process has no rank {dest} to send to")

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        raise CommError(f"one process has no rank {source} to receive from")

    def iallreduce(self, array: npt.NDArray[Any]) -> Request:
        return _Done()

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

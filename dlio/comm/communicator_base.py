"""The calls that communicators of several ranks share: they are made of other calls."""

import json
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dlio.comm.comm_protocol import Array, Op, Request
from dlio.comm.deadlines import default_timeout_s, wait_all
from dlio.comm.float_order import OrderedReduction, ordered_bits
from dlio.errors import CommError

_T = TypeVar("_T")


class CommunicatorBase:
    """Base class of communicators; see `dlio.comm.Communicator`. A subclass sets rank and size."""

    rank: int
    size: int

    def __init__(self) -> None:
        self._timeout_s = default_timeout_s()

    def bcast(self, array: Array, root: int = 0) -> None:
        raise NotImplementedError

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        check_reducible(array)
        if op == "sum" or array.dtype == np.int64:
            return self._reduction(array, op)
        bits = ordered_bits(array, op)  # type: ignore[arg-type] # floats, by the check
        return OrderedReduction(self._reduction(bits, op), bits, array)

    def _reduction(self, array: Array, op: Op) -> Request:
        """Start a reduction by the library, of float32, float64, int32 or int64."""
        raise NotImplementedError

    def tell(self, value: _T, root: int = 0) -> _T:
        text = np.empty(0, np.uint8)
        if self.rank == root:
            text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
        length = np.array([len(text)])
        self.bcast(length, root)
        if self.rank != root:
            text = np.empty(int(length[0]), np.uint8)
        self.bcast(text, root)
        received: _T = json.loads(text.tobytes())
        return received

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        wait_all(requests, what, limit_s, f"rank {self.rank} of {self.size}")

    def poke(self) -> bool:
        return False


def check_memory(array: Array) -> None:
    """Raise CommError for memory that a library would read or write in another order, or cannot.

    mpi4py takes Fortran's order as it lies, gloo takes the elements between those of a slice.
    """
    if not (array.flags.c_contiguous and array.flags.writeable):
        kind = "is not contiguous (C order)" if array.flags.writeable else "is read-only"
        raise CommError(f"the array of shape {list(array.shape)} {kind}: give a contiguous copy")


def check_reducible(array: Array) -> None:
    """Raise CommError for a type whose sums not every library has, and as `check_memory`."""
    check_memory(array)
    # Open MPI silently returns garbage for types it does not know, such as bfloat16.
    if array.dtype not in (np.float32, np.float64, np.int64):
        raise CommError(f"cannot reduce {array.dtype}: convert it to float32 first")

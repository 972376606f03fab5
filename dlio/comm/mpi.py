"""MPI through mpi4py: two-sided messages and non-blocking collectives.

The background shuffle needs MPI_THREAD_MULTIPLE. With MPI_THREAD_SERIALIZED, a lock admits one call
at a time; no call blocks inside MPI except those that all ranks make together (`dup`, `split`).
With less, the thread that initialised MPI makes all calls (`dlio.comm.funnel`).
"""

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

import numpy as np

from dlio.util.extras import how_to_install
from dlio.util.printable import log_warning
from dlio.util.settings import settings

try:
    import mpi4py

    if settings().min_ranks is not None:
        mpi4py.rc.finalize = False  # It hangs after a loss: `dlio.comm.survival.ulfm` ends MPI.
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    from dlio.errors import CommError as _CommError

    raise _CommError(
        f"this process was started as an MPI rank, but no MPI library can be loaded ({error}): "
        f"{how_to_install('mpi')}, or load your site's MPI module"
    ) from error

from dlio.comm.comm_protocol import Array, Buffer, Communicator, Op, Request
from dlio.comm.communicator_base import CommunicatorBase, check_memory
from dlio.comm.deadlines import poll
from dlio.comm.funnel import use_funnel
from dlio.comm.single import SingleCommunicator
from dlio.errors import PeerLost

if TYPE_CHECKING:
    import torch

_CANCEL_TIMEOUT_S: Final = 1.0
_T = TypeVar("_T")
_SERIALIZED: Final = (
    "this MPI library gives MPI_THREAD_SERIALIZED: dlio's threads call it one at a time, which is "
    "slower; do not call MPI yourself while a loader is in use"
)
_FUNNELED: Final = (
    "this MPI library lets only one thread call it: samples move between ranks only while that "
    "thread asks for a batch, not while it computes; Open MPI 5, an MPI built with thread support, "
    "or torchrun let them move all the time"
)
_LOST: Final = frozenset(
    getattr(MPI, name)
    for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    if hasattr(MPI, name)
)
"""Error classes that say that a rank is gone."""
_UNCLEAR: Final = frozenset((MPI.ERR_OTHER, MPI.ERR_INTERN, MPI.ERR_UNKNOWN))
"""Error classes that Open MPI may give for a request that a loss has ended ("known error not in
list"), as where several ranks of a node go at once."""
_TOLD_TIMEOUT_S: Final = 5.0
"""Time within which MPI knows of the loss behind such an error."""
_UNCLEAR_PER_LOSS: Final = 1000
"""Most of them that a lost rank explains: ranks meet anew for each, but not for ever."""
_OPS: Final = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def mpi_world() -> Communicator:
    """Return a communicator of all MPI ranks, or of this process alone if there is one rank."""
    if MPI.COMM_WORLD.size == 1:
        return SingleCommunicator()
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
        log_warning(_SERIALIZED if level == MPI.THREAD_SERIALIZED else _FUNNELED)
    # A duplicate keeps the user's messages on COMM_WORLD apart from dlio's.
    return MpiCommunicator(MPI.COMM_WORLD.Dup())


one_at_a_time: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
"""Hold this around MPI calls: a lock below MPI_THREAD_MULTIPLE, otherwise without effect."""
if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    one_at_a_time = threading.RLock()


def _call(function: Callable[[], _T]) -> _T:
    """Call MPI in the way that its thread level allows. Raises PeerLost if a rank is gone."""
    try:
        if _LEVEL == MPI.THREAD_MULTIPLE:
            return function()
        if _LEVEL < MPI.THREAD_SERIALIZED:
            return use_funnel().call(function)
        with one_at_a_time:
            return function()
    except MPI.Exception as error:
        if error.Get_error_class() in _LOST or _is_of_a_loss(error):
            raise PeerLost("another rank is gone: it was killed, or its node is lost") from error
        raise


_unclear_errors = 0


def _is_of_a_loss(error: "MPI.Exception") -> bool:
    """True for an unclear error if MPI knows, or comes to know soon, that a rank is gone."""
    global _unclear_errors
    if settings().min_ranks is None or error.Get_error_class() not in _UNCLEAR:
        return False
    _unclear_errors += 1

    def is_explained() -> bool:
        with one_at_a_time:
            _quiet().Iprobe()  # MPI learns of losses when it is called.
            failed: int = MPI.COMM_WORLD.Get_failed().size
        return _unclear_errors <= failed * _UNCLEAR_PER_LOSS

    return poll(is_explained, _TOLD_TIMEOUT_S)


_LEVEL: Final = MPI.Query_thread()
if _LEVEL < MPI.THREAD_SERIALIZED:
    use_funnel()  # The importing thread initialised MPI: it owns the funnel.


@cache
def _quiet() -> "MPI.Intracomm":
    """Return a communicator that never carries a message.

    Open MPI progresses the other communicators only when a probe finds nothing on the probed one.
    """
    return MPI.COMM_SELF.Dup()


class MpiRequest:
    """A request of MPI, and the memory of a reduction; mpi4py holds no reference to that."""

    def __init__(self, request: "MPI.Request", keep: object = None) -> None:
        self._request = request
        self._keep = keep

    def done(self) -> bool:
        return _call(lambda: bool(self._request.Test()))

    def cancel(self) -> bool:
        try:
            if self.done():
                return True
            _call(lambda: self._request.Cancel())
            # Cancelling is a request, too: MPI may write until Test says that it is over. A receive
            # that was let go earlier could match a later message of its tag, and write into freed
            # memory.
            return poll(self.done, _CANCEL_TIMEOUT_S)
        except PeerLost:
            return True  # MPI has ended it.


def agreed(comm: "MPI.Intracomm", well: bool) -> bool:
    """Return True if all ranks of `comm` are alive and say True. Collective; needs ULFM."""
    try:
        return bool(comm.Agree(1 if well else 0)) and well
    except MPI.Exception:
        return False


class Renewer(Protocol):
    """Rebuilds communicators after a loss; see `dlio.comm.survival.ulfm`."""

    def add(self, handle: "MpiCommunicator") -> None:
        """Rebuild a communicator in each new generation."""

    def drop(self, handle: "MpiCommunicator") -> None:
        """Forget a communicator that this rank has closed."""

    def agree(self, well: bool) -> bool:
        """Return True if all ranks of this generation are alive and say True. Collective."""


class MpiCommunicator(CommunicatorBase):
    """The ranks of one MPI communicator, which it owns.

    `membership` rebuilds it, its duplicates and its parts when a rank is lost. `colours` are the
    numbers of the parts of all ranks that it is a part of, from the largest.
    """

    def __init__(
        self,
        comm: "MPI.Intracomm",
        membership: Renewer | None = None,
        colours: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.raw = comm
        """The communicator of mpi4py."""
        self.rank = comm.rank
        self.size = comm.size
        self.membership = membership
        self.colours = tuple(colours)
        self.over = False
        """True once a later generation lacks it."""
        self.rests = False
        """True while this rank is a spare, and takes no part in it."""
        if membership is not None:
            membership.add(self)

    def replace(self, comm: "MPI.Intracomm | None") -> None:
        """Go on with another communicator; None if there is none in this generation."""
        self.over, self.rests = comm is None, False
        if comm is not None:
            self.raw = comm
            self.rank, self.size = comm.rank, comm.size

    def rest(self) -> None:
        """Take no part until `replace` is called: this rank is a spare, or about to leave."""
        self.rests = True

    def allgather(self, value: _T) -> list[_T]:
        # JSON instead of mpi4py's lower-case calls: these pickle, and messages of other ranks must
        # not run code here. Non-blocking, because blocking calls spin on a core that decode threads
        # need.
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(mine)
        gathering = _call(lambda: self.raw.Iallgather(MPI.IN_PLACE, [lengths, 1, MPI.INT64_T]))
        self._join(gathering, "allgather of lengths")
        starts = np.concatenate([[0], np.cumsum(lengths)])
        everything = np.empty(int(starts[-1]), np.uint8)
        layout = (lengths.tolist(), starts[:-1].tolist())
        gathering = _call(lambda: self.raw.Iallgatherv(mine, [everything, layout, MPI.BYTE]))
        self._join(gathering, "allgather")
        return [
            json.loads(everything[starts[k] : starts[k + 1]].tobytes()) for k in range(self.size)
        ]

    def barrier(self) -> None:
        meeting = _call(lambda: self.raw.Ibarrier())
        self._join(meeting, "barrier")

    def bcast(self, array: Array, root: int = 0) -> None:
        check_memory(array)
        broadcast = _call(lambda: self.raw.Ibcast(array, root))
        self._join(broadcast, "broadcast")

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return _call(lambda: MpiRequest(self.raw.Isend([data, MPI.BYTE], dest, tag)))

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return _call(lambda: MpiRequest(self.raw.Irecv([into, MPI.BYTE], source, tag)))

    def _reduction(self, array: Array, op: Op) -> Request:
        # In place, Open MPI takes four times as long for 100 MB on 2 ranks.
        mine = array.copy()
        both = mine, array
        return _call(lambda: MpiRequest(self.raw.Iallreduce(*both, _OPS[op]), both))

    def iallreduce_device(self, tensor: "torch.Tensor") -> Request:
        """Start summing a float32 or float64 tensor in GPU memory over all ranks, in place.

        Requires `dlio.comm.devices.sums_device_memory()`. The caller has synchronised the stream
        that writes the tensor.
        """
        return _call(lambda: MpiRequest(self.raw.Iallreduce(MPI.IN_PLACE, tensor), tensor))

    def poke(self) -> bool:
        # Without a call into MPI, a long message stands still: over 1 Gbit/s, nothing of one was
        # hidden behind 50 ms of computing that called MPI only in its hooks.
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED or MPI.Is_finalized():
            return False
        _call(lambda: _quiet().Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG))
        return True

    def dup(self) -> "MpiCommunicator":
        return MpiCommunicator(self._made(self.raw.Dup), self.membership, self.colours)

    def split(self, group: int) -> Communicator:
        # The old rank as key keeps the order of ranks, on which assignments of samples rely.
        part = self._made(lambda: self.raw.Split(group, self.rank))
        if part.size > 1 or self.membership is not None:  # All ranks count its communicators.
            return MpiCommunicator(part, self.membership, (*self.colours, group))
        _call(part.Free)
        return SingleCommunicator()

    def _made(self, make: "Callable[[], MPI.Comm]") -> "MPI.Intracomm":
        """Return a communicator when all ranks have made it: until then none may revoke it."""
        if self.membership is None:
            return cast("MPI.Intracomm", _call(make))
        made = None
        with contextlib.suppress(PeerLost, MPI.Exception):
            made = _call(make)
        well = made is not None
        # Ranks that noticed a loss before they came here make the next generation meanwhile. They
        # meet the membership's agreement there, and would never come to one of MPI's.
        if self.colours:
            well = _call(lambda: agreed(self.raw, made is not None))
        else:
            well = self.membership.agree(well)
        if not well or made is None:
            raise PeerLost("another rank was lost while all made a communicator")
        return cast("MPI.Intracomm", made)

    def bound(self) -> "MpiMessages":
        """The present ranks, whatever their numbers are after a loss."""
        return MpiMessages(self, self.raw)

    def close(self) -> None:
        if self.membership is None:
            _call(lambda: self.raw.Free())
        elif not self.over:
            # Not collective: after a loss, the others may be elsewhere.
            self.membership.drop(self)

    def _join(self, request: "MPI.Request", what: str) -> None:
        self.wait([MpiRequest(request)], what)


class MpiMessages:
    """Messages among ranks until one of them is lost: then all calls raise PeerLost."""

    def __init__(self, owner: MpiCommunicator, comm: "MPI.Intracomm") -> None:
        self._owner, self._comm = owner, comm

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return _call(lambda: MpiRequest(self._raw().Isend([data, MPI.BYTE], dest, tag)))

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return _call(lambda: MpiRequest(self._raw().Irecv([into, MPI.BYTE], source, tag)))

    def _raw(self) -> "MPI.Intracomm":
        # That of an earlier generation is revoked, and freed after another loss.
        if self._owner.raw is not self._comm:
            raise PeerLost("a rank was lost since these messages began")
        return self._comm

"""Communicators over gloo that a `StoreMembership` rebuilds when a rank is lost.

Gloo tells of a lost rank only those that are connected to it at that moment; others would wait for
ever. So each request looks at a flag of its generation, which the launcher's store sets. An
abandoned operation goes on in gloo's threads, and may write its results much later: it works on
memory of its own, which is copied when it is done.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from dlio.comm.comm_protocol import Array, Buffer, Op, Request
from dlio.comm.communicator_base import CommunicatorBase, check_memory
from dlio.comm.gloo import allgather_json, bytes_of, sum_options
from dlio.comm.torch_mail import Mail, Message
from dlio.errors import CommError, PeerLost

_GONE: Final = "another rank is gone: it was killed, or its node is lost"
_PATIENCE_S: Final = 2.0
"""Seconds from a broken connection until the launcher must have told of a lost rank."""
_T = TypeVar("_T")


class GlooCollectives(Protocol):
    """The collectives of a ProcessGroupGloo, for which torch has no annotations."""

    def allgather(
        self, into: list[list[torch.Tensor]], mine: list[torch.Tensor], /
    ) -> dist.Work: ...

    def allreduce(
        self, tensors: list[torch.Tensor], options: AllreduceOptions = ..., /
    ) -> dist.Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int, /) -> dist.Work: ...


class Generation:
    """The ranks between two losses.

    Its number is that of the attempt to make it, from 0, the same on all ranks; `members` are the
    numbers of its ranks when the job began. `report` tells all ranks that it is over.
    """

    def __init__(self, number: int, members: Sequence[int], report: Callable[[int], None]) -> None:
        self.number = number
        self.members = tuple(members)
        self.over = False
        """True once a rank is lost, or all are to meet again."""
        self.replaced = False
        """True once the next generation runs."""
        self._report = report
        self._lock = threading.Lock()
        self._suspected_s: float | None = None

    def check(self) -> None:
        """Raise PeerLost if this generation is over."""
        if self.over:
            raise PeerLost(_GONE)

    def suspect(self) -> None:
        """Note a broken connection: the launcher tells soon of the rank that is lost.

        If it does not, all ranks meet and connect again.
        """
        with self._lock:
            now = time.monotonic()
            if self._suspected_s is None:
                self._suspected_s = now
            elif now - self._suspected_s > _PATIENCE_S and not self.over:
                self.over = True
                self._report(self.number)


@dataclass(slots=True, eq=False)
class GenerationRanks:
    """The ranks of a communicator within one generation."""

    generation: Generation
    ranks: tuple[int, ...]
    """Member number of each rank."""
    rank: int
    group: GlooCollectives | None
    """None once it is freed."""
    channel: int
    """Number of the communicator."""
    works: list[dist.Work] = field(default_factory=list)
    """Operations of gloo that may be under way."""

    def begin(self, post: Callable[[GlooCollectives], dist.Work]) -> dist.Work | None:
        """Start an operation of gloo; None if a connection is broken. Raises PeerLost."""
        self.generation.check()
        self.works = [work for work in self.works if not work.is_completed()]
        if self.group is None:
            raise PeerLost(_GONE)
        try:
            work = post(self.group)
        # gloo names no rank, and reports a broken connection at the neighbours of a lost rank only.
        # The launcher knows who died; until it says so, this operation is simply not done.
        except RuntimeError:
            self.generation.suspect()
            return None
        self.works.append(work)
        return work

    def is_idle(self) -> bool:
        """True if gloo has no operation under way: its group can then be freed without waiting."""
        return all(work.is_completed() for work in self.works)


class CommunicatorBuilder(Protocol):
    """Builds communicators; see `StoreMembership`."""

    mail: Mail

    def make(
        self, parent: "StoreCommunicator", ranks: Sequence[int], colours: Sequence[int]
    ) -> "StoreCommunicator":
        """Make a communicator of some ranks, by their member numbers, of another. Collective over
        all of its ranks. Raises PeerLost.
        """

    def add(self, handle: "StoreCommunicator") -> None:
        """Rebuild a communicator in each new generation."""

    def drop(self, handle: "StoreCommunicator") -> None:
        """Forget a communicator that this rank has closed."""


class _StoreReduction:
    """An operation of gloo; `finish` is called once when it is done."""

    def __init__(
        self,
        part: GenerationRanks,
        work: dist.Work | None,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._part, self._work, self._finish = part, work, finish
        self._done = False

    def done(self) -> bool:
        generation = self._part.generation
        if self._done:
            return True
        if generation.replaced:
            raise PeerLost(_GONE)
        if self._work is None:
            generation.suspect()
        elif self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError:
                generation.suspect()
            else:
                self._finish()
                self._done = True
                return True
        generation.check()
        return False

    def cancel(self) -> bool:
        try:
            return self.done()
        except PeerLost:
            return True  # Its memory is its own.


class _StoreMessage:
    """A message under way. Its memory is left alone once PeerLost was raised."""

    def __init__(self, part: GenerationRanks, message: Message, mail: Mail) -> None:
        self._part, self._message, self._mail = part, message, mail

    def done(self) -> bool:
        if self._message.over:
            return True
        if self._part.generation.over:
            self._mail.give_up(self._message)
            if self._message.over:
                return True
            raise PeerLost(_GONE)
        if self._message.unreachable:
            self._part.generation.suspect()
            return False
        return self._message.done()

    def cancel(self) -> bool:
        try:
            return self.done() or self._message.cancel()
        except PeerLost:
            return True


class StoreCommunicator(CommunicatorBase):
    """Ranks that survive each other. See `dlio.comm.Communicator`.

    `colours` are the numbers of the parts of all ranks that it is a part of, from the largest.
    """

    def __init__(
        self, membership: CommunicatorBuilder, part: GenerationRanks, colours: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.membership = membership
        self.colours = tuple(colours)
        self.over = False
        """True once it is closed, or a later generation lacks it."""
        self._go_on_with(part)
        membership.add(self)

    def replace(self, part: GenerationRanks | None) -> None:
        """Go on with other ranks; None if there are none in this generation."""
        # In place: objects that hold this communicator need not learn of the loss.
        self.over = part is None
        if part is not None:
            self._go_on_with(part)

    def _go_on_with(self, part: GenerationRanks) -> None:
        self.part = part
        """Its ranks in this generation."""
        self.rank, self.size = part.rank, len(part.ranks)

    def allgather(self, value: _T) -> list[_T]:
        def gather(into: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> None:
            self._join(lambda group: group.allgather(into, mine), "allgather")

        return allgather_json(value, self.size, gather)

    def barrier(self) -> None:
        self._join(lambda group: group.allreduce([torch.zeros(1)]), "barrier")

    def bcast(self, array: Array, root: int = 0) -> None:
        check_memory(array)
        flat = array.reshape(-1).view(np.uint8)
        own = torch.from_numpy(flat.copy())
        self._join(lambda group: group.broadcast(own, root), "broadcast")
        if self.rank != root:
            flat[:] = own.numpy()

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return self.bound().isend(data, dest, tag)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return self.bound().irecv(into, source, tag)

    def _reduction(self, array: Array, op: Op) -> Request:
        options = sum_options(op)
        # A copy: after a loss gloo may go on writing to it, while the caller's array, which the
        # sums are made from again, stays as it is.
        own = torch.from_numpy(array.copy())
        part = self.part
        work = part.begin(lambda group: group.allreduce([own], options))
        return _StoreReduction(part, work, lambda: np.copyto(array, own.numpy()))

    def dup(self) -> "StoreCommunicator":
        return self.membership.make(self, self.part.ranks, self.colours)

    def split(self, group: int) -> "StoreCommunicator":
        part = self.part
        everyone = self.allgather(group)
        ranks = [
            member for member, theirs in zip(part.ranks, everyone, strict=True) if theirs == group
        ]
        return self.membership.make(self, ranks, (*self.colours, group))

    def bound(self) -> "StoreMessages":
        """The present ranks, whatever their numbers are after a loss."""
        return StoreMessages(self.part, self.membership.mail)

    def close(self) -> None:
        if not self.over:
            self.over = True
            self.membership.drop(self)

    def _join(self, post: Callable[[GlooCollectives], dist.Work], what: str) -> None:
        part = self.part
        self.wait([_StoreReduction(part, part.begin(post))], what)


class StoreMessages:
    """Messages among ranks until one of them is lost: then all calls raise PeerLost."""

    def __init__(self, part: GenerationRanks, mail: Mail) -> None:
        self._part, self._mail = part, mail
        self._channel = (part.generation.number, part.channel)

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        member = self._member(dest)
        return self._begun(self._mail.send(bytes_of(data), member, tag, self._channel))

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        member = self._member(source)
        return self._begun(self._mail.receive(bytes_of(into), member, tag, self._channel))

    def _begun(self, message: Message) -> Request:
        return _StoreMessage(self._part, message, self._mail)

    def _member(self, rank: int) -> int:
        self._part.generation.check()
        if not 0 <= rank < len(self._part.ranks):
            raise CommError(f"no rank {rank} among {len(self._part.ranks)}")
        return self._part.ranks[rank]

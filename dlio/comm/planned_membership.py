"""Membership whose ranks leave where a plan has them leave, and none is lost.

A replay of a job that lost ranks sums over the same ranks in the same steps as the job did. Nothing
of MPI's fault tolerance is needed: communicators of the ranks that continue are split from those of
all. Ranks that have left wait for the end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from dlio.comm.comm_protocol import Array, Buffer, Communicator, Json, Op, Request
from dlio.comm.communicator_base import CommunicatorBase
from dlio.comm.survival.membership import RankLeft, RankMessages, messages_of
from dlio.comm.survival.rank_survivors import RankSurvivors
from dlio.comm.world import replace_world, world

_T = TypeVar("_T")


class PlannedMembership(RankSurvivors["_PlannedCommunicator"]):
    """Ranks that share a job's steps now. One per process; `everyone` is closed by its owner."""

    def __init__(self, everyone: Communicator) -> None:
        super().__init__(everyone.rank, everyone.size, 1)
        self._everyone = everyone
        self._root = everyone.dup()
        self._next = self.members
        self.world = _PlannedCommunicator(self, self._root.dup(), ())

    def plan(self, members: Sequence[int]) -> None:
        """Choose those of the present ranks, ascending, that go on at the next `renew`; the same on
        all.
        """
        self._next = tuple(members)

    def renew(self, report: Json, meets: bool = False) -> list[Json]:
        """See `Membership`; collective over all present ranks.

        Raises RankLeft on a rank that does not go on, when the others have called `end`.
        """
        stays = self.me in self._next
        self._root = self._root.split(int(stays))
        if not stays:
            self.world.rank = -1
            self.end()
            raise RankLeft
        everyone: list[Any] = self._root.allgather([self.me, report])
        for handle in self._held_by_all():
            handle.replace(self._remade(handle.colours))
        self.number += 1
        self.members = tuple(int(each[0]) for each in everyone)
        return [each[1] for each in everyone]

    def interrupt(self) -> None:
        # Ranks leave between batches only.
        pass

    def agree(self, well: bool) -> bool:
        return well

    def end(self) -> None:
        """Wait for all ranks: those that go on have come to the end."""
        arrived = np.zeros(1, np.int64)
        # The others train meanwhile: if one fails, it ends this rank, too.
        request = self._everyone.iallreduce(arrived)
        self._everyone.wait([request], "the end of the replay", math.inf)

    def _held_by_all(self) -> list["_PlannedCommunicator"]:
        """Return the communicators that all present ranks hold, in the order of their making."""
        mine = self._living()
        # A handle may be garbage on some ranks and not yet on others: all rebuild the same ones.
        common = set.intersection(*map(set, self._root.allgather(sorted(mine))))
        return [mine[number] for number in sorted(common)]

    def _remade(self, colours: tuple[int, ...]) -> Communicator:
        """Rebuild a communicator: of all ranks, or of those of the same colours."""
        of_each = [tuple(each) for each in self._root.allgather(list(colours))]
        if not any(of_each):
            return self._root.dup()
        return self._root.split(sorted(set(of_each)).index(of_each[self._root.rank]))


class _PlannedCommunicator(CommunicatorBase):
    """A communicator whose ranks may become fewer.

    `colours` are the numbers of the parts of all ranks that it is a part of, from the largest.
    """

    def __init__(
        self, membership: PlannedMembership, inner: Communicator, colours: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.membership, self._inner, self.colours = membership, inner, colours
        self.rank, self.size = inner.rank, inner.size
        self.over = False
        membership.add(self)

    def replace(self, inner: Communicator) -> None:
        """Go on with other ranks."""
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def bound(self) -> RankMessages:
        """Messages among the present ranks."""
        return messages_of(self._inner)

    def allgather(self, value: _T) -> list[_T]:
        return self._inner.allgather(value)

    def barrier(self) -> None:
        self._inner.barrier()

    def bcast(self, array: Array, root: int = 0) -> None:
        self._inner.bcast(array, root)

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return self._inner.isend(data, dest, tag)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return self._inner.irecv(into, source, tag)

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        return self._inner.iallreduce(array, op)

    def poke(self) -> bool:
        return self._inner.poke()

    def dup(self) -> "_PlannedCommunicator":
        return self._made(self._inner.dup, self.colours)

    def split(self, group: int) -> "_PlannedCommunicator":
        return self._made(lambda: self._inner.split(group), (*self.colours, group))

    def close(self) -> None:
        self.over = True  # Not collective: ranks that have left are elsewhere.

    def _made(
        self, make: Callable[[], Communicator], colours: tuple[int, ...]
    ) -> "_PlannedCommunicator":
        return _PlannedCommunicator(self.membership, make(), colours)


@contextmanager
def planned_world() -> Iterator[PlannedMembership]:
    """Within a `with` statement, `world()` returns a communicator whose ranks leave as planned.

    Collective. Call it before anything else uses `world()`.
    """
    everyone = world()
    membership = PlannedMembership(everyone)
    replace_world(membership.world)
    try:
        yield membership
    finally:
        replace_world(everyone)

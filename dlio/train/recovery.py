"""Going on after a rank is lost: the torn step is repaired in place, and not computed again.

A rank learns of a loss wherever it waits for another: in a step's sums, at the end of an epoch. It
then calls `Recovery.run`, and so do all others. The next generation is made, every part of the
training tells where it is, and those that are behind get from the others what they lack.

What is promised: docs/guides/fault-tolerance.md.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from dlio.comm import Communicator
from dlio.comm.membership import Membership
from dlio.errors import PeerLost

__all__ = ["Loss", "Part", "Recovery", "Report", "recovery_of", "uniform"]

_T = TypeVar("_T")


Report: TypeAlias = dict[str, list[int]]
"""Numbers that say where a part is on one rank."""


class Part(Protocol):
    """A part of the training that is brought to the same place on all ranks."""

    def tell(self) -> Report:
        """Return where this rank is."""

    def settle(self, reports: Sequence[Report], comm: Communicator) -> None:
        """Catch up with the rank that is furthest, or help others to. Collective.

        May be called again after PeerLost.

        Args:
            reports: of each rank that is left, by rank.
        """


class Loss:
    """The ranks that one recovery went on without."""

    def __init__(self, members: tuple[int, ...], left: int, seconds: float) -> None:
        self.members = members
        """Numbers of the lost ranks when the job began."""
        self.left = left
        """Number of ranks that go on."""
        self.seconds = seconds
        """From the moment when this rank learned of the loss."""


class Recovery:
    """Brings all parts of a training over a loss. One per process.

    Args:
        comm: all ranks.
    """

    def __init__(self, membership: Membership, comm: Communicator) -> None:
        self.membership = membership
        self._comm = comm
        self._parts: dict[str, Part] = {}
        self._made = 0
        self.losses: list[Loss] = []
        self.last_counted: dict[int, int] = {}
        """By lost member, the number of its last optimizer step that a rank that is left has taken
        in, from 1, since its exchange was created; 0 if there is none. For exchanges that take in
        the steps of other ranks one by one; see `RunningExchange.counted` for others."""

    def add(self, kind: str, part: Part) -> str:
        """Add a part, in the same order on all ranks; returns its name."""
        name = f"{kind}/{self._made}"
        self._made += 1
        self._parts[name] = part
        return name

    def remove(self, name: str) -> None:
        """Remove a part."""
        self._parts.pop(name, None)

    def run(self) -> None:
        """Make the next generation and bring all parts to one place. Collective.

        Raises CommError when too few ranks are left.
        """
        began, before = time.perf_counter(), self.membership.members
        while not self._attempt():
            pass
        after = self.membership.members
        lost = tuple(member for member in before if member not in after)
        self.losses.append(Loss(lost, len(after), time.perf_counter() - began))

    def uniform(self, act: Callable[[], _T]) -> _T:
        """Return `act()` when it has succeeded on all ranks of one generation. Collective.

        A collective operation that a loss interrupts succeeds on some ranks and fails on others.
        Then all recover and do it again, so `act` must not change what it starts from, or else
        go on from where it was. It may itself call `run`.
        """
        while True:
            try:
                result = act()
                well = True
            except PeerLost:
                well = False
            if self.membership.agree(well):
                return result
            self.run()

    def _attempt(self) -> bool:
        reports: Any = self.membership.renew(
            {name: part.tell() for name, part in self._parts.items()}
        )
        well = True
        try:
            for name, part in self._parts.items():
                part.settle([each[name] for each in reports], self._comm)
        except PeerLost:
            well = False
        return self.membership.agree(well)


_of: Final["WeakKeyDictionary[Any, Recovery]"] = WeakKeyDictionary()


def recovery_of(comm: Communicator) -> Recovery | None:
    """Return this process's recovery; None if the job ends with any rank.

    Args:
        comm: all ranks.
    """
    membership: Membership | None = getattr(comm, "membership", None)
    if membership is None:
        return None
    if membership not in _of:
        _of[membership] = Recovery(membership, comm)
    return _of[membership]


def uniform(comm: Communicator, act: Callable[[], _T]) -> _T:
    """Return `act()` when it has succeeded on all ranks that are left. Collective.

    See `Recovery.uniform`. Where the job ends with any rank, `act` is just called.
    """
    recovery = recovery_of(comm)
    return act() if recovery is None else recovery.uniform(act)

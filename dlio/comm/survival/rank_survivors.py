"""The bookkeeping that both memberships share: members, communicators to rebuild, rounds."""

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from dlio.comm.comm_protocol import Json
from dlio.errors import CommError
from dlio.util.units import counted

_MOST_ROUNDS: Final = 20
"""Losses within one recovery after which a job is given up."""


class RebuiltHandle(Protocol):
    """A communicator that each generation rebuilds in place."""

    over: bool
    """True once this rank has closed it."""


_H = TypeVar("_H", bound=RebuiltHandle)


class RankSurvivors(Generic[_H]):
    """Members of a job and their communicators, as the rank sees them that was number `me` of
    `ranks` when the job began. `least` is the fewest that continue; see `Membership`.
    """

    def __init__(self, me: int, ranks: int, least: int) -> None:
        self.me, self.number = me, 0
        self.members: tuple[int, ...] = tuple(range(ranks))
        self.lost = self.due = False
        self.left: tuple[int, ...] = ()
        self._least = least
        # Weak: who forgets a communicator without closing it must not have it rebuilt for ever.
        self._handles: dict[int, weakref.ref[_H]] = {}
        self._made = 0

    def add(self, handle: _H) -> None:
        """Rebuild a communicator in each new generation; all ranks add them in the same order."""
        self._handles[self._made] = weakref.ref(handle)
        self._made += 1

    def _living(self) -> dict[int, _H]:
        """Return the communicators in use, by number; forgets the others."""
        living = {number: ref() for number, ref in self._handles.items()}
        kept = {n: each for n, each in living.items() if each is not None and not each.over}
        self._handles = {number: self._handles[number] for number in kept}
        return kept

    def _renew_over_losses(self, attempt: Callable[[], list[Json] | None]) -> list[Json]:
        """Return the first result of `attempt`, which is None if another rank was lost."""
        for _ in range(_MOST_ROUNDS):
            if (everyone := attempt()) is not None:
                return everyone
        raise CommError(
            f"{_MOST_ROUNDS} ranks were lost while the others regrouped: this job is given up"
        )

    def _check_enough(self, alive: int) -> None:
        """Raise CommError if too few ranks are alive."""
        if alive < self._least:
            raise CommError(
                f"{counted(alive, 'rank')} left, and --min-ranks is {self._least}: this job ends"
            )


def this_process() -> tuple[str, int]:
    """Return the machine and the number of this process."""
    # Numbers of processes mean nothing in another container of the same name.
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}", os.getpid()


def processes_here(places: Sequence[tuple[str, int]], me: int) -> dict[int, int]:
    """Return the process of each member on this rank's machine, from their `this_process`."""
    machine = places[me][0]
    return {member: process for member, (name, process) in enumerate(places) if name == machine}

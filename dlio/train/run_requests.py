"""Wishes of any rank, such as "end with a checkpoint", on which all ranks act after the same step.

Training is asynchronous, so no rank may wait for an answer. There are two ways to agree without:

- `SynchronousRequests`, where ranks wait for each other anyway. At every `every`-th step a rank
  starts a maximum over all ranks of its wishes, and takes the one that it started `every` steps
  before. So all ranks learn of a wish at the same step, at most `2 every` steps after it was made,
  and a rank waits only for one that is `every` steps behind.
- `AsynchronousRequests`, where ranks never wait within an epoch (asgd). A wish travels in
  ceil(log2 p) hops. Ranks that know of it agree on the step of the furthest, and go on to it. The
  first rank at the end of an epoch has them do so, too: from then on it waits for the others.
"""

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import IntFlag
from typing import Final

import numpy as np

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import leave
from dlio.exchange.exchange_spec import ExchangeSpec

_GOSSIP_STEPS: Final = 8
"""Steps by which ranks may be apart that wait only for some of the others."""
_TAG: Final = 1


class RunRequest(IntFlag):
    """A request of a rank to all."""

    NONE = 0
    SAVE = 1
    """Write a checkpoint."""
    END = 2
    """Write a checkpoint and end, to be resumed."""


_ACTS: Final = (RunRequest.SAVE, RunRequest.END)


class RequestChannel(ABC):
    """The wishes of all ranks, by a communicator of their own.

    One thread uses it; `wish` may be called by a signal's handler.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.dup()
        # Those of this rank that have not been granted. A set: a signal's handler cannot come
        # between reading and writing it.
        self._mine: set[RunRequest] = set()

    def wish(self, wish: RunRequest) -> None:
        """Ask all ranks for something."""
        self._mine.add(wish)

    @abstractmethod
    def after_step(self, step: int, ends_epoch: bool) -> RunRequest:
        """Return the wishes that all ranks act on after this step of the optimizer, counted from 1.

        Called after each step, on all ranks, which wait for each other after the last of an epoch.
        """

    def close(self) -> None:
        """Give up the work under way. Collective."""
        self._comm.close()

    def _flags(self) -> list[bool]:
        """Return whether this rank has each of `_ACTS` among its wishes."""
        return [act in self._mine for act in _ACTS]

    def _granted(self, flags: Iterable[int]) -> RunRequest:
        """Return the wishes of all ranks together, which this rank need not repeat."""
        granted = [act for act, flag in zip(_ACTS, flags, strict=True) if flag]
        self._mine.difference_update(granted)
        return functools.reduce(operator.or_, granted, RunRequest.NONE)


def make_request_channel(comm: Communicator, spec: ExchangeSpec) -> RequestChannel:
    """Return the wishes of ranks that exchange in some way. Collective."""
    if spec.merge == "parzen":
        return AsynchronousRequests(comm)
    return SynchronousRequests(comm, 1 if spec.alike else min(_GOSSIP_STEPS, spec.period))


class SynchronousRequests(RequestChannel):
    """Wishes of ranks that wait for each other at least every few steps, seen once in `every`."""

    def __init__(self, comm: Communicator, every: int) -> None:
        super().__init__(comm)
        self._every = every
        self._all = np.zeros(len(_ACTS), np.int64)
        self._request: Request | None = None

    def after_step(self, step: int, ends_epoch: bool) -> RunRequest:
        if step % self._every:
            return RunRequest.NONE
        agreed = self._granted(self._all) if self._ended() else RunRequest.NONE
        if RunRequest.END not in agreed:
            self._all[:] = self._flags()
            self._request = self._comm.iallreduce(self._all, "max")
        return agreed

    def _ended(self) -> bool:
        """Wait for the maximum under way; False if there is none."""
        if self._request is None:
            return False
        # All ranks have started it, unless one has failed.
        self._comm.wait([self._request], "the wishes of the other ranks")
        self._request = None
        return True

    def close(self) -> None:
        self._ended()
        super().close()


class AsynchronousRequests(RequestChannel):
    """Wishes of ranks that never wait for each other."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        hops = math.ceil(math.log2(comm.size)) if comm.size > 1 else 0
        self._to = [(comm.rank + (1 << hop)) % comm.size for hop in range(hops)]
        self._from = [(comm.rank - (1 << hop)) % comm.size for hop in range(hops)]
        self._known = RunRequest.NONE
        """Wishes that all ranks know of."""
        self._until = 0
        """The step after which all act; 0 while nothing is wished for."""
        self._listen()

    def _listen(self) -> None:
        self._arrived = [bytearray(1) for _ in self._from]
        self._receives = [
            self._comm.irecv(into, source, _TAG + hop)
            for hop, (into, source) in enumerate(zip(self._arrived, self._from, strict=True))
        ]

    def after_step(self, step: int, ends_epoch: bool) -> RunRequest:
        if not self._until:
            heard = [receive.done() for receive in self._receives]
            if not any(heard) and not self._mine and not ends_epoch:
                return RunRequest.NONE
            self._agree(step)
        if step < self._until:
            return RunRequest.NONE
        self._until = 0
        return self._known

    def _agree(self, step: int) -> None:
        """Tell the others, and agree with them on the wishes, and on the step to act after."""
        said = bytearray(1)
        sends = [self._comm.isend(said, to, _TAG + hop) for hop, to in enumerate(self._to)]
        self._comm.wait([*sends, *self._receives], "the wishes of the other ranks")
        furthest = np.array([step, *self._flags()], np.int64)
        self._comm.wait([self._comm.iallreduce(furthest, "max")], "the steps of the other ranks")
        self._until = int(furthest[0])
        self._known = self._granted(furthest[1:])
        self._listen()

    def close(self) -> None:
        for receive, into in zip(self._receives, self._arrived, strict=True):
            if not receive.done() and not receive.cancel():
                leave(receive, into)
        super().close()

"""Membership over ULFM, the fault tolerance of MPI: revoke, agree, shrink.

Open MPI 5.0 wants some care. The thread level is MPI_THREAD_SERIALIZED: two threads inside MPI
hang at a loss over TCP. A communicator that other ranks are still making must not be revoked, so
all agree after each construction. Waiting for ranks that compute is polled, because blocking calls
spin. Its own detector of stopped ranks is off. A rank that leaves does so by a signal or by
`os._exit`, never through MPI_Finalize, which hangs after a loss.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, cast

import mpi4py
import numpy as np
from mpi4py import MPI

from dlio.comm.board import open_board
from dlio.comm.mpi import MpiCommunicator, MpiRequest, agreed, one_at_a_time
from dlio.comm.node_watch import NodeWatch
from dlio.comm.protocol import Json
from dlio.comm.waiting import wait_all
from dlio.errors import CommError, PeerLost, UsageError
from dlio.util.settings import settings

__all__ = ["UlfmMembership"]

_ENABLED: Final = "OMPI_MCA_mpi_ft_enable"
"""Variable that mpirun sets for ranks with fault tolerance."""
_LOSSES: Final = (MPI.Exception, PeerLost)
_MOST_ROUNDS: Final = 20
"""Losses within one recovery after which a job is given up."""


class UlfmMembership:
    """The ranks that are left of MPI's world. One per process.

    Args:
        least: fewest ranks that go on.
    """

    def __init__(self, least: int = 1) -> None:
        """Raises UsageError where MPI was started in another way than losses want."""
        if os.environ.get(_ENABLED) != "1":
            raise UsageError(
                "DLIO_MIN_RANKS is set, but MPI ends with any rank: start it by `mpirun --with-ft "
                "ulfm` of Open MPI 5, or unset DLIO_MIN_RANKS"
            )
        if MPI.Query_thread() != MPI.THREAD_SERIALIZED:
            raise UsageError(
                "DLIO_MIN_RANKS is set, but MPI was not started with MPI_THREAD_SERIALIZED, as "
                "going on after a loss wants: set MPI4PY_RC_THREAD_LEVEL=serialized"
            )
        self.number = 0
        self.lost = False
        self.me = MPI.COMM_WORLD.rank
        self.members: tuple[int, ...] = tuple(range(MPI.COMM_WORLD.size))
        self._least = least
        self._handles: dict[int, weakref.ref[MpiCommunicator]] = {}
        self._made = 0
        self._spent: list[MPI.Intracomm] = []
        with one_at_a_time:
            self._root = MPI.COMM_WORLD.Dup()
            agreed(self._root, True)
        self.world = MpiCommunicator(self._root.Dup(), membership=self)
        # Numbers of processes mean nothing in another container of the same name.
        host = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
        board = open_board()
        mine = (host, os.getpid(), board.file)
        everyone: list[tuple[str, int, int]] = self.world.allgather(mine)
        here = {member: pid for member, (name, pid, _) in enumerate(everyone) if name == host}
        files = {member: everyone[member][2] for member in here}
        self._watch = NodeWatch(here, self.me, lambda: self.members, board, files)
        atexit.register(self._end)

    def add(self, handle: MpiCommunicator) -> None:
        """Rebuild a communicator in each new generation. Communicators are added in the same order
        on all ranks."""
        self._handles[self._made] = weakref.ref(handle)
        self._made += 1

    def drop(self, handle: MpiCommunicator) -> None:
        """Forget a communicator that this rank has closed. Its memory goes with the next loss."""
        handle.over = True

    def agree(self, well: bool) -> bool:
        flag = np.array([well], np.int32)
        try:
            self._poll(lambda: self._root.Iagree(flag), "all ranks to agree")
        except _LOSSES:
            return False
        return bool(flag[0]) and well

    def renew(self, report: Json) -> list[Json]:
        self.lost = True
        old = [handle for handle in self._living().values() if not handle.over]
        with one_at_a_time:
            for comm in (*(handle.raw for handle in old), self._root):
                if not comm.Is_revoked():
                    comm.Revoke()
        self._await_survivors()
        for _ in range(_MOST_ROUNDS):
            with one_at_a_time:
                everyone = self._next_generation(report)
            if everyone is not None:
                return everyone
        raise CommError(
            f"{_MOST_ROUNDS} ranks were lost while the others regrouped: this job is given up"
        )

    def _end(self) -> None:
        """End MPI at the end of a script of the user's: in the ordinary way if no rank was lost."""
        failed = getattr(sys, "last_value", None) is not None
        if MPI.Is_finalized():
            return
        if failed and len(self.members) > 1:
            # The others are told of a signal, and never of an exit code.
            sys.stdout.flush()
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.lost:
            MPI.Finalize()
        elif mpi4py.rc.finalize is not False:
            # The script has imported mpi4py before dlio: it would finalize, and hang.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(failed))

    def _living(self) -> dict[int, MpiCommunicator]:
        living = {number: ref() for number, ref in self._handles.items()}
        self._handles = {n: ref for n, ref in self._handles.items() if living[n] is not None}
        return {n: handle for n, handle in living.items() if handle is not None}

    def _await_survivors(self) -> None:
        """Return when all that are left have come here. Raises CommTimeout after DLIO_TIMEOUT."""
        flag = np.array([1], np.int32)
        while True:
            try:
                self._poll(lambda: self._root.Iagree(flag), "all that are left to regroup")
                return
            except _LOSSES:
                with one_at_a_time:
                    self._root.Ack_failed()

    def _poll(self, begin: Callable[[], MPI.Request], what: str) -> None:
        """Wait for an operation without spinning; blocking calls of MPI would.

        Raises PeerLost or MPI.Exception when a rank is lost, CommTimeout after DLIO_TIMEOUT.
        """
        with one_at_a_time:
            request = MpiRequest(begin())
        wait_all([request], what, settings().timeout_s, f"rank {self.me}")

    def _next_generation(self, report: Json) -> list[Json] | None:
        """Make the next generation; None if a rank is lost meanwhile."""
        root = cast(MPI.Intracomm, self._root.Shrink())
        self._root = root
        if not agreed(root, True):
            return None
        if root.size < self._least:
            raise CommError(
                f"{root.size} ranks are left, and --min-ranks is {self._least}: this job ends"
            )
        handles = {n: handle for n, handle in self._living().items() if not handle.over}
        made: dict[int, MPI.Intracomm] = {}
        everyone: list[Any] = []
        common: set[int] = set()
        well = True
        try:
            # Nobody revokes this communicator: no rank waits on it elsewhere.
            mine = {str(number): list(handle.colours) for number, handle in handles.items()}
            everyone = MpiCommunicator(root).allgather([self.me, mine, report])
            # A rank may have closed one that others have not closed yet: it is gone.
            common = set.intersection(*(set(map(int, each[1])) for each in everyone))
            for number in sorted(common):
                made[number] = self._remade(root, str(number), [each[1] for each in everyone])
        except _LOSSES:
            well = False
        if not agreed(root, well):
            return None
        # Those of the generation before last: no thread asks for its requests any more.
        for comm in self._spent:
            with contextlib.suppress(MPI.Exception):
                comm.Free()
        self._spent = [handle.raw for handle in handles.values()]
        self.number += 1
        self.members = tuple(int(each[0]) for each in everyone)
        for number, handle in handles.items():
            handle.replace(made.get(number))
        return [each[2] for each in everyone]

    def _remade(self, root: MPI.Intracomm, number: str, colours: list[Any]) -> MPI.Intracomm:
        """Make a communicator anew: of all ranks, or of those of the same colours."""
        of_each = [tuple(each[number]) for each in colours]
        if not any(of_each):
            return root.Dup()
        part = root.Split(sorted(set(of_each)).index(of_each[root.rank]), root.rank)
        return cast(MPI.Intracomm, part)

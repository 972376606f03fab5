"""Membership over ULFM, the fault tolerance of MPI: revoke, agree, shrink.

Open MPI 5.0 wants some care. The thread level is MPI_THREAD_SERIALIZED: two threads inside MPI
hang at a loss over TCP. A communicator that other ranks are still making must not be revoked, so
all agree after each construction. Waiting for ranks that compute is polled, because blocking calls
spin. Its own detector of stopped ranks is off. A rank that leaves does so by a signal or by
`os._exit`, never through MPI_Finalize, which hangs after a loss.
"""

import atexit
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import mpi4py
import numpy as np
from mpi4py import MPI

from dlio.comm.board import open_board
from dlio.comm.comm_protocol import Json
from dlio.comm.deadlines import wait_all
from dlio.comm.mpi import MpiCommunicator, MpiRequest, agreed, one_at_a_time
from dlio.comm.survival.active_ranks import (
    MembershipReport,
    RankRequest,
    is_meeting_due,
    leaving_members,
    next_members,
)
from dlio.comm.survival.node_watch import NodeWatch
from dlio.comm.survival.rank_requests import RankRequests
from dlio.comm.survival.rank_survivors import RankSurvivors, processes_here, this_process
from dlio.errors import PeerLost, UsageError
from dlio.util.child_processes import die
from dlio.util.settings import settings
from dlio.util.units import counted

_ENABLED: Final = "OMPI_MCA_mpi_ft_enable"
"""Variable that mpirun sets for ranks with fault tolerance."""
_LOSSES: Final = (MPI.Exception, PeerLost)
_WELL: Final = 1
_RENEWS: Final = 2
"""Bits in which ranks agree: that all went well, and that they are making a generation."""
_LAST_REQUEST: Final = 1 << 30
"""Number of the request that ends the spares."""
_NAP_S: Final = 0.005
"""Time between two looks of a spare at whether it is called."""


class UlfmMembership(RankSurvivors[MpiCommunicator]):
    """The surviving ranks of MPI's world. One per process.

    All ranks are active at first; `want` and `renew` make some of them `spares`, beyond those that
    train at first. At least `least` ranks continue.
    """

    def __init__(self, least: int = 1, spares: int = 0) -> None:
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
        size = MPI.COMM_WORLD.size
        if not 0 <= spares < size:
            raise UsageError(
                f"{spares} spares of {counted(size, 'rank')}: start more ranks, or give fewer "
                "spares"
            )
        super().__init__(MPI.COMM_WORLD.rank, size, least)
        self.spares = spares
        self._alive = self.members
        """Active ranks and spares."""
        self.leaves = self.ends = self.pauses = False
        self.leave_at = math.inf
        self._has_told = False
        """True once the others know that this rank leaves."""
        self._wanted = RankRequest(0, size)
        self._requests = RankRequests()
        self._spent: list[MPI.Intracomm] = []
        with one_at_a_time:
            self._root = MPI.COMM_WORLD.Dup()
            """All that are alive."""
            self._active = MPI.COMM_WORLD.Dup()
            agreed(self._root, True)
            self._whole = self._root
            """That from which the last generation was made. Those of generations that a loss
            interrupted may be half made, and are never freed."""
        self.world = MpiCommunicator(self._active.Dup(), membership=self)
        board = open_board()
        mine = (*this_process(), board.file)
        everyone: list[tuple[str, int, int]] = self.world.allgather(mine)
        here = processes_here([(name, pid) for name, pid, _ in everyone], self.me)
        files = {member: everyone[member][2] for member in here}
        self._watch = NodeWatch(
            here, self.me, lambda: self._alive, board, files, lambda: self.members
        )
        atexit.register(self._end)

    def drop(self, handle: MpiCommunicator) -> None:
        """Forget a communicator that this rank has closed. Its memory goes with the next loss."""
        handle.over = True

    def interrupt(self) -> None:
        self._revoke([handle.raw for handle in self._living().values() if not handle.rests])

    def _revoke(self, comms: Sequence[MPI.Comm]) -> None:
        with one_at_a_time:
            for comm in comms:
                if comm != MPI.COMM_NULL and not comm.Is_revoked():
                    comm.Revoke()

    def agree(self, well: bool) -> bool:
        # Agreement, and no allreduce: it alone gives all survivors the same answer if a rank is
        # lost in its midst. A bitwise AND, so a single No makes it a No.
        flag = np.array([_WELL if well else 0], np.int32)
        try:
            self._poll(lambda: self._active.Iagree(flag), "all ranks to agree")
        except _LOSSES:
            return False
        return bool(flag[0] & _WELL) and well

    @property
    def asked(self) -> bool:
        """True if a rank has asked all others to meet, or if this one is about to."""
        if self._leaves() and not self._has_told:
            return True
        if self._newest_wanted() > self._wanted:
            return True
        with one_at_a_time:
            return bool(self._root.Is_revoked())

    def want(self, ranks: int) -> None:
        """Ask for a number of active ranks, as of the job's beginning."""
        self._wanted = RankRequest(0, ranks)

    def wait_for_call(self) -> list[Json]:
        """Wait, as a spare, until the others make a generation, and take part in it.

        Returns the result of `renew`; nothing when the job is over.
        """
        # Polled, although MPI could block here: a blocked rank spins on a core, and a spare must
        # cost next to nothing for hours.
        while not (self.asked or self._are_all_lost()):
            self.world.poke()
            time.sleep(_NAP_S)
        return self.renew(None)

    def _are_all_lost(self) -> bool:
        """True if no member is left that could tell this spare."""
        with one_at_a_time:
            failed = self._root.Get_failed()
            ranks = MPI.Group.Translate_ranks(failed, None, self._root.Get_group())
        return {self._alive[rank] for rank in ranks} >= set(self.members)

    def dismiss(self) -> None:
        """End the job's spares, at the end of the training. Collective over active ranks."""
        members, self._wanted = self.members, RankRequest(_LAST_REQUEST, 0)
        self.renew(None, meets=True)
        self.members = members

    def renew(self, report: Json, meets: bool = False) -> list[Json]:
        self.lost = True
        old = [handle for handle in self._living().values() if not handle.rests]
        # Revoking ends all waits, also of ranks that wait for a rank that lives: that one will come
        # here, and never send what they wait for.
        self._revoke([*(handle.raw for handle in old), self._active, self._root])
        # Shrink would block in MPI until the last survivor comes, which may compute for seconds.
        self._await_survivors()

        def attempt() -> list[Json] | None:
            with one_at_a_time:
                return self._next_generation(report, meets)

        return self._renew_over_losses(attempt)

    def _end(self) -> None:
        """End MPI at the end of a script of the user's: in the ordinary way if no rank was lost."""
        failed = getattr(sys, "last_value", None) is not None
        if MPI.Is_finalized():
            return
        if failed and len(self.members) > 1:
            # The others are told of a signal, and never of an exit code.
            die()
        # After a loss MPI_Finalize waits for the lost rank for ever.
        if not self.lost:
            # Another rank may be lost at its end, where nobody needs it any more.
            with contextlib.suppress(MPI.Exception):
                MPI.Finalize()
        elif mpi4py.rc.finalize is not False:
            # The script has imported mpi4py before dlio: it would finalize, and hang.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(failed))

    def _await_survivors(self) -> None:
        """Return when all survivors have come here. Raises CommTimeout after DLIO_TIMEOUT."""
        if self._active != MPI.COMM_NULL:
            # Members that wait in `agree` meet this call there, and come here next.
            while self._regrouped(self._active) != _RENEWS:
                pass
        while self._regrouped(self._root) is None:
            pass

    def _regrouped(self, comm: MPI.Intracomm) -> int | None:
        """Return `_RENEWS` if all ranks regroup, other bits if one agrees instead, None at a loss
        that was not known."""
        # Other bits come from ranks that are still in `agree`: the AND of both is 0, so these get a
        # No there, and all know that they have to meet once more.
        flag = np.array([_RENEWS], np.int32)
        try:
            self._poll(lambda: comm.Iagree(flag), "all that are left to regroup")
        except _LOSSES:
            with one_at_a_time:
                comm.Ack_failed()
            return None
        return int(flag[0])

    def _poll(self, begin: Callable[[], MPI.Request], what: str) -> None:
        """Wait for an operation without spinning; blocking calls of MPI would.

        Raises PeerLost or MPI.Exception when a rank is lost, CommTimeout after DLIO_TIMEOUT.
        """
        with one_at_a_time:
            request = MpiRequest(begin())
        wait_all([request], what, settings().timeout_s, f"rank {self.me}")

    def _next_generation(self, report: Json, meets: bool) -> list[Json] | None:
        """Make the next generation; None if a rank is lost meanwhile.

        Returns the reports of its active ranks.
        """
        # From the communicator of all that are alive, spares included: members are split off it
        # below.
        root = cast(MPI.Intracomm, self._root.Shrink())
        self._root = root
        if not agreed(root, True):
            return None
        handles = self._living()
        made: dict[int, MPI.Intracomm] = {}
        active = cast(MPI.Intracomm, MPI.COMM_NULL)
        reported: list[list[Any]] = []
        standings: list[MembershipReport] = []
        members: tuple[int, ...] = ()
        leavers: set[int] = set()
        well = True
        try:
            # Nobody revokes this communicator: no rank waits on it elsewhere.
            colours = {str(number): list(handle.colours) for number, handle in handles.items()}
            self._has_told = self._leaves()
            mine = MembershipReport(
                self.me, self.me in self.members, self._has_told, meets, self._newest_wanted()
            )
            reported = MpiCommunicator(root).allgather([mine, colours, self._made, report])
            standings = [
                MembershipReport(*each[0])._replace(wanted=RankRequest(*each[0][-1]))
                for each in reported
            ]
            members = next_members(standings)
            if members:
                self._check_enough(len(standings))
            is_mine = self.me in members
            colour = 0 if is_mine else MPI.UNDEFINED
            active = cast(MPI.Intracomm, root.Split(colour, root.rank))
            if is_mine:
                chosen = [each for each in reported if each[0][0] in members]
                # A rank may have closed one that others have not closed yet: it is gone.
                common = set.intersection(*(set(map(int, each[1])) for each in chosen))
                for number in sorted(common):
                    made[number] = self._remade(active, str(number), [each[1] for each in chosen])
            leavers = leaving_members(standings, members)
            if leavers:  # The others do not take their end for a loss.
                left = root.Split(int(self.me in leavers), root.rank)
        except _LOSSES:
            well = False
        if not agreed(root, well):
            return None
        if leavers:
            agreed(root, True)  # They end when all others know that they have left.
            self._root = cast(MPI.Intracomm, left)
        # Those of the generation before last: no thread asks for its requests any more.
        for comm in self._spent:
            with contextlib.suppress(MPI.Exception):
                comm.Free()
        self._spent = [handle.raw for handle in handles.values() if not handle.rests]
        self._spent += [each for each in (self._whole, self._active) if each != MPI.COMM_NULL]
        self._whole = root
        self.number += 1
        self.members, self._active = members, active
        self.left = tuple(sorted(leavers))
        self._alive = tuple(s.member for s in standings if s.member not in leavers)
        self._wanted = max(each.wanted for each in standings)
        self._made = max(each[2] for each in reported)
        living = [each for each in standings if each.member in self._alive]
        now = [each._replace(active=each.member in members) for each in living]
        self.due = is_meeting_due(now)
        self.pauses = self.due and self._wanted.ranks == 0
        self.ends = self.pauses or (self.due and all(each.leaves for each in now))
        for number, handle in handles.items():
            if is_mine:
                handle.replace(made.get(number))
            else:
                handle.rest()
        return [each[3] for each in reported if each[0][0] in members]

    def _newest_wanted(self) -> RankRequest:
        """Return the newest request; one made before spares rest waits until then."""
        if not self.number and self.spares:
            return self._wanted
        return max(self._wanted, self._requests.newest())

    def _leaves(self) -> bool:
        return self.leaves or time.monotonic() >= self.leave_at

    def _remade(self, root: MPI.Intracomm, number: str, colours: list[Any]) -> MPI.Intracomm:
        """Rebuild a communicator: of all ranks, or of those of the same colours."""
        of_each = [tuple(each[number]) for each in colours]
        if not any(of_each):
            return root.Dup()
        part = root.Split(sorted(set(of_each)).index(of_each[root.rank]), root.rank)
        return cast(MPI.Intracomm, part)

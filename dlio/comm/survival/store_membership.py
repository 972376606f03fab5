"""Membership over torch.distributed, without MPI: gloo, and a store in the launcher.

The launcher sees each death of a rank and writes it into the store, where a thread of each rank
waits for it. Ranks agree by keys that are written once: the first that knows the outcome writes it,
and all others read it, so that a rank that dies in between changes nothing. A generation has gloo
groups of its own, under names of its own in the store; messages carry its number.
"""

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from dlio.comm.board import open_board
from dlio.comm.comm_protocol import Json
from dlio.comm.deadlines import leave, poll
from dlio.comm.net.address import meeting_address
from dlio.comm.net.gloo_gate import GlooGate
from dlio.comm.private_store import PrivateStore
from dlio.comm.survival.job_store import EventLog
from dlio.comm.survival.node_watch import NodeWatch
from dlio.comm.survival.rank_survivors import RankSurvivors, processes_here, this_process
from dlio.comm.survival.rendezvous import Rendezvous
from dlio.comm.survival.store_comm import Generation, GenerationRanks, StoreCommunicator
from dlio.comm.torch_mail import Mail
from dlio.errors import CommError, CommTimeout, PeerLost
from dlio.util.limits import OPEN_FILES, lacks_files
from dlio.util.settings import settings
from dlio.util.threads import Workers

_Gloo: Final[Any] = dist.ProcessGroupGloo
_LONGEST_SLEEP_S: Final = 4e-3
_GROUP_TIMEOUT_S: Final = 10.0
"""Deadline for gloo to connect ranks that have just met."""
_FREE_TIMEOUT_S: Final = 10.0
_TURN_S: Final = 0.05
_Wanted: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Number of a communicator, its colours and its ranks, by member number."""


class StoreMembership(RankSurvivors[StoreCommunicator]):
    """The survivors of the `ranks` ranks that dlio's launcher started, of which this is `me`, and
    `least` the fewest that continue. `store` is the launcher's. Collective over all of them.
    """

    def __init__(self, store: PrivateStore, me: int, ranks: int, least: int = 1) -> None:
        """Raises CommError if a rank is lost already."""
        super().__init__(me, ranks, least)
        self._timeout_s = settings().timeout_s
        self._store = store
        self._events = EventLog(self._store)
        # A second connection: waiting for an event holds up all other calls of a connection.
        self._watched = self._store.clone()
        self._lock = threading.Lock()
        self._dead: set[int] = set()
        self._ended: set[int] = set()
        """Numbers of generations that a rank has ended."""
        self._agreements = 0
        self._spent: list[GenerationRanks] = []
        """Parts of closed communicators and of earlier generations."""
        self._generation = self._begin(0, self.members)
        self._watch = Workers(
            "dlio-deaths", self._read_events, wake=self._watched.interrupt, serves_others=True
        )
        self._watch.start()
        try:
            everyone = self._open()
            part = self._built(self._generation, [(0, (), self.members)])[0]
            self._made = 1
        except PeerLost as error:
            raise CommError("another rank was lost before all had met: this job ends") from error
        self.world = StoreCommunicator(self, part)
        here = processes_here(everyone, self.me)
        board = open_board()
        files = dict(enumerate(self.world.allgather(board.file)))
        self._hangs = NodeWatch(here, self.me, lambda: self.members, board, files)
        atexit.register(self._end)

    def _open(self) -> list[tuple[str, int]]:
        """Listen for the others; return host and process id of each rank."""
        address = meeting_address(lambda place: self._gathered("place", place))
        self._gate = GlooGate(address)
        self.mail = Mail(self.me, lambda value: self._gathered("mail", value), address)
        everyone = self._gathered("process", this_process())
        return [(name, pid) for name, pid in everyone]

    def _gathered(self, name: str, value: Json) -> list[Any]:
        """Return every rank's value. Collective, for the first generation."""
        self._store.put(f"{name}/{self.me}", value)
        keys = [f"{name}/{member}" for member in self.members]
        self._await(lambda: self._store.has(keys), "all ranks to start", self._generation)
        return self._store.values(keys)

    def close(self) -> None:
        """End the threads; the end of the process does so, too."""
        atexit.unregister(self._end)
        self._end()
        self._hangs.close()
        self._watch.close()
        self._watched.close()
        self.mail.close()

    # Deaths

    def _read_events(self, _: int) -> None:
        """Note deaths and ends of generations as they are written."""
        with suppress(CommError):  # The launcher is gone: this rank is ended, too.
            events = EventLog(self._watched)
            while not self._watch.stopping.is_set():
                event = events.next()
                with self._lock:
                    if "dead" in event:
                        self._dead.add(event["dead"])
                    else:
                        self._ended.add(event["over"])
                    self._judge(self._generation)

    def _judge(self, generation: Generation) -> None:
        dead = not self._dead.isdisjoint(generation.members)
        generation.over |= dead or generation.number in self._ended

    def _begin(self, number: int, members: Sequence[int]) -> Generation:
        generation = Generation(number, members, self._report_end)
        with self._lock:
            self._generation = generation
            self._agreements = 0
            self._judge(generation)
        return generation

    def _report_end(self, number: int) -> None:
        with suppress(CommError):
            self._events.append({"over": number, "by": self.me})

    # Agreement

    def interrupt(self) -> None:
        # The launcher tells all of a loss, which ends their waits.
        pass

    def agree(self, well: bool) -> bool:
        self._agreements += 1
        generation = self._generation
        name = f"agree/{generation.number}/{self._agreements}"
        return self._decided(name, generation, generation.members, well)

    def _decided(
        self, name: str, generation: Generation, members: Sequence[int], well: bool
    ) -> bool:
        """Return True if all members say True before one of the generation is lost. Collective.

        All get the same answer: that of the first that knows it.
        """
        # `put` writes once and returns the value that stands there: the first to know the outcome
        # decides, and a rank that dies between its vote and its reading changes nothing.
        if not well:
            return bool(self._store.put(name, False))
        if self._store.count(f"{name}/votes") == len(members):
            return bool(self._store.put(name, True))
        try:
            self._await(lambda: self._store.has([name]), "all ranks to agree", generation)
        except PeerLost:
            return bool(self._store.put(name, False))
        return bool(self._store.values([name])[0])

    def _await(self, ready: Any, what: str, generation: Generation | None) -> None:
        """Poll without spinning. Raises PeerLost, and CommTimeout after DLIO_TIMEOUT."""

        def is_ready() -> bool:
            done: bool = ready()
            if not done and generation is not None:
                generation.check()
            return done

        if not poll(is_ready, self._timeout_s, _LONGEST_SLEEP_S):
            raise CommTimeout(
                f"rank {self.me} waited {self._timeout_s:.0f} s for {what}: another rank is far "
                "behind or hangs (DLIO_TIMEOUT sets the deadline)"
            )

    # Communicators

    def add(self, handle: StoreCommunicator) -> None:
        self._handles[handle.part.channel] = weakref.ref(handle)

    def drop(self, handle: StoreCommunicator) -> None:
        self._spend([handle.part])

    def make(
        self, parent: StoreCommunicator, ranks: Sequence[int], colours: Sequence[int]
    ) -> StoreCommunicator:
        generation, number = parent.part.generation, self._made
        part = None
        with suppress(PeerLost):
            part = self._built(generation, [(number, tuple(colours), tuple(ranks))])[0]
        name = f"made/{generation.number}/{number}/{parent.part.channel}"
        everyone = parent.part.ranks
        if not self._decided(name, generation, everyone, part is not None) or part is None:
            if part is not None:
                self._spend([part])
            raise PeerLost("another rank was lost while all made a communicator")
        self._made += 1
        return StoreCommunicator(self, part, colours)

    def _built(self, generation: Generation, wanted: Sequence[_Wanted]) -> list[GenerationRanks]:
        """Make groups of gloo for a generation. Collective over each.

        In a thread: gloo connects all ranks, which cannot be interrupted when one is lost.
        """
        generation.check()
        parts: list[GenerationRanks] = []
        errors: list[Exception] = []

        def build(_: int) -> None:
            try:
                for number, colours, ranks in wanted:
                    name = "/".join(map(str, ("gloo", generation.number, number, *colours)))
                    meeting = Rendezvous(
                        self._store, f"{name}/", generation.check, _GROUP_TIMEOUT_S
                    )
                    parts.append(self._group(meeting, generation, ranks, number))
            except (RuntimeError, CommError) as error:
                errors.append(error)

        # Left alone if it does not end: gloo offers no way to interrupt it, and at the latest its
        # own timeout of 10 s does. Its groups belong to a generation that nobody uses any more.
        builder = Workers("dlio-groups", build).start()
        self._await(lambda: not builder.alive(), "gloo to connect all ranks", generation)
        if errors and lacks_files(errors[0]):
            raise CommError(f"gloo cannot connect the ranks: {OPEN_FILES}") from errors[0]
        if errors:
            # All of these ranks are here, so one was lost, or its connection was.
            deadline = time.monotonic() + _GROUP_TIMEOUT_S
            while not generation.over and time.monotonic() < deadline:
                generation.suspect()
                time.sleep(_LONGEST_SLEEP_S)
            raise PeerLost(f"a group of ranks cannot be made: {errors[0]}") from errors[0]
        return parts

    def _group(
        self, store: Any, generation: Generation, ranks: Sequence[int], number: int
    ) -> GenerationRanks:
        options = _Gloo._Options()
        options._devices = [self._gate.device]
        options._timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
        options._threads = 2
        rank = ranks.index(self.me)
        with self._gate.opened():
            group = _Gloo(store, rank, len(ranks), options)
        # The deadline of a wait comes first, and its message names the wait.
        group._set_default_timeout(timedelta(seconds=2 * self._timeout_s))
        return GenerationRanks(generation, tuple(ranks), rank, group, number)

    # The next generation

    def renew(self, report: Json, meets: bool = False) -> list[Json]:
        self.lost = True
        old = self._generation
        # Tells ranks that wait for this one, which lives and has left their operation.
        if not old.over:
            old.over = True
            self._report_end(old.number)
        numbers = itertools.count(old.number + 1)
        return self._renew_over_losses(lambda: self._next_generation(next(numbers), report))

    def _next_generation(self, number: int, report: Json) -> list[Json] | None:
        """Make the next generation; None if a rank is lost meanwhile."""
        handles = self._living()
        mine = {str(channel): list(handle.colours) for channel, handle in handles.items()}
        self._store.put(f"here/{number}/{self.me}", [mine, report])
        members = self._met(number)
        self._check_enough(len(members))
        everyone: list[Any] = self._store.values([f"here/{number}/{each}" for each in members])
        generation = self._begin(number, members)
        colours = [each[0] for each in everyone]
        parts = None
        with suppress(PeerLost):
            parts = self._built(generation, _wanted(self.me, members, colours))
        if not self._decided(f"made/{number}", generation, members, parts is not None):
            self._spend(parts or [])
            generation.over = generation.replaced = True
            return None
        assert parts is not None
        # Messages carry their generation: numbers of ranks have changed, and a late one would go to
        # another rank's receive of the same tag.
        self.mail.retire(number)
        made = {part.channel: part for part in parts}
        old = [handle.part for handle in handles.values()]
        for part in old:
            part.generation.replaced = True
        for channel, handle in handles.items():
            handle.replace(made.get(channel))
        self._spend(old)
        self.number += 1
        self.members = members
        return [each[1] for each in everyone]

    def _met(self, number: int) -> tuple[int, ...]:
        """Return the ranks of the next generation when all survivors have come here."""

        def left() -> list[int]:
            return [member for member in self.members if member not in self._dead]

        def have_met() -> bool:
            return self._store.has([f"here/{number}/{member}" for member in left()])

        self._await(have_met, "all that are left to regroup", None)
        return tuple(self._store.put(f"members/{number}", left()))

    # Old groups

    def _spend(self, parts: Sequence[GenerationRanks]) -> None:
        """Free groups once their operations have ended; to free them earlier would wait for these.

        Those of a lost rank's neighbours end first, and with their sockets end the others.
        """
        with self._lock:
            idle = not self._spent
            self._spent += parts
        if idle and parts:
            with suppress(RuntimeError):  # The interpreter is ending.
                Workers("dlio-old-groups", self._free).start()

    def _free(self, _: int) -> None:
        deadline = time.monotonic() + _FREE_TIMEOUT_S
        while time.monotonic() < deadline:
            with self._lock:
                ready = [part for part in self._spent if part.is_idle()]
                self._spent = [part for part in self._spent if part not in ready]
                left = len(self._spent)
            # Outside the lock: the destructor of a group joins its threads.
            for part in ready:
                part.group, part.works = None, []
            ready.clear()
            if not left:
                return
            time.sleep(_TURN_S)
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        """Keep groups that do not come to rest until the process ends: freeing one would wait."""
        for part in self._spent:
            leave(part.group, *part.works)
        self._spent = []

    def _end(self) -> None:
        with self._lock:
            living = [handle.part for handle in self._living().values()]
            self._spent += [part for part in living if self.lost or not part.is_idle()]
            self._forget()


def _wanted(
    me: int, members: Sequence[int], colours: Sequence[dict[str, list[int]]]
) -> list[_Wanted]:
    """Return the communicators that this rank rebuilds, in one order on all ranks. Pure.

    A rank may have closed one that others have not closed yet: it is gone. `colours` are by member,
    and by number of the communicator.
    """
    common = set.intersection(*(set(map(int, each)) for each in colours))
    mine = colours[members.index(me)]
    wanted: list[_Wanted] = []
    for number in sorted(common):
        own = mine[str(number)]
        ranks = tuple(
            member
            for member, theirs in zip(members, colours, strict=True)
            if theirs[str(number)] == own
        )
        wanted.append((number, tuple(own), ranks))
    return wanted

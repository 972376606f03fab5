"""Recovery from a lost rank: the interrupted step is repaired in place, and not computed again.

A rank learns of a loss wherever it waits for another one: in the sums of a step, at the end of an
epoch. It then calls `Recovery.recover`, and so do all survivors. They make the next generation,
every part of the training reports where it stands, and parts that are behind get from other ranks
what they lack. `dlio.comm.survival` tells the whole story in order; the promises are in
docs/guides/fault-tolerance.md.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from dlio.comm.comm_protocol import Communicator
from dlio.comm.survival.membership import AllLeave, AllPause, Elastic, Membership, RankLeft
from dlio.comm.survival.reports import Report, report_from_json
from dlio.errors import CommError, PeerLost, UsageError
from dlio.util.printable import log_warning
from dlio.util.units import counted

_T = TypeVar("_T")
_R = TypeVar("_R", bound=Report)


class RecoveryPart(Generic[_R]):
    """A part of the training that a recovery brings to the same place on all ranks.

    Its methods are called by `Recovery` alone, in this order: `report` on survivors, `adopt` on
    ranks that join, `reconcile` on both.
    """

    def report(self) -> _R:
        """Return where this part stands on this rank."""
        raise NotImplementedError

    def adopt(self, report: _R) -> None:
        """Start from where a survivor stands, on a rank that joins."""

    def reconcile(self, reports: Sequence[_R], comm: Communicator) -> None:
        """Catch up with the rank that is furthest ahead, or help others to. Collective.

        `reports` are of the new generation, by rank; those of ranks that join are copies of a
        survivor's. Called again with new ones if another rank is lost meanwhile.
        """

    def commit_step(self, contributors: Sequence[int]) -> None:
        """Note that the batches since the last call are in the model, with the gradients of the
        members `contributors`.
        """


_WORDS: Final = {"lost": "lost", "joined": "joined", "left": "has left"}


@dataclass(slots=True)
class MeasuredLoss:
    """A change of the ranks by one recovery, as one of the survivors measured it."""

    ranks: tuple[int, ...]
    """Numbers, when the job began, of the ranks that were lost, joined or left."""
    nodes: tuple[str, ...]
    """Name of the node of each of these ranks."""
    epoch: int
    """Number of the epoch, from 0."""
    step: int
    """Optimizer steps since the run began that were finished at the loss; -1 if unknown."""
    generation: int
    """Number of the new generation of ranks; 0 is that of the job's beginning."""
    left: int
    """Number of ranks of the new generation."""
    seconds: float
    """Time from the moment when this rank learned of the loss until it continued."""
    renew_s: float
    """Part of `seconds` until the survivors had met and made new communicators."""
    settle_s: float
    """Part of `seconds` in which the survivors reconciled their states."""
    samples_again: int = 0
    """Samples of the lost ranks that were requeued at the end of the epoch."""
    kind: str = "lost"
    """`lost`; `joined`: spares that train from then on; `left`: ranks that ended on purpose;
    `restart`: all ranks ended, as when a whole node is lost, and the survivors were started again.
    Where nodes joined or left, all ranks paused and were started again, and there are `phases`."""
    steps_again: int = 0
    """Optimizer steps that were made twice, as far as the survivors know."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase where all ranks were started again: `stop` until the old ones were gone,
    `start` until the new ones ran, `meet` until MPI had connected them, `open` until data and
    tiers were open, `read` until all nodes had the state, `model` until there was a model,
    `restore` until it had that state."""

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> "MeasuredLoss":
        """Return the loss whose fields went through JSON."""
        own: dict[str, Any] = dict(fields)
        return cls(**{**own, "ranks": tuple(own["ranks"]), "nodes": tuple(own["nodes"])})

    def sentence(self) -> str:
        """Return the loss in words, such as `rank 5 (node n3) lost at step 812: ...`."""
        who = ", ".join(
            f"{rank} (node {node})" if node else str(rank)
            for rank, node in zip(self.ranks, self.nodes, strict=True)
        )
        ranks = "rank" if len(self.ranks) == 1 else "ranks"
        if self.kind == "restart":
            gone = f"{ranks} {who} lost" if who else "all ranks ended"
            again = "rank" if self.left == 1 else "ranks"
            at = "" if self.step < 0 else f" at step {self.step}"
            return f"{gone}{at}: started again on {self.left} {again}, {self.seconds:.2f} s"
        if self.phases:
            # Whole nodes: all ranks were started again for it.
            names = list(dict.fromkeys(self.nodes))
            ranks, who = "node" if len(names) == 1 else "nodes", ", ".join(names)
        are_several = len(self.nodes if not self.phases else set(self.nodes)) > 1
        what = "have left" if self.kind == "left" and are_several else _WORDS[self.kind]
        where = "" if self.step < 0 else f" at step {self.step}"
        go_on = "rank goes on" if self.left == 1 else "ranks go on"
        return f"{ranks} {who} {what}{where}: {self.left} {go_on}, {self.seconds:.2f} s"


class Recovery:
    """Brings all parts of a training over a loss, on all ranks. One per process."""

    def __init__(self, membership: Membership, comm: Communicator) -> None:
        self.membership = membership
        self.elastic = membership if isinstance(membership, Elastic) else None
        """The membership if ranks may join it and leave."""
        self._comm = comm
        # Weak: a loop may make a loader for each epoch, and close none.
        self._parts: WeakValueDictionary[str, RecoveryPart[Any]] = WeakValueDictionary()
        self._registered = 0
        self.number = 0
        """Number of recoveries and rendezvous so far."""
        self.losses: list[MeasuredLoss] = []
        """Losses of ranks; see `changes` for others."""
        self.changes: list[MeasuredLoss] = []
        """Ranks that joined, and that left on purpose."""
        self.newcomers: tuple[int, ...] = ()
        """Ranks of this generation that have just joined, while parts reconcile."""
        self.at_rendezvous = False
        """True while parts reconcile between two batches, where all members have met."""
        self.last_counted: dict[int, int] = {}
        """By lost member, the number of its last optimizer step that any survivor has merged, from
        1, since its exchange was created; 0 if there is none. Only for exchanges that merge the
        steps of other ranks one by one; the others name the `contributors` of each step."""
        self._nodes: Sequence[str] = [""] * (max(membership.members) + 1)
        self._place: Callable[[], tuple[int, int]] = lambda: (0, -1)
        self._is_described = False
        self.numbers: Sequence[int] = range(max(membership.members) + 1)
        """Of each member, the number in reports: ranks may have been started again."""
        self._seconds = [0.0, 0.0]
        """Seconds of this recovery: to renew, to reconcile."""

    def describe(self, nodes: Sequence[str], place: Callable[[], tuple[int, int]]) -> None:
        """Set what later losses are described by. The caller shows them; else they are logged.

        `nodes` are the node names of the job's first ranks; `place` returns the numbers of the
        epoch and of finished optimizer steps.
        """
        self._nodes, self._place, self._is_described = nodes, place, True

    def node(self, member: int) -> str:
        """Return the name of a member's node, empty if it is not known."""
        return self._nodes[member] if member < len(self._nodes) else ""

    def register(self, part: RecoveryPart[_R]) -> None:
        """Add a part, in the same order on all ranks; it is held weakly."""
        # The order of registration is the only name that all ranks share without communication.
        self._parts[f"{type(part).__name__}/{self._registered}"] = part
        self._registered += 1

    def unregister(self, part: RecoveryPart[_R]) -> None:
        """Remove a part, which takes part in no later recovery."""
        for name in [name for name, each in self._parts.items() if each is part]:
            del self._parts[name]

    # Losses, spares and ranks that leave

    def recover(self) -> None:
        """Make the next generation and bring all parts to one place. Collective.

        Raises CommError when too few ranks survive.
        """
        self._renew(meets=False)

    def stand_by(self, ranks: int) -> None:
        """Let only the first ranks train. Collective, before training begins.

        The others return once they are called, and have then adopted the state of those that have
        trained.

        Raises RankLeft on a rank that is not called before the job ends.
        """
        assert self.elastic is not None
        self.elastic.want(ranks)
        # The first to make the next generation ends the others' operations: those that have opened
        # the data may not be over on a slower rank yet, which would take it for a loss.
        self.uniform(lambda: None)
        self._renew(meets=True, begins=True)
        if self.membership.me not in self.membership.members:
            self._wait_for_call(self.elastic)

    def rendezvous(self, is_due: Callable[[], bool]) -> None:
        """Let spares join and ranks leave, as requested, where all meet (`is_due`, asked after the
        last recovery). Collective, between two batches.

        Raises RankLeft on a rank that leaves, and AllLeave or AllPause on all ranks if all leave.
        """
        while is_due():
            try:
                self._comm.barrier()
                well = True
            except PeerLost:
                well = False
            if not self.membership.agree(well):
                self.recover()
                continue
            if self.elastic is not None and self.elastic.ends:
                raise AllPause if self.elastic.pauses else AllLeave
            self._renew(meets=True)
            if self.membership.me not in self.membership.members:
                raise RankLeft

    def end(self) -> None:
        """End the spares, at the end of the training. Collective."""
        if self.elastic is not None and self.elastic.spares:
            self.elastic.dismiss()

    def commit_step(self, contributors: Sequence[int]) -> None:
        """Tell all parts that the batches since the last call are in the model, with the gradients
        of the members `contributors`.
        """
        for part in list(self._parts.values()):
            part.commit_step(contributors)

    def count_requeued(self, member: int, samples: int) -> None:
        """Note that samples of a lost rank have been requeued."""
        for loss in self.losses:
            if self.numbers[member] in loss.ranks:
                loss.samples_again += samples

    def uniform(self, act: Callable[[], _T]) -> _T:
        """Return `act()` when it has succeeded on all ranks of one generation. Collective.

        A collective operation that a loss interrupts succeeds on some ranks and fails on others.
        Then all recover and do it again, so `act` must not change what it starts from, or else
        continue from where it was. It may itself call `recover`.
        """
        while True:
            try:
                result = act()
                well = True
            except PeerLost:
                well = False
            if self._all_well(well):
                return result
            self.recover()

    def _all_well(self, well: bool) -> bool:
        """Vote, and return the result; ranks that wait for this one are not left waiting."""
        if not well:
            self.membership.interrupt()
        return self.membership.agree(well)

    # One recovery

    def _wait_for_call(self, elastic: Elastic) -> None:
        while self.membership.me not in self.membership.members:
            reports: Any = elastic.wait_for_call()
            if not self.membership.members or self.membership.me in self.membership.left:
                raise RankLeft
        began, self.at_rendezvous = time.perf_counter(), True
        if not self._reconcile(reports):
            while not self._attempt(meets=True, joins=True):
                pass
        self.at_rendezvous = False
        self.number += 1
        self._note("joined", {self.membership.members[rank] for rank in self.newcomers}, began)

    def _renew(self, meets: bool, begins: bool = False) -> None:
        began, before = time.perf_counter(), set(self.membership.members)
        self._seconds = [0.0, 0.0]
        left: set[int] = set()
        self.at_rendezvous = meets
        while True:
            done = self._attempt(meets)
            left |= set(self.membership.left)
            if done:
                break
        self.at_rendezvous = False
        self.number += 1
        after = set(self.membership.members)
        if not begins:
            self._note("lost", before - after - left, began)
            self._note("left", left & before, began)
            self._note("joined", after - before, began)

    def _note(self, kind: str, members: set[int], began: float) -> None:
        if not members:
            return
        epoch, step = self._place()
        change = MeasuredLoss(
            ranks=tuple(self.numbers[member] for member in sorted(members)),
            nodes=tuple(self._nodes[member] for member in sorted(members)),
            epoch=epoch,
            step=step,
            generation=self.membership.number,
            left=len(self.membership.members),
            seconds=time.perf_counter() - began,
            renew_s=self._seconds[0],
            settle_s=self._seconds[1],
            kind=kind,
        )
        (self.losses if kind == "lost" else self.changes).append(change)
        if not self._is_described and self._comm.rank == 0:
            log_warning(change.sentence())

    def _attempt(self, meets: bool, joins: bool = False) -> bool:
        """Make the next generation; False if a rank was lost before all were at one place. One that
        `joins` has not adopted the others' place yet.
        """
        began = time.perf_counter()
        # A rank that joins votes with None: it has no state that others could need.
        mine = (
            None if joins else {name: each.report().to_json() for name, each in self._parts.items()}
        )
        reports: Any = self.membership.renew(mine, meets)
        self._seconds[0] += time.perf_counter() - began
        return self._reconcile(reports)

    def _reconcile(self, reports: Sequence[Mapping[str, Any] | None]) -> bool:
        """Bring all parts to one place; False if another rank was lost meanwhile."""
        began = time.perf_counter()
        if self.membership.me not in self.membership.members:
            return True
        self.newcomers = tuple(rank for rank, each in enumerate(reports) if each is None)
        survivors = [each for each in reports if each is not None]
        if not survivors:
            raise CommError("all ranks that had the model are lost: this job ends")
        joins = self._comm.rank in self.newcomers
        well = True
        try:
            for name, part in dict(self._parts).items():
                # A part that nobody holds any more may be garbage on some ranks and not on others:
                # only parts that all have reported are reconciled, so that all do the same.
                if not all(name in each for each in survivors):
                    continue
                if joins:
                    part.adopt(report_from_json(survivors[0][name]))
                everyone = [report_from_json((each or survivors[0])[name]) for each in reports]
                part.reconcile(everyone, self._comm)
        except PeerLost:
            well = False
        # Ranks whose part raised nothing may still be short of what a lost rank had to give: one
        # vote decides for all, and after a No everything is reconciled again from new reports.
        well = self._all_well(well)
        self._seconds[1] += time.perf_counter() - began
        return well


_of: Final["WeakKeyDictionary[Any, Recovery]"] = WeakKeyDictionary()


def recovery_of(comm: Communicator) -> Recovery | None:
    """Return this process's recovery for all ranks; None if the job ends with any rank."""
    membership: Membership | None = getattr(comm, "membership", None)
    if membership is None:
        return None
    if membership not in _of:
        _of[membership] = Recovery(membership, comm)
    return _of[membership]


def uniform(comm: Communicator, act: Callable[[], _T]) -> _T:
    """Return `act()` when it has succeeded on all survivors. Collective.

    See `Recovery.uniform`. Where the job ends with any rank, `act` is just called.
    """
    recovery = recovery_of(comm)
    return act() if recovery is None else recovery.uniform(act)


def number_in_job(comm: Communicator) -> int:
    """Return this rank's number when the job began, which it keeps when others are lost; its place
    where the job ends with any rank."""
    recovery = recovery_of(comm)
    return comm.rank if recovery is None else recovery.membership.me


def once_on_rank_0(comm: Communicator, act: Callable[[], object]) -> Callable[[], None]:
    """Return a function for `uniform` that calls `act` on rank 0, where a repetition leaves it out
    once it is done, and has the others wait for it.
    """
    is_done = False

    def call() -> None:
        nonlocal is_done
        if comm.rank == 0 and not is_done:
            act()
            is_done = True
        comm.barrier()

    return call


def check_survival(comm: Communicator, choice: str, min_ranks: int) -> None:
    """Raise UsageError if these ranks do not end as `--fault-tolerance` has it: `shrink`, to
    `min_ranks` at the fewest, `restart` or `off`.
    """
    survives = recovery_of(comm) is not None
    if choice != "shrink":
        if survives:
            raise UsageError(
                "DLIO_MIN_RANKS is set, so ranks are to survive others: add --fault-tolerance "
                "shrink, or unset it"
            )
        return
    if comm.size < min_ranks:
        raise UsageError(
            f"--min-ranks {min_ranks} with {counted(comm.size, 'rank')}: start more, or let fewer "
            "go on"
        )
    if comm.size > 1 and not survives:
        raise UsageError(
            "--fault-tolerance shrink: these ranks end with any of them; start them by -n, or by "
            "`mpirun --with-ft ulfm` with DLIO_MIN_RANKS=1 and MPI4PY_RC_THREAD_LEVEL=serialized"
        )

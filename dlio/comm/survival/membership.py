"""The ranks of a job that are alive, in numbered generations.

A generation is a set of ranks and all communicators between them. It is over when one of its ranks
is lost: any wait on any of its communicators, on any rank and in any thread, then ends by PeerLost.
`Membership.renew` makes the next generation of the survivors, and rebuilds every
communicator of the last one in place, with new ranks and sizes.

    RUNNING -- PeerLost in any thread --> OVER -- renew, on all survivors ----> RUNNING
                                           ^                    |
                                           +-- another is lost -+

Some ranks may be spares: they are alive, and no members. A spare becomes a member, and a member
leaves on purpose, when all members renew the generation between two batches.

| module | members are told of a loss by |
|---|---|
| `ulfm` | MPI, if its library has User Level Failure Mitigation (Open MPI 5, `--with-ft ulfm`) |
| `store_membership` | dlio's launcher, if it has started ranks of torch.distributed |

Source: "User Level Failure Mitigation", Bland et al. 2013; fault-tolerant training over it:
arXiv 1709.03316.
"""

from typing import Protocol, runtime_checkable

from dlio.comm.comm_protocol import Buffer, Communicator, Json, Request


class RankLeft(Exception):
    """This rank has left the job on purpose, or was never called; the others go on without it."""


class AllLeave(Exception):
    """All ranks of the job leave on purpose, between the same two batches."""


class AllPause(AllLeave):
    """All ranks are about to be started again, among others."""


class RankMessages(Protocol):
    """Messages among ranks that are known by number."""

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        """Start sending; see `Communicator`."""

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Start receiving; see `Communicator`."""


@runtime_checkable
class _RebuiltCommunicator(Protocol):
    """A communicator whose ranks get other numbers after a loss."""

    def bound(self) -> RankMessages:
        """Return the messages of the present ranks."""


def messages_of(comm: Communicator) -> RankMessages:
    """Return messages among a communicator's present ranks.

    When one of them is lost all calls raise PeerLost, also after the communicator was rebuilt, in
    which a rank's number is another one's.
    """
    # By generation: after a loss the same number is another rank, which would get the wrong
    # message.
    return comm.bound() if isinstance(comm, _RebuiltCommunicator) else comm


class Membership(Protocol):
    """The surviving ranks of a job, as one rank sees them."""

    me: int
    """Number of this rank when the job began; it stays the same in all generations."""
    number: int
    """Number of the generation, from 0."""
    lost: bool
    """True once a rank was lost: MPI can then neither be ended nor aborted in the ordinary way."""
    members: tuple[int, ...]
    """Number of each rank of this generation when the job began, ascending by rank."""
    due: bool
    """True if spares are to join, or members to leave, at the next `renew(..., meets=True)`."""
    left: tuple[int, ...]
    """Members that left on purpose when this generation was made."""

    def renew(self, report: Json, meets: bool = False) -> list[Json]:
        """End this generation, and make the next one of the survivors.

        Collective over these; it waits for those that have not noticed. All communicators of the
        last generation must be at rest: the caller drops its requests.

        Args:
            report: None for a spare that becomes a member.
            meets: all members have come between two batches: spares join that are asked to, and
                members leave.

        Returns the reports of the new generation, by rank; the same on all of them.

        Raises CommError when too few ranks survive.
        """

    def interrupt(self) -> None:
        """End the waits of all ranks of this generation, before `agree` with a No: also of those
        that wait for a rank that lives, which sends nothing more, as it waits for their votes."""

    def agree(self, well: bool) -> bool:
        """Return True if all ranks of this generation are alive and say True. Collective.

        All ranks get the same answer, even if one is lost meanwhile.
        """


@runtime_checkable
class Elastic(Protocol):
    """A membership whose job may have spares, and whose ranks may leave on purpose."""

    spares: int
    """Ranks of the job's beginning beyond those that train then."""
    leaves: bool
    """Set this to have this rank leave at the next meeting of all."""
    leave_at: float
    """Time of the monotonic clock at which this rank leaves; infinite for never."""
    ends: bool
    """True if all members leave at the next meeting: nobody goes on."""
    pauses: bool
    """True if they do so to be started again, among others."""

    @property
    def asked(self) -> bool:
        """True if a rank has asked all others to renew, or if this one is about to."""

    def want(self, ranks: int) -> None:
        """Set the number of members that the job begins with; the rest are spares after the next
        meeting."""

    def wait_for_call(self) -> list[Json]:
        """Wait, as a spare, until the others renew, and take part in it; as `renew`."""

    def dismiss(self) -> None:
        """End all spares. Collective over members, at the end of the training."""

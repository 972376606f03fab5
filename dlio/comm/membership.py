"""The ranks of a job that are alive, in numbered generations.

A generation is a set of ranks and all communicators between them. It is over when one of its ranks
is lost: any wait on any of its communicators, on any rank and in any thread, then ends by PeerLost.
`Membership.renew` makes the next generation of the ranks that are left, and rebuilds every
communicator of the last one in place, with new ranks and sizes.

    RUNNING -- PeerLost in any thread --> OVER -- renew, on all that are left --> RUNNING
                                           ^                    |
                                           +-- another is lost -+

| module | members are told of a loss by |
|---|---|
| `ulfm` | MPI, if its library has User Level Failure Mitigation (Open MPI 5, `--with-ft ulfm`) |
| `store_membership` | dlio's launcher, if it has started ranks of torch.distributed |

Source: "User Level Failure Mitigation", Bland et al. 2013; fault-tolerant training over it:
arXiv 1709.03316.
"""

from typing import Protocol, runtime_checkable

from dlio.comm.protocol import Buffer, Communicator, Json, Request

__all__ = ["Membership", "Messages", "messages_of"]


class Messages(Protocol):
    """Messages among ranks that are known by number."""

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        """Start sending; see `Communicator`."""

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Start receiving; see `Communicator`."""


@runtime_checkable
class _Renewed(Protocol):
    """A communicator whose ranks get other numbers after a loss."""

    def bound(self) -> Messages:
        """Return the messages of the present ranks."""


def messages_of(comm: Communicator) -> Messages:
    """Return messages among a communicator's present ranks.

    When one of them is lost all calls raise PeerLost, also after the communicator was rebuilt, in
    which a rank's number is another one's.
    """
    return comm.bound() if isinstance(comm, _Renewed) else comm


class Membership(Protocol):
    """The ranks that are left of a job, as one rank sees them."""

    me: int
    """Number of this rank when the job began; it stays the same in all generations."""
    number: int
    """Number of the generation, from 0."""
    lost: bool
    """True once a rank was lost: MPI can then neither be ended nor aborted in the ordinary way."""
    members: tuple[int, ...]
    """Number of each rank of this generation when the job began, ascending by rank."""

    def renew(self, report: Json) -> list[Json]:
        """End this generation, and make the next one of the ranks that are left.

        Collective over these; it waits for those that have not noticed. All communicators of the
        last generation must be at rest: the caller drops its requests.

        Returns the reports of the new generation, by rank; the same on all of them.

        Raises CommError when too few ranks are left.
        """

    def agree(self, well: bool) -> bool:
        """Return True if all ranks of this generation are alive and say True. Collective.

        All ranks get the same answer, even if one is lost meanwhile.
        """

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

Source: "User Level Failure Mitigation", Bland et al. 2013; fault-tolerant training over it:
arXiv 1709.03316.
"""

from typing import Protocol

from dlio.comm.protocol import Communicator, Json

__all__ = ["Membership", "of_generation"]


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


def of_generation(comm: Communicator) -> Communicator:
    """Return a communicator whose messages raise PeerLost once its present ranks are not all left.

    For work that relies on their numbers. It shares the messages of `comm`; do not close it.
    """
    fix = getattr(comm, "of_generation", None)
    fixed: Communicator = comm if fix is None else fix()
    return fixed

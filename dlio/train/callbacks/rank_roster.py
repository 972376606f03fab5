"""Numbers and nodes of a run's ranks, as messages name them."""

from collections.abc import Sequence

from dlio.comm.job_nodes import find_nodes
from dlio.comm.survival.recovery import recovery_of
from dlio.train.callbacks.callback_base import Run


class RankRoster:
    """The ranks of a run by their numbers when the job began. Collective where the job ends with
    any rank."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._recovery = recovery_of(run.comm)
        self._nodes: list[str] = []
        if self._recovery is None:
            nodes = find_nodes(run.comm, run.config.ranks.pretend_nodes)
            self._nodes = [nodes.names[node] for node in nodes.node_of]

    def present(self) -> Sequence[int]:
        """Return the number of each present rank."""
        if self._recovery is None:
            return range(self._run.comm.size)
        return self._recovery.membership.members

    def node(self, member: int) -> str:
        """Return the name of a rank's node."""
        return self._nodes[member] if self._recovery is None else self._recovery.node(member)

    def name(self, member: int) -> str:
        """Return a rank's name in messages, such as `2 (node n3)`."""
        return f"{member} (node {self.node(member)})"

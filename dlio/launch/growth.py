"""Nodes that join a job and leave it while it runs, on the launcher's side.

request -> agents start, zygotes import -> answer -> ranks pause -> started again among others
"""

from collections.abc import Mapping, Sequence

from dlio.launch.agent_links import Agents, no_agent
from dlio.launch.node_requests import NodeChange, NodeRequest, NodeRequests, change_between


class Growth:
    """Attends to the requests of one job.

    Args:
        per_node: number of ranks of a node that joins.
        min_ranks: fewest ranks that continue.
    """

    def __init__(
        self, agents: Agents, requests: NodeRequests, per_node: int, min_ranks: int
    ) -> None:
        self._agents, self._requests = agents, requests
        self._per_node, self._min_ranks = per_node, min_ranks
        self._request: NodeRequest | None = None
        self._change = NodeChange((), ())
        self._is_asked = False
        """True once ranks have been asked to pause."""

    @property
    def has_paused(self) -> bool:
        """True if all ranks of this start have paused."""
        return self._is_asked and self._agents.paused is not None

    def attend(self, placed: Mapping[str, Sequence[int]]) -> float | None:
        """Go on with the newest request; returns the time when all ranks had paused for it.

        `placed` are the numbers of each node's ranks.
        """
        if self._is_asked:
            return self._agents.paused
        if self._request is None:
            self._request = self._requests.new()
            if self._request is None:
                return None
            self._begin(self._request, placed)
        elif any(node not in self._agents.living for node in self._change.left):
            self._end("it is lost meanwhile")
        else:
            self._prepare()
        return None

    def apply(self) -> NodeChange | None:
        """Take in and dismiss nodes between two starts; None if nothing is due.

        Whatever has ended the ranks, they need not pause any more.
        """
        if not self._is_asked:
            self._requests.note(self._agents.living)  # Some may be lost.
            return None
        change = self._change
        joined = tuple(node for node in change.joined if self._agents.prepared(node))
        left = tuple(node for node in change.left if node in self._agents.living)
        for node in joined:
            self._agents.admit(node)
        for node in left:
            self._agents.dismiss(node)
        self._request, self._is_asked = None, False
        self._requests.note(self._agents.living)
        return NodeChange(joined, left)

    def _begin(self, request: NodeRequest, placed: Mapping[str, Sequence[int]]) -> None:
        living = self._agents.living
        ranks = [(node, len(placed[node])) for node in living]
        self._change = change_between(living, request.nodes, ranks, self._per_node, self._min_ranks)
        if self._change.problem:
            self._end(self._change.problem)
        elif self._change.joined or self._change.left:
            for node in self._change.joined:
                self._agents.prepare(node)
        else:
            self._end("")

    def _prepare(self) -> None:
        assert self._request is not None
        are = {node: self._agents.prepared(node) for node in self._change.joined}
        bad = [node for node, is_ready in are.items() if is_ready is False]
        if bad:
            for node in are:
                if node not in bad:
                    self._agents.dismiss(node)
            self._end(no_agent(bad[0]))
        elif all(are.values()):
            self._requests.answer(self._request, "", self._request.nodes)
            self._agents.pause()
            self._is_asked = True

    def _end(self, problem: str) -> None:
        """Answer a request that changes nothing."""
        assert self._request is not None
        self._requests.answer(self._request, problem, self._agents.living)
        self._request = None

"""Nodes that join a job of `--nodes` and leave it while it runs, on the launcher's side.

    request -> agents start, zygotes import -> answer -> ranks pause -> started again among others

Requests and answers are files in a folder that the launcher owns:

    <tmp>/dlio-job-<name>/nodes         number of the request, and the nodes that are asked for
    <tmp>/dlio-job-<name>/answer-<n>    what is wrong with request n; empty when its nodes are ready

`dlio join JOB --nodes d` and `dlio leave JOB --nodes d` write the first, the launcher the second.
"""

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dlio.errors import UsageError
from dlio.launch.agent_links import Agents, no_agent
from dlio.util.input_files import MOST_SETTINGS, read_json, read_text
from dlio.util.units import counted
from dlio.util.whole_files import write_whole

_NAME: Final = "nodes"
_ANSWER: Final = "answer-"
_EVERY_S: Final = 0.25
_ANSWER_TIMEOUT_S: Final = 90.0
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """The nodes that a job is asked to have; the newest request holds."""

    number: int
    """0 for the job's beginning."""
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """The nodes that a request changes."""

    joined: tuple[str, ...]
    left: tuple[str, ...]
    problem: str = ""
    """Why it is refused, in words; empty if it is not."""


def change_between(
    before: Sequence[str],
    after: Sequence[str],
    ranks: Collection[tuple[str, int]],
    per_node: int,
    min_ranks: int,
) -> NodeChange:
    """Return the changes of a request to have the nodes `after`, of which one may have been lost,
    in place of `before`. Pure.

    `ranks` are nodes with their numbers of ranks; one that joins gets `per_node`. At least
    `min_ranks` continue.
    """
    joined = tuple(node for node in after if node not in before)
    left = tuple(node for node in before if node not in after)
    number = len(joined) * per_node + sum(count for node, count in ranks if node in after)
    problem = ""
    if number < max(1, min_ranks):
        problem = f"{counted(number, 'rank')} would be left, and --min-ranks is {min_ranks}"
    return NodeChange(joined, left, problem)


class NodeRequests:
    """The launcher's side, for the nodes that a job begins with. The folder's owner removes it."""

    def __init__(self, folder: str, nodes: Sequence[str]) -> None:
        self._folder = folder
        self._answered = 0
        self._next = 0.0
        self.note(nodes)

    def note(self, nodes: Sequence[str]) -> None:
        """Write which nodes the job has now, unless others are being asked for."""
        newest = read_request(self._folder)
        if newest is None or newest.number <= self._answered:
            _write(self._folder, NodeRequest(self._answered, tuple(nodes)))

    def new(self) -> NodeRequest | None:
        """Return the newest request if it is not answered yet; looks a few times in a second."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY_S
        request = read_request(self._folder)
        return None if request is None or request.number <= self._answered else request

    def answer(self, request: NodeRequest, problem: str, nodes: Sequence[str]) -> None:
        """Answer a request; `nodes` are those that the job has or is about to have."""
        self._answered = request.number
        self.note(nodes)
        path = os.path.join(self._folder, f"{_ANSWER}{request.number}")
        write_whole(path, lambda file: file.write(problem.encode()))


def request_nodes(folder: str, job: str, names: str, joins: bool) -> NodeRequest:
    """Ask a job to take nodes in, or to go on without them; returns when they are ready.

    `names` has commas between them. Raises UsageError if that is not possible.
    """
    request = read_request(folder)
    if request is None:
        raise UsageError(
            f"--nodes: {job} runs on one machine; start it with --nodes and --fault-tolerance "
            "shrink, or leave out --nodes for its --spares"
        )
    nodes = list(request.nodes)
    has = f"it has {', '.join(nodes)}"
    for node in names.split(","):
        if not node or (node in nodes) == joins:
            what = "is in the job already" if joins and node else "is not a node of the job"
            raise UsageError(f"--nodes {names}: {node or 'an empty name'} {what}: {has}")
        nodes = [*nodes, node] if joins else [each for each in nodes if each != node]
    if not nodes:
        raise UsageError(f"--nodes {names}: no node would be left: {has}")
    asked = NodeRequest(request.number + 1, tuple(nodes))
    _write(folder, asked)
    answer = os.path.join(folder, f"{_ANSWER}{asked.number}")
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while not os.path.exists(answer):
        if not os.path.isdir(folder):
            raise UsageError(f"{job} has ended before the nodes have changed")
        if time.monotonic() > deadline:
            raise UsageError(
                f"{job} has not answered for {_ANSWER_TIMEOUT_S:.0f} s: look at its output"
            )
        time.sleep(_LOOK_S)
    problem = read_text(answer, MOST_SETTINGS)
    if problem:
        raise UsageError(f"--nodes {names}: {problem}")
    return asked


def read_request(folder: str) -> NodeRequest | None:
    """Return the newest request; None if the job has no nodes of its own."""
    try:
        fields: Any = read_json(os.path.join(folder, _NAME), MOST_SETTINGS)
        return NodeRequest(int(fields["number"]), tuple(map(str, fields["nodes"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: str, request: NodeRequest) -> None:
    text = json.dumps({"number": request.number, "nodes": request.nodes}).encode()
    write_whole(os.path.join(folder, _NAME), lambda file: file.write(text))


class Growth:
    """Attends to the requests of one job: a node that joins gets `per_node` ranks, and `min_ranks`
    are the fewest that continue.
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

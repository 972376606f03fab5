"""Requests for other nodes to a job of `--nodes`: files in a folder that its launcher owns.

    <tmp>/dlio-job-<name>/nodes         number of the request, and the nodes that are asked for
    <tmp>/dlio-job-<name>/answer-<n>    what is wrong with request n; empty when its nodes are ready

`dlio join JOB --nodes d` and `dlio leave JOB --nodes d` write the first, the launcher the second.
"""

import json
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError
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
    """Return the changes of a request. Pure.

    Args:
        before: nodes that the job has.
        after: nodes that it is asked to have. One that was lost may be among them.
        ranks: nodes with their numbers of ranks.
        per_node: number of ranks of a node that joins.
        min_ranks: fewest ranks that continue.
    """
    joined = tuple(node for node in after if node not in before)
    left = tuple(node for node in before if node not in after)
    number = len(joined) * per_node + sum(count for node, count in ranks if node in after)
    problem = ""
    if number < max(1, min_ranks):
        problem = f"{number} ranks would be left, and --min-ranks is {min_ranks}"
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

    Args:
        job: name, for errors.
        names: of nodes, with commas between them.

    Raises UsageError if that is not possible.
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
    with open(answer, encoding="utf-8") as file:
        problem = file.read()
    if problem:
        raise UsageError(f"--nodes {names}: {problem}")
    return asked


def read_request(folder: str) -> NodeRequest | None:
    """Return the newest request; None if the job has no nodes of its own."""
    try:
        with open(os.path.join(folder, _NAME), encoding="utf-8") as file:
            fields = json.load(file)
        return NodeRequest(int(fields["number"]), tuple(map(str, fields["nodes"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: str, request: NodeRequest) -> None:
    text = json.dumps({"number": request.number, "nodes": request.nodes}).encode()
    write_whole(os.path.join(folder, _NAME), lambda file: file.write(text))

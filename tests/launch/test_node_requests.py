"""Requests for other nodes to a job of --nodes, without a job."""

import os
import tempfile
import threading
from pathlib import Path

import pytest

from dlio.cli.resize import ResizeOptions, join
from dlio.errors import UsageError
from dlio.launch.job_folder import begin_job
from dlio.launch.node_requests import (
    Growth,
    NodeChange,
    NodeRequest,
    NodeRequests,
    change_between,
    read_request,
    request_nodes,
)


@pytest.mark.parametrize(
    ("after", "min_ranks", "expected"),
    [
        (("a", "b", "d"), 1, NodeChange(("d",), ())),
        (("b",), 1, NodeChange((), ("a",))),
        (("b", "d"), 4, NodeChange(("d",), ("a",))),
        (("a", "b"), 1, NodeChange((), ())),
        (("b",), 3, NodeChange((), ("a",), "2 ranks would be left, and --min-ranks is 3")),
    ],
)
def test_what_a_request_changes(
    after: tuple[str, ...], min_ranks: int, expected: NodeChange
) -> None:
    assert change_between(("a", "b"), after, [("a", 2), ("b", 2)], 2, min_ranks) == expected


@pytest.mark.parametrize(
    ("names", "joins", "error"),
    [
        ("b", True, "--nodes b: b is in the job already: it has a, b"),
        ("d,d", True, "--nodes d,d: d is in the job already: it has a, b"),
        ("d,", True, "--nodes d,: an empty name is not a node of the job: it has a, b"),
        ("d", False, "--nodes d: d is not a node of the job: it has a, b"),
        ("a,b", False, "--nodes a,b: no node would be left: it has a, b"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, names: str, joins: bool, error: str) -> None:
    NodeRequests(str(tmp_path), ("a", "b"))
    with pytest.raises(UsageError, match=f"^{error}$"):
        request_nodes(str(tmp_path), "job", names, joins)
    assert read_request(str(tmp_path)) == NodeRequest(0, ("a", "b"))


def test_a_job_of_one_machine_has_no_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dlio-job-abc").mkdir(mode=0o700)
    (tmp_path / "dlio-job-abc" / "alive").touch()
    begin_job(str(tmp_path / "dlio-job-abc"), 2, 2)
    with pytest.raises(UsageError, match="--nodes: abc runs on one machine; start it with --nodes"):
        join(ResizeOptions("abc", nodes="d"))
    with pytest.raises(UsageError, match="-n does not go with --nodes"):
        join(ResizeOptions("abc", 2, "d"))


class _Agents:
    """Agents that a test decides about."""

    def __init__(self) -> None:
        self.living = ["a", "b"]
        self.ready: bool | None = None
        self.paused: float | None = None
        self.said: list[str] = []

    def prepare(self, node: str) -> None:
        self.said.append(f"prepare {node}")

    def prepared(self, _: str) -> bool | None:
        return self.ready

    def pause(self) -> None:
        self.said.append("pause")

    def admit(self, node: str) -> None:
        self.living.append(node)

    def dismiss(self, node: str) -> None:
        self.living.remove(node)


@pytest.fixture
def agents() -> _Agents:
    return _Agents()


@pytest.fixture
def growth(tmp_path: Path, agents: _Agents, monkeypatch: pytest.MonkeyPatch) -> Growth:
    monkeypatch.setattr("dlio.launch.node_requests._EVERY_S", 0.0)
    requests = NodeRequests(str(tmp_path), agents.living)
    return Growth(agents, requests, 2, 1)  # type: ignore[arg-type] # Only what it calls.


def _asked(folder: Path, names: str, joins: bool, attend: "threading.Event") -> list[str]:
    """Ask in a thread; returns the error, in a list that is filled when there is an answer."""
    answers: list[str] = []

    def ask() -> None:
        try:
            request_nodes(str(folder), "job", names, joins)
            answers.append("")
        except UsageError as error:
            answers.append(str(error))
        attend.set()

    threading.Thread(target=ask, daemon=True).start()
    return answers


_PLACED = {"a": (0, 1), "b": (2, 3)}


def _attend_until(growth: Growth, done: threading.Event) -> None:
    for _ in range(1000):
        growth.attend(_PLACED)
        if done.wait(0.01):
            return
    raise AssertionError("no answer")


def test_ranks_pause_only_when_the_new_node_is_ready(
    tmp_path: Path, agents: _Agents, growth: Growth
) -> None:
    assert growth.attend(_PLACED) is None
    done = threading.Event()
    answers = _asked(tmp_path, "d", True, done)
    while not agents.said:
        growth.attend(_PLACED)
    growth.attend(_PLACED)
    assert agents.said == ["prepare d"]
    assert growth.apply() is None, "a start that ends meanwhile changes nothing"
    agents.ready = True
    _attend_until(growth, done)
    assert answers == [""]
    assert agents.said == ["prepare d", "pause"]
    agents.paused = 12.5
    assert growth.attend(_PLACED) == 12.5
    assert growth.has_paused
    assert growth.apply() == NodeChange(("d",), ())
    request = read_request(str(tmp_path))
    assert request is not None
    assert request.nodes == ("a", "b", "d")
    assert not growth.has_paused


def test_a_node_without_an_agent_is_refused(
    tmp_path: Path, agents: _Agents, growth: Growth
) -> None:
    agents.ready = False
    done = threading.Event()
    answers = _asked(tmp_path, "no-such", True, done)
    _attend_until(growth, done)
    assert answers[0].startswith("--nodes no-such: no agent starts on no-such: check `")
    assert growth.apply() is None
    request = read_request(str(tmp_path))
    assert request is not None
    assert request.nodes == ("a", "b")


def test_a_request_to_a_job_that_ends_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    NodeRequests(str(folder), ("a", "b"))
    done = threading.Event()
    answers = _asked(folder, "d", True, done)
    while read_request(str(folder)) == NodeRequest(0, ("a", "b")):
        done.wait(0.01)
    os.unlink(folder / "nodes")
    folder.rmdir()
    assert done.wait(60)
    assert answers == ["job has ended before the nodes have changed"]

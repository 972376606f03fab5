"""Whole nodes are lost under `dlio train --nodes`, and no sample is."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlio.util.shared_folders import SHARED_MEMORY, user_folder
from dlio_bench.chaos.pretended_nodes import PretendedNodes, may_pretend
from tests.conftest import ROOT, SOURCES
from tests.drawn import draw_once

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.cold,
    pytest.mark.nightly,
    pytest.mark.skipif(not may_pretend(), reason="this user may not have UTS namespaces"),
]

EPOCHS = 5
SAMPLES = 48
TIMEOUT_S = 100.0


@dataclass(frozen=True)
class _Ran:
    """A finished run of `dlio train`."""

    code: int
    errors: str
    output: str
    report: dict[str, Any]
    stamps: list[dict[str, Any]]
    """Steps of rank 0, and the beginnings of its processes, in their order."""
    hurt: float
    """When the nodes were hurt."""
    samples: dict[int, Counter[int]]
    """Samples in the trace, by epoch."""
    lines: Counter[tuple[int, int, int]]
    """Epoch, step and rank of the trace's lines."""

    @property
    def losses(self) -> list[dict[str, Any]]:
        losses: list[dict[str, Any]] = self.report["losses"]
        return losses

    @property
    def gone(self) -> list[tuple[int, str]]:
        """Lost ranks with their nodes. A rank may be lost before the others of its node."""
        each = [zip(loss["ranks"], loss["nodes"], strict=True) for loss in self.losses]
        return sorted(rank for ranks in each for rank in ranks)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        return [loss for loss in self.losses if loss["kind"] == "restart"]

    def check_exact(self) -> None:
        """Every sample once in each epoch."""
        assert self.code == 0, self.errors
        assert self.samples == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
        assert set(self.lines.values()) == {1}
        assert [epoch["samples"] for epoch in self.report["epochs"]] == [SAMPLES] * EPOCHS

    def check_steps(self) -> None:
        """At most one step is made twice at each start, and none is left out."""
        made: list[int] = []
        for stamp in self.stamps:
            if stamp["what"] == "begin":
                assert stamp["updates"] >= (made or [0])[-1] - 1
            else:
                assert stamp["updates"] <= (made or [0])[-1] + 1
                made.append(stamp["updates"])

    def idle_s(self) -> float:
        """Seconds from the damage to the end of the first step after it."""
        after = [stamp for stamp in self.stamps if stamp["time"] > self.hurt]
        begun = next(n for n, stamp in enumerate(after) if stamp["what"] == "begin")
        first = next(stamp for stamp in after[begun:] if stamp["what"] == "step")
        return float(first["time"]) - self.hurt


Hurt = Callable[[PretendedNodes, "subprocess.Popen[str]"], object]
Run = Callable[..., _Ran]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of class folders."""
    folder = tmp_path_factory.mktemp("drawn") / "pictures"
    draw_once(folder, images=SAMPLES, validation=4, classes=4)
    return folder / "train"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[PretendedNodes]:
    nodes = PretendedNodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture
def run(pictures: Path, tmp_path: Path, nodes: PretendedNodes) -> Run:
    """Train on pretended nodes, and hurt them after some optimizer steps.

    With `asked`, the nodes to begin with, training waits until the damage is done.
    """
    shutil.copy(Path(__file__).with_name("stamping.py"), tmp_path)

    def train(names: str, ranks: int, hurts: dict[int, Hurt], *more: str, asked: str = "") -> _Ran:
        options = ["--epochs", str(EPOCHS), "--batch-size", str(SAMPLES // 3 // ranks)]
        options += ["--image-size", "32", "--model", "resnet(width=16)", "-n", str(ranks)]
        options += ["--nodes", ",".join(asked or names), "--fault-tolerance", "shrink"]
        options += ["--trace", "t.jsonl", "--report", "r.json", "--callback", "stamping:make"]
        stamps = tmp_path / "stamps"
        for updates in hurts if asked else ():
            (tmp_path / f"hold-{updates}").touch()
        output = (tmp_path / "output").open("w", encoding="utf-8")
        with subprocess.Popen(
            [sys.executable, "-m", "dlio.cli", "train", str(pictures), *options, *more],
            cwd=tmp_path,
            env={
                **nodes.environment,
                **os.environ,
                "PYTHONPATH": SOURCES,
                "DLIO_CACHE": str(tmp_path / "cache"),
                "DLIO_TIMEOUT": "180",
            },
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            output.close()
            hurt = 0.0
            for updates, act in sorted(hurts.items()):
                _await_step(stamps, updates, job)
                hurt = time.time()
                act(nodes, job)
                (tmp_path / f"hold-{updates}").unlink(missing_ok=True)
            _, errors = job.communicate(timeout=TIMEOUT_S)
        report, trace = tmp_path / "r.json", tmp_path / "t.jsonl"
        samples: dict[int, Counter[int]] = {}
        lines: Counter[tuple[int, int, int]] = Counter()
        for line in map(json.loads, trace.read_text().splitlines() if trace.exists() else ()):
            samples.setdefault(line["epoch"], Counter()).update(line["samples"])
            lines[(line["epoch"], line["step"], line["rank"])] += 1
        wrote = json.loads(report.read_text()) if report.exists() else {}
        said = (tmp_path / "output").read_text()
        ran = _Ran(job.returncode, errors, said, wrote, _stamps(stamps), hurt, samples, lines)
        _check_nothing_is_left(nodes, names, tmp_path, ran.code == -signal.SIGKILL)
        return ran

    return train


def _stamps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _await_step(path: Path, updates: int, job: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not any((s["what"], s["updates"]) == ("step", updates) for s in _stamps(path)):
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.005)


def _check_nothing_is_left(nodes: PretendedNodes, names: str, folder: Path, killed: bool) -> None:
    def left() -> list[object]:
        memory = Path(SHARED_MEMORY, user_folder())
        folders: list[object] = [p for name in names for p in memory.glob(f"*.{name}")]
        # A killed launcher cannot remove the trace that is not finished.
        files = () if killed else folder.glob("*.tmp")
        return [*folders, *(nodes.processes(name) or () for name in names), *files]

    deadline = time.monotonic() + TIMEOUT_S
    while any(left()):
        assert time.monotonic() < deadline, left()
        time.sleep(0.05)


def _lose(node: str) -> Hurt:
    return lambda nodes, _: nodes.lose(node)


def _kill(node: str, words: str) -> Hurt:
    return lambda nodes, _: nodes.kill(node, words)


@pytest.mark.parametrize("names", ["AB", "ABC"])
@pytest.mark.parametrize("lost", ["A", "B"], ids=["of rank 0", "of others"])
def test_a_node_is_lost(
    run: Run, names: str, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # After the first epoch: the tiers hold all data.
    ran = run(names, 2 * len(names), {7: _lose(lost)})
    ran.check_exact()
    ran.check_steps()
    loss = ran.losses[-1]
    first = 2 * names.index(lost)
    assert ran.gone == [(first, lost), (first + 1, lost)]
    assert loss["kind"] == "restart"
    assert loss["left"] == 2 * len(names) - 2
    assert loss["epoch"] > 0
    assert loss["steps_again"] <= 1
    assert 0 < loss["renew_s"] + loss["settle_s"] <= loss["seconds"] + 1e-6
    assert 0 < sum(loss["phases"].values()) <= loss["seconds"] + 1e-6
    # Its blocks are read from the source once more, and nothing else.
    read = [epoch["bytes"]["source"] for epoch in ran.report["epochs"]]
    whole = ran.report["dataset"]["bytes"]
    # A sample that is needed before its block has come is read by itself, too.
    assert whole <= read[0] <= 1.1 * whole
    assert 0 < sum(read[1:]) <= 2 * whole / len(names)
    with capsys.disabled():
        print(f"\n{names}: {ran.idle_s():.2f} s from the loss of {lost} to the next step")


@pytest.mark.parametrize("exchange", ["allreduce+onebit", "local-sgd(3)", "gossip", "asgd"])
def test_a_node_is_lost_with_other_exchanges(run: Run, exchange: str) -> None:
    ran = run("AB", 4, {7: _lose("B")}, "--exchange", exchange)
    ran.check_exact()
    assert ran.gone == [(2, "B"), (3, "B")]


def test_one_node_after_another_is_lost(run: Run) -> None:
    ran = run("ABC", 6, {4: _lose("C"), 8: _lose("A")})
    ran.check_exact()
    ran.check_steps()
    assert ran.gone == [(0, "A"), (1, "A"), (4, "C"), (5, "C")]
    assert [loss["left"] for loss in ran.restarts] == [4, 2]


def test_a_rank_is_lost_and_then_a_node_in_the_same_epoch(run: Run) -> None:
    def first_rank(nodes: PretendedNodes, _: object) -> None:
        ranks = [p for p, line in nodes.processes("A").items() if "node.zygote" in line]
        os.kill(max(ranks), signal.SIGKILL)

    ran = run("AB", 4, {7: first_rank, 9: _lose("B")})
    ran.check_exact()
    assert ran.losses[0]["kind"] == "lost"
    assert [loss["left"] for loss in ran.restarts] == [2], ran.errors


def test_the_first_rank_is_lost_in_the_epoch_in_which_all_began_again(run: Run) -> None:
    def first_rank(nodes: PretendedNodes, _: object) -> None:
        ranks = [p for p, line in nodes.processes("A").items() if "node.zygote" in line]
        os.kill(sorted(ranks)[1], signal.SIGKILL)  # The zygote is the first.

    # An epoch has three steps.
    ran = run("AB", 4, {7: _kill("B", "prted"), 8: first_rank})
    ran.check_exact()
    assert [loss["left"] for loss in ran.losses] == [4, 3]


def test_the_only_rank_of_a_node_is_stopped(run: Run) -> None:
    def stop(nodes: PretendedNodes, _: object) -> None:
        ranks = [p for p, line in nodes.processes("B").items() if "node.zygote" in line]
        os.kill(max(ranks), signal.SIGSTOP)

    ran = run("AB", 2, {7: stop})
    ran.check_exact()
    assert ran.gone == [(1, "B")]
    assert ran.restarts == []


def test_all_ranks_of_a_node_are_stopped(run: Run) -> None:
    def stop(nodes: PretendedNodes, _: object) -> None:
        ranks = [p for p, line in nodes.processes("B").items() if "node.zygote" in line]
        for rank in sorted(ranks)[1:]:  # The zygote is the first.
            os.kill(rank, signal.SIGSTOP)

    ran = run("AB", 4, {7: stop})
    ran.check_exact()
    assert ran.gone == [(2, "B"), (3, "B")]
    assert ran.restarts == []


def test_a_daemon_is_lost_and_all_ranks_begin_again(run: Run) -> None:
    ran = run("AB", 4, {7: _kill("B", "prted")})
    ran.check_exact()
    ran.check_steps()
    (loss,) = ran.restarts
    assert (loss["ranks"], loss["left"]) == ([], 4)


def test_a_zygote_is_lost_and_the_others_go_on_in_place(run: Run) -> None:
    ran = run("AB", 4, {7: _kill("B", "node.zygote")})
    ran.check_exact()
    assert ran.gone == [(2, "B"), (3, "B")]
    assert ran.restarts == []


def test_an_agent_is_lost_and_its_node_with_it(run: Run) -> None:
    ran = run("AB", 4, {7: _kill("B", "node.node_agent")})
    ran.check_exact()
    assert ran.gone == [(2, "B"), (3, "B")]
    assert len(ran.restarts) == 1


def test_too_few_ranks_end_the_job_in_one_line(run: Run) -> None:
    ran = run("AB", 4, {4: _lose("B")}, "--min-ranks", "3")
    assert ran.code == 2
    assert (
        "dlio: error: 2 ranks left (lost nodes: B), and --min-ranks is 3: this job ends\n"
        in ran.errors
    )
    assert ran.samples == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_launcher(run: Run, number: signal.Signals) -> None:
    ran = run("AB", 4, {4: lambda _, job: job.send_signal(number)})
    assert ran.code == (-number if number == signal.SIGKILL else 130)


def test_a_node_that_cannot_be_reached_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_RSH", "false")
    ran = run("AB", 4, {})
    assert ran.code == 2
    assert "dlio: error: --nodes: no agent starts on A: check `false A" in ran.errors


def _change(verb: str, names: str) -> Hurt:
    """Have nodes join the job or leave it; returns when they are ready."""

    def act(nodes: PretendedNodes, _: object) -> None:
        done = _ask(nodes, verb, "--nodes", names)
        assert done.returncode == 0, done.stderr

    return act


def _ask(nodes: PretendedNodes, verb: str, *options: str) -> "subprocess.CompletedProcess[str]":
    name = (nodes.folder / "output").read_text().split("job ", 1)[1].split(":", 1)[0]
    return subprocess.run(
        [sys.executable, "-m", "dlio.cli", verb, name, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_node_joins_and_another_leaves(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run("ABD", 4, {4: _change("join", "D"), 12: _change("leave", "A")}, asked="AB")
    ran.check_exact()
    assert ran.losses == []
    joined, left = ran.report["changes"]
    assert (joined["kind"], joined["ranks"], joined["nodes"]) == ("joined", [4, 5], ["D", "D"])
    assert (left["kind"], left["ranks"], left["nodes"]) == ("left", [0, 1], ["A", "A"])
    assert [each["left"] for each in (joined, left)] == [6, 4]
    assert [each["steps_again"] for each in (joined, left)] == [0, 0]
    made = [stamp["updates"] for stamp in ran.stamps if stamp["what"] == "step"]
    assert made == sorted(set(made)), "no step is made twice"
    assert f"node D joined at step {joined['step']}: 6 ranks go on" in ran.output
    assert f"node A has left at step {left['step']}: 4 ranks go on" in ran.output
    with capsys.disabled():
        print(f"\n{joined['seconds']:.2f} s to join, {left['seconds']:.2f} s to leave")


@pytest.mark.parametrize("exchange", ["allreduce+onebit", "local-sgd(3)", "gossip", "asgd"])
def test_a_node_joins_with_other_exchanges(run: Run, exchange: str) -> None:
    ran = run("ABD", 4, {4: _change("join", "D")}, "--exchange", exchange, asked="AB")
    ran.check_exact()
    assert [each["ranks"] for each in ran.report["changes"]] == [[4, 5]]


def test_a_lost_node_is_taken_in_again(run: Run) -> None:
    ran = run("AB", 4, {4: _lose("B"), 9: _change("join", "B")}, asked="AB")
    ran.check_exact()
    assert ran.gone == [(2, "B"), (3, "B")]
    assert [each["ranks"] for each in ran.report["changes"]] == [[4, 5]]


def test_requests_for_nodes_that_cannot_be_are_refused_in_one_line(run: Run) -> None:
    said: list[str] = []

    def ask(nodes: PretendedNodes, _: object) -> None:
        for verb, *options in (
            ("join", "--nodes", "A"),
            ("join", "--nodes", "no-such"),
            ("leave", "--nodes", "D"),
            ("leave", "--nodes", "A,B"),
            ("leave", "--nodes", "A"),
            ("join",),
        ):
            done = _ask(nodes, verb, *options)
            assert done.returncode == 2
            said.append(done.stderr)

    ran = run("AB", 4, {4: ask}, "--min-ranks", "3", asked="AB")
    ran.check_exact()
    assert ran.report["changes"] == []
    expected = (
        "--nodes A: A is in the job already: it has A, B\n",
        "--nodes no-such: no agent starts on no-such: check `",
        "--nodes D: D is not a node of the job: it has A, B\n",
        "--nodes A,B: no node would be left: it has A, B\n",
        "--nodes A: 2 ranks would be left, and --min-ranks is 3\n",
        " runs on several nodes: name those that join or leave by --nodes\n",
    )
    for line, words in zip(said, expected, strict=True):
        assert line.startswith("dlio: error: ")
        assert words in line
        assert line.count("\n") == 1


def test_beyond_a_cut_of_the_network_ranks_end_before_others_are_started(
    run: Run, nodes: PretendedNodes
) -> None:
    nodes.relay()
    ended: list[float] = []

    def cut(nodes: PretendedNodes, _: object) -> None:
        began = time.time()
        nodes.cut("B")
        deadline = time.monotonic() + TIMEOUT_S
        while any("dlio.launch.node" in line for line in nodes.processes("B").values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ended.append(time.time())
        stamps = nodes.folder / "stamps"
        while not any(s["what"] == "begin" and s["time"] > began for s in _stamps(stamps)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    ran = run("AB", 4, {7: cut}, asked="AB")
    ran.check_exact()
    ran.check_steps()
    assert ran.gone == [(2, "B"), (3, "B")]
    assert [loss["left"] for loss in ran.restarts] == [2]
    begun = next(s["time"] for s in ran.stamps if s["what"] == "begin" and s["time"] > ran.hurt)
    assert ended[0] < begun

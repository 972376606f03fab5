"""Contenders that crash, hang, give other labels or are absent are reported, with a reason."""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlio.errors import UsageError
from dlio_bench.loader_bench import LoaderCase, measure
from dlio_bench.peers import environments
from dlio_bench.peers.contender_table import (
    CASES,
    CONTENDERS,
    ENVIRONMENTS,
    RATIOS,
    ContenderEntry,
    PeerEnvironment,
    cpu_ratio,
)
from dlio_bench.peers.environments import PeersChoice, command
from dlio_bench.peers.process import ContenderProcess, race
from dlio_bench.peers.standalone import runners
from dlio_bench.peers.standalone.runners import protocol
from dlio_bench.peers.standalone.runners.protocol import Task, checksum, weight

_STANDALONE = os.path.join(os.path.dirname(os.path.dirname(protocol.__file__)))
_LABELS = [3, 1, 2, 1, 0]
_FAKE = """
import os, sys, time
import numpy as np
from runners.protocol import serve

passes = 0

def make(task):
    how = sys.argv[1]
    if how == "unprepared":
        raise RuntimeError("no such library")
    if how == "workers":
        if os.fork() == 0:
            time.sleep(600)
    def run():
        global passes
        passes += 1
        print("chatter of a library")
        if how == "crash":
            os.abort()
        if how == "exit":
            print("the last words", file=sys.stderr)
            os._exit(3)
        if how == "hang" or (how == "hang later" and passes == 3):
            time.sleep(600)
        labels = list(task.labels)
        if how == "wrong labels":
            labels[0] += 1
        if how == "wrong labels later" and passes == 2:
            labels[0] += 1
        if how == "too few":
            labels = labels[1:]
        side = task.size + (how == "wrong size")
        if task.size == 0:
            rows = np.outer(labels, [1, 2]) + (how == "wrong rows")
            yield rows, labels
            return
        images = np.zeros((len(labels), side, side, 3), np.uint8)
        if how != "blank":
            images[:, 0] = 1
        if how == "unlabelled":
            images = images[:-1]
        yield images[:2], labels[:2]
        yield images[2:], labels[2:]
    return run

serve(make, ("numpy", "no-such-distribution"))
"""


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """Return a function that starts a contender which behaves in a given way."""
    program = tmp_path / "fake.py"
    program.write_text(_FAKE)

    def start(how: str, patience_s: float = 60.0, size: int = 8) -> ContenderProcess:
        task = Task([f"{k}.jpg" for k in range(5)], _LABELS, size, 2, 1, str(tmp_path / how))
        # The real interpreter, not the session's stand-in: these are killed and looked at.
        python = os.path.realpath(f"/proc/{os.getpid()}/exe")
        paths = os.pathsep.join([_STANDALONE, *filter(None, sys.path)])
        return ContenderProcess(
            how, [python, str(program), how], task, patience_s, {"PYTHONPATH": paths}
        )

    return start


def test_temporary_files_of_a_contender_lie_beside_its_scratch() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        write = "import tempfile; open('told', 'w').write(tempfile.gettempdir())"
        command = ["env", "-C", folder, os.path.realpath(f"/proc/{os.getpid()}/exe"), "-c", write]
        task = Task([], [], 8, 2, 1, os.path.join(folder, "mine"))
        with (
            ContenderProcess("mine", command, task, 60.0) as process,
            pytest.raises(UsageError, match="exited with code 0"),
        ):
            process.get_ready()
        assert Path(folder, "told").read_text() == folder


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("crash", "crash was ended by SIGABRT while it was to make a pass"),
        ("exit", "exit exited with code 3 while it was to make a pass: the last words"),
        ("unprepared", "unprepared failed to prepare its data: RuntimeError: no such library"),
        ("wrong labels", "gave other labels than the data has, in a pass of 5 samples of 5"),
        ("wrong labels later", "gave other labels than the data has, in a pass of 5 samples of 5"),
        ("too few", "gave other labels than the data has, in a pass of 4 samples of 5"),
        ("wrong size", r"batches have the shape \(3, 9, 9, 3\), not crops of 8 pixels"),
        ("blank", "an image is blank"),
        ("unlabelled", "a batch of 2 images has 3 labels"),
    ],
)
def test_a_contender_that_fails_is_reported_and_the_others_go_on(
    fake: Any, how: str, reason: str
) -> None:
    names = (how, "good")
    outcome = race({name: partial(fake, name) for name in names}, _LABELS, 1)
    with pytest.raises(UsageError, match=reason):
        raise UsageError(outcome.absent[how])
    assert list(outcome.races) == ["good"]
    assert outcome.races["good"].footprint
    assert outcome.races["good"].output == "uint8 HWC"
    assert list(outcome.versions) == ["numpy"]
    assert list(outcome.absent) == [how]


def test_rows_with_other_values_are_reported(fake: Any) -> None:
    outcome = race(
        {how: partial(fake, how, size=0) for how in ("wrong rows", "good")},
        _LABELS,
        2,
        weight=weight(np.outer(_LABELS, [1, 2]), _LABELS),
    )
    assert outcome.absent == {"wrong rows": "wrong rows gave other values than the data has"}
    assert outcome.races["good"].output == "int64 x 2"
    assert len(outcome.races["good"].rates) == 2


def test_the_weight_is_of_rows_with_their_labels() -> None:
    rows, labels = np.array([[1, 2], [3, 4], [5, 6]]), np.array([0, 1, 2])
    turned = np.array([2, 0, 1])
    assert weight(rows, labels) == weight(rows[turned].astype(np.float32), labels[turned]) == 50
    assert weight(rows, labels[turned]) != weight(rows, labels)


def test_a_contender_that_hangs_is_ended_at_its_deadline(fake: Any) -> None:
    with fake("hang", 2.0) as contender:
        contender.get_ready()
        with pytest.raises(UsageError, match=r"hang took more than 2 s to make a pass.*--patience"):
            contender.make_passes(1)
        assert contender._process.returncode is not None


def test_figures_of_a_contender_that_hangs_later_are_dropped(fake: Any) -> None:
    outcome = race(
        {"hang later": lambda: fake("hang later", 2.0), "good": lambda: fake("good")}, _LABELS, 2
    )
    assert list(outcome.races) == ["good"]
    assert len(outcome.races["good"].rates) == 2
    assert "more than 2 s" in outcome.absent["hang later"]


def test_an_interrupted_race_waits_for_no_pass(fake: Any) -> None:
    started: list[ContenderProcess] = []

    def start() -> ContenderProcess:
        started.append(fake("good"))
        return started[0]

    def interrupt() -> ContenderProcess:
        os.kill(started[0]._process.pid, signal.SIGSTOP)  # It does not end by itself.
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race({"good": start, "interrupted": interrupt}, _LABELS, 1)
    assert started[0]._process.returncode == -signal.SIGKILL


def test_workers_of_a_contender_are_ended_with_it(fake: Any) -> None:
    with fake("workers") as contender:
        contender.get_ready()
        assert contender.footprint()["processes"] == 2
        group = contender._process.pid
    _await_end(group)


def test_paused_workers_of_a_contender_go_with_it_when_it_is_killed(fake: Any) -> None:
    with fake("workers") as contender:
        contender.get_ready()
        contender.pause()
        contender._process.kill()  # As by the kernel, when the benchmark is killed.
        contender._process.wait()
        _await_end(contender._process.pid)


def _await_end(group: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_is_not_there_is_reported(tmp_path: Path) -> None:
    task = Task([], [], 8, 2, 1, str(tmp_path / "scratch"))
    outcome = race(
        {"gone": lambda: ContenderProcess("gone", ["/no/such/python"], task, 5.0)}, _LABELS, 1
    )
    assert "gone cannot be started" in outcome.absent["gone"]


def test_the_checksum_is_of_the_multiset() -> None:
    assert checksum([1, 2, 2]) == checksum([2, 1, 2])
    assert len({checksum(labels) for labels in ([1, 2, 2], [1, 1, 2], [1, 2], [])}) == 4


def test_all_contenders_have_a_program_and_a_case() -> None:
    from dlio_bench.peers.dlio_contenders import MAKERS

    own = {name for name, entry in CONTENDERS.items() if not entry.environment}
    assert own == set(MAKERS)
    for name, entry in CONTENDERS.items():
        if name not in own:
            module = ENVIRONMENTS[entry.environment].runner or entry.environment
            assert callable(getattr(importlib.import_module(f"{runners.__name__}.{module}"), name))
        assert entry.case in {*CASES, ""}
        assert entry.environment in {*ENVIRONMENTS, ""}


def test_the_ratio_of_cpu_time_is_above_one_where_the_other_takes_longer() -> None:
    report = {"cpu_ms_per_sample": {"dlio": {"median": 2.0}, "torch": {"median": 5.0}}}
    assert cpu_ratio(report, "dlio_over_torch") == 2.5
    assert cpu_ratio(report, "dlio_over_dali") is None
    assert cpu_ratio(report, "rows_over_torch") is None
    assert {name for pair in RATIOS.values() for name in pair} <= set(CONTENDERS)


def test_libraries_that_are_not_installed_are_reported_with_the_remedy(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path))
    report: dict[str, Any] = measure(
        LoaderCase(str(pictures), 32, 5, 1, 1, 60, ("dali", "ceiling"))
    )
    assert report["absent"] == {"dali": "not installed: dlio bench peers install dali"}
    assert list(report["samples_per_s"]) == ["ceiling"]


class TestInstallation:
    """Environments, made by a pip that a script stands in for."""

    @pytest.fixture(autouse=True)
    def pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """Record commands instead of running them; they succeed."""
        monkeypatch.setenv("DLIO_CACHE", str(tmp_path))
        monkeypatch.setitem(CONTENDERS, "fancy", ContenderEntry("Fancy", "files", "fancy"))
        monkeypatch.setitem(
            ENVIRONMENTS,
            "fancy",
            PeerEnvironment(("torch==1", "fancy==1"), ("quick==2",), "a compiler"),
        )
        self.commands: list[list[str]] = []
        self.planned = ["fancy", "numpy"]
        self.fails = ""

        def run(command: list[str], name: str) -> str:
            self.commands.append(command)
            if self.fails and self.fails in command:
                raise UsageError(f"{name} cannot be installed: error: no {self.fails}")
            if "venv" in command:
                os.makedirs(command[-1])
            planned = [{"metadata": {"name": each, "version": "7"}} for each in self.planned]
            return json.dumps({"install": planned})

        monkeypatch.setattr(environments, "_run", run)
        return self.commands

    def test_an_environment_is_below_the_users_cache_and_is_found(self, tmp_path: Path) -> None:
        assert environments.missing("fancy") == ("not installed: dlio bench peers install fancy")
        environments.install("fancy", "")
        assert environments.missing("fancy") is None
        assert Path(environments.folder("fancy")).parent == tmp_path / "peers"
        assert all(command[0] == environments.python_of("fancy") for command in self.commands[1:])
        assert self.commands[-2][-4:] == ["install", "--no-deps", "fancy==7", "numpy==7"]
        assert self.commands[-1][-3:] == ["install", "--no-build-isolation", "quick==2"]

    def test_one_of_other_versions_is_made_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environments.install("fancy", "")
        monkeypatch.setitem(ENVIRONMENTS, "fancy", PeerEnvironment(("fancy==2",)))
        assert "for other versions" in (environments.missing("fancy") or "")
        environments.install("fancy", "")
        assert environments.missing("fancy") is None

    def test_cuda_is_refused_before_anything_is_downloaded(self) -> None:
        self.planned = ["torch", "nvidia-cudnn-cu13", "triton"]
        with pytest.raises(UsageError, match=r"nvidia-cudnn-cu13 and 1 more.*PIP_FIND_LINKS"):
            environments.install("fancy", "")
        assert all("--dry-run" in command for command in self.commands[1:])
        assert not os.path.exists(environments.folder("fancy"))

    def test_what_fails_is_told_with_its_needs_and_the_rest_is_installed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.fails = "quick==2"
        with pytest.raises(UsageError, match="not installed: fancy"):
            command(PeersChoice("install", ("fancy", "spdl")))
        said = capsys.readouterr().out
        assert "no quick==2; it needs a compiler" in said
        assert f"spdl: {environments.folder('spdl')}" in said
        assert not os.path.exists(environments.folder("fancy"))

    def test_an_unknown_one_is_refused(self) -> None:
        with pytest.raises(UsageError, match="fanciest: choose among"):
            PeersChoice("install", ("fanciest",))

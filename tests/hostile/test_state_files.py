"""Files that commands are given, and state that they find: pipes, devices and nonsense end in one
line.
"""

import copy
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio.errors import UsageError
from dlio_bench.results.envelope import SCHEMA
from dlio_bench.results.html.document import page
from dlio_bench.results.report_values import Figure, PlotCurve
from dlio_bench.results.saved_report import SavedReport
from tests.conftest import examples
from tests.hostile.optional import feature

Runs = Callable[..., "subprocess.CompletedProcess[str]"]
_DEADLINE_S = 120
_SMALL = ("--trials", 1, "--epochs", 1, "--model", "resnet(width=4)")


@pytest.fixture
def run(tmp_path: Path) -> Runs:
    """Run `dlio` with words, in a folder of its own; a hang is a failure."""

    def runs(*words: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "dlio.cli", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "DLIO_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return runs


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


STRANGE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link-to-fifo": _link_to_fifo,
}


def _resume(name: str) -> Callable[[Path], list[object]]:
    def words(path: Path) -> list[object]:
        (path.parent / "checkpoints").mkdir()
        path.rename(path.parent / "checkpoints" / name)
        given = ["train", "data", "--resume", "--checkpoint", path.parent / "checkpoints"]
        return [*given, "--tiers", "none", "--epochs", 1, "--model", "resnet(width=4)"]

    return words


def _study(name: str) -> Callable[[Path], list[object]]:
    def words(path: Path) -> list[object]:
        (path.parent / "study" / "trials").mkdir(parents=True)
        if name != "lock":
            (path.parent / "study" / "lock").touch()
        if name == "journal.log":
            (path.parent / "study" / "search.json").write_text("{}")
        path.rename(path.parent / "study" / name)
        return ["search", "data", "--study", path.parent / "study", "--set", "lr=0.1,0.2", *_SMALL]

    return words


COMMANDS: dict[str, Callable[[Path], list[object]]] = {
    "ledger": lambda path: ["ledger", path, "--samples", 9],
    "bench html": lambda path: ["bench", "html", path, "--output", "page.html"],
    "bench compare": lambda path: ["bench", "compare", path, path],
    "bench storage": lambda path: ["bench", "storage", path.parent, "--workload", path],
    "train --config": lambda path: ["train", "data", "--config", path],
    "search --config": lambda path: ["search", "data", "--set", "lr=1,2", "--config", path],
    "train --replay": lambda path: ["train", "data", "--replay", path, "--tiers", "none"],
    "train --weights": lambda path: ["train", "data", "--weights", path, "--tiers", "none"],
    "eval --weights": lambda path: ["eval", "data", "--weights", path],
    "export": lambda path: ["export", path, "out.onnx"],
    "run": lambda path: ["run", "-n", 1, path],
    "launch --script": lambda path: [
        *("launch", "--slurm", "nodes=1", "--script", path, "train", "data", "--checkpoint", "ck")
    ],
    "train --resume": _resume(".lock"),
    "search.json": _study("search.json"),
    "journal.log": _study("journal.log"),
    "lock": _study("lock"),
}


@pytest.fixture
def data(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "data").symlink_to(pictures)


def _check_one_line(done: "subprocess.CompletedProcess[str]", *names: str) -> None:
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("dlio: error: "), done.stderr
    assert lines[0].isprintable(), done.stderr
    assert done.returncode == 2, done.stderr
    assert any(name in lines[0] for name in names), done.stderr


@pytest.mark.parametrize(
    "kind",
    [
        "fifo",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in STRANGE if kind != "fifo"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("data")
# SECURITY.md: S7
def test_pipes_and_devices_are_refused_in_one_line(
    run: Runs, tmp_path: Path, command: str, kind: str
) -> None:
    (tmp_path / "place").mkdir()
    path = tmp_path / "place" / "strange"
    STRANGE[kind](path)
    words = COMMANDS[command](path)
    _check_one_line(run(*words), "strange", "study", "checkpoints", "place")


# Contents, drawn from sound ones by a seed.

NASTY: list[Any] = [
    *(None, True, -1, 0, 10**18, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf")),
    *("", "\x1b[2J", "x" * 100_000, "9" * 5000, [], {}, [[]], {"a": None}, [None], ["a", 1]),
]
_REPORT = {
    "schema": SCHEMA,
    "benchmark": "loader",
    "command": ["dlio", "bench"],
    "started": "2026-01-01T00:00:00",
    "seconds": 3.0,
    "settings": {"a": 1},
    "seeds": {"order": 1},
    "environment": {"cores": 2, "processor": "x", "versions": {"torch": "2"}, "file_systems": []},
    "figures": [
        {
            "name": "throughput",
            "unit": "samples/s",
            "values": [1.0, 2.0],
            "better": "higher",
            "labels": {"loader": "dlio"},
            "forecast": False,
        }
    ],
    "ratios": [{"name": "a / b", "values": [1.0, 2.0], "labels": {}, "better": "higher"}],
    "curves": [
        {
            "name": kind,
            "kind": kind,
            "x_name": "x",
            "y_name": "y",
            "x": [1, 2],
            "y": [1, 2],
            "labels": {"rank": "0"},
            "forecast": False,
        }
        for kind in ("cdf", "time", "scaling")
    ],
    "waterfalls": [{"name": "step", "parts": {"read": 1.0, "rest": 2.0}, "labels": {}}],
    "notes": ["a note"],
}
_OLD = {"machine": {"cores": 2}, "rows": [{"loader": "dlio", "samples_per_s": 3.0}]}
_LINE = {"epoch": 0, "step": 0, "rank": 0, "samples": [0, 1, 2], "update": 0, "hash": "0"}
_CONFIG = {"epochs": 1, "batch_size": 4, "lr": 0.1, "tiers": "none", "model": "resnet(width=4)"}
_OPTIONS = {"first": {"lag": 2}, "options": {"space": ["lr=1,2"], "seed": 0}}
_OPERATION = {"op_code": 0, "worker_id": "w", "study_name": "search", "directions": [1]}
STATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "report": (_REPORT, ["bench", "html", "FILE", "--output", "page.html"]),
    "old report": (_OLD, ["bench", "html", "FILE", "--output", "page.html"]),
    "compared": (_REPORT, ["bench", "compare", "FILE", "FILE"]),
    "ledger": (_LINE, ["ledger", "FILE", "--samples", "3"]),
    "config": (_CONFIG, ["train", "data", "--config", "FILE", "--print-config"]),
    "search.json": (_OPTIONS, ["search", "data", "--set", "lr=1,2", "--study", "STUDY"]),
    "journal.log": (_OPERATION, ["search", "data", "--set", "lr=1,2", "--study", "STUDY"]),
}


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [place, *(each for key in keys for each in _places(value[key], (*place, key)))]


def _changed(sound: dict[str, Any], seed: int) -> bytes:
    """Return JSON with one to three values exchanged, lost, nested, or bytes of it damaged."""
    draw = random.Random(seed)
    value = json.loads(json.dumps(sound))
    for _ in range(draw.randint(1, 3)):
        *way, last = draw.choice(_places(value)[1:] or [("none",)])
        inner = value
        for key in way:
            inner = inner[key]
        if draw.random() < 0.2 and isinstance(inner, dict):
            inner.pop(last, None)
        else:
            inner[last] = copy.deepcopy(draw.choice(NASTY))  # It may be changed next.
    sys.set_int_max_str_digits(0)
    text = json.dumps(value).encode()
    sys.set_int_max_str_digits(4300)
    kind = draw.random()
    if kind < 0.05:
        return b'{"a":' * 100_000 + text
    if kind < 0.1:
        return b"[" * 30_000 + b"]" * 30_000
    if kind < 0.2:
        at = draw.randrange(len(text))
        return text[:at] + draw.randbytes(draw.randint(0, 9)) + text[at + draw.randint(0, 9) :]
    return text + b"\n"


def _stop(*_: object, **__: object) -> None:
    raise UsageError("a search that gets so far has read its state")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("report", "ledger") else pytest.mark.nightly)
        for kind in STATES
    ],
)
@pytest.mark.usefixtures("data")
# SECURITY.md: S7
def test_no_contents_of_a_state_file_make_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    sound, words = STATES[kind]
    study = tmp_path / "study"
    (study / "trials").mkdir(parents=True)
    path = study / kind if "STUDY" in words else tmp_path / "strange"
    argv = [{"FILE": str(path), "STUDY": str(study)}.get(word, word) for word in words]
    monkeypatch.setattr(feature("search.search_command"), "Searcher", _stop)
    for seed in range(examples(100)):
        path.write_bytes(_changed(sound, seed))
        with pytest.raises(SystemExit) as ended:
            main(argv)
        said = capfd.readouterr().err
        assert "Traceback" not in said, (seed, said)
        assert ended.value.code in (0, 1, 2), (seed, said)
        if ended.value.code == 2:
            assert said.splitlines()[-1].startswith("dlio: error: "), (seed, said)
            assert said.splitlines()[-1].isprintable()


class _CountedText(str):
    """A text that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _CountedText.compared += 1
        return super().__eq__(other)


def test_a_page_of_many_curves_compares_each_with_few() -> None:
    counts = []
    for count in (500, 1000):
        _CountedText.compared = 0
        curves = [
            PlotCurve("c", "time", "x", "y", (0.0, 1.0), (0.0, 1.0), {"of": _CountedText(k)})
            for k in range(count)
        ]
        figures = [Figure("f", "s", (1.0,), {"of": _CountedText(k)}) for k in range(count)]
        report = SavedReport("bench", curves=curves, figures=figures, path="a.json")
        assert f"{count - 1}" in page([report], "title")
        counts.append(_CountedText.compared)
    assert counts[1] <= 3 * counts[0] + 10_000

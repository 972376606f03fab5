"""Files that commands are given, and state that they find: pipes, devices and nonsense end in one
line.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    "launch --script": lambda path: [
        *("launch", "--slurm", "nodes=1", "--script", path, "train", "data", "--checkpoint", "ck")
    ],
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
def test_what_is_not_a_regular_file_is_refused_in_one_line(
    run: Runs, tmp_path: Path, command: str, kind: str
) -> None:
    (tmp_path / "place").mkdir()
    path = tmp_path / "place" / "strange"
    STRANGE[kind](path)
    words = COMMANDS[command](path)
    _check_one_line(run(*words), "strange", "study", "place")

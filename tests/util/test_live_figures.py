"""Figures that processes publish are given to this user alone, and nothing is left of them."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from dlio.cli.top import view
from dlio.util import live_figures
from dlio.util.live_figures import Figures, ProcessFigures, ask_all, publish

_TIMEOUT_S = 5.0


class Source:
    def __init__(self, value: object = 1) -> None:
        self.value = value

    def figures(self) -> dict[str, object]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}


@pytest.fixture(autouse=True)
def _alone() -> None:
    """Publish nothing of other tests' data sets, which end when they are collected."""
    for each in list(live_figures._board._published):
        each.close()


def own() -> list[Figures]:
    """The parts that this process publishes."""
    answers = [each for each in ask_all(_TIMEOUT_S) if each.pid == os.getpid()]
    return [part for each in answers for part in each.parts]


def names() -> list[str]:
    text = Path("/proc/net/unix").read_text()
    lines = [line.rsplit(" ", 1)[-1] for line in text.splitlines()]
    return [each for each in lines if each.startswith(f"@dlio-live-{os.geteuid()}-{os.getpid()}-")]


def test_figures_are_those_of_the_moment_until_they_are_closed() -> None:
    source, other = Source(1), Source(2)
    # Kinds that `dlio top` does not show: it may run in another test at the same time.
    with publish("made-up", source.figures), publish("another", other.figures):
        source.value = 3
        assert own() == [{"kind": "made-up", "value": 3}, {"kind": "another", "value": 2}]
    assert own() == [] == names()
    assert not [each for each in threading.enumerate() if each.name == "dlio-live"]


def test_an_owner_that_fails_or_is_gone_does_not_silence_the_others() -> None:
    failing, gone, good = Source(ValueError("closed")), Source(), Source(4)
    with (
        publish("made-up", failing.figures),
        publish("made-up", gone.figures),
        publish("made-up", good.figures),
    ):
        del gone
        assert own() == [{"kind": "made-up", "problem": "closed"}, {"kind": "made-up", "value": 4}]


def test_a_forked_child_does_not_keep_its_parents_socket() -> None:
    source = Source()
    mine, childs = socket.socketpair()
    with publish("made-up", source.figures):
        child = os.fork()
        if child == 0:  # Publishes its own figures until the parent has looked.
            mine.close()
            with publish("made-up", source.figures):
                childs.send(b"1")
                childs.recv(1)
            os._exit(0)
        childs.close()
        assert mine.recv(1) == b"1"
    try:
        assert names() == []
    finally:
        mine.close()
        assert os.waitpid(child, 0)[1] == 0


_CONNECT = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(5)
connection.connect("\\0" + sys.argv[1])
sys.stdout.write(repr(connection.recv(100)))
"""
_LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0dlio-live-0-1-00")
listener.listen(1)
print("listens", flush=True)
listener.settimeout(60)
connection, _ = listener.accept()
print("asked", flush=True)
connection.send(sys.argv[1].encode(), socket.MSG_NOSIGNAL)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_told_nothing_and_cannot_pretend() -> None:
    source = Source("secret")
    with publish("made-up", source.figures):
        (name,) = names()
        argv = ["/usr/bin/env", "python3", "-c", _CONNECT, name[1:]]
        asked = subprocess.run(argv, user=65534, capture_output=True, timeout=400, check=True)
    assert asked.stdout == b"b''"
    answer = json.dumps({"version": 1, "pid": 1, "time": 1.0, "command": "", "parts": []})
    argv = ["/usr/bin/env", "python3", "-c", _LISTEN, answer]
    with subprocess.Popen(argv, user=65534, text=True, stdout=subprocess.PIPE) as false:
        assert false.stdout is not None
        assert false.stdout.readline() == "listens\n"
        assert not [each for each in ask_all(_TIMEOUT_S) if each.pid == 1]
        assert false.stdout.readline() == "asked\n"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "pid": "x"}', "[" * 100_000]
)
def test_answers_of_other_versions_or_without_an_end_are_left_out(text: str) -> None:
    name = f"dlio-live-{os.geteuid()}-1-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(text.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        assert not [each for each in ask_all(_TIMEOUT_S) if each.pid == 1]
        thread.join(_TIMEOUT_S)
        assert ask_all(0.1) is not None  # It does not answer at all now.


def test_top_prints_json_and_a_table() -> None:
    class Mount(Source):
        def figures(self) -> dict[str, object]:
            tier = {"kind": "ram", "root": "/dev/shm", "capacity": 1 << 30, "used": 1 << 20}
            return {
                "path": "/data/[bold]x",
                "rank": 1,
                "ranks": 4,
                "tiers": [{**tier, "wanted": 5}],
                "bytes": {"source": 0, "peer": 0, "ram": 0, "disk": 0},
                "samples": 0,
                "waited_s": 0.0,
            }

    mount = Mount()
    with publish("data", mount.figures):
        said = json.loads(_top("--once", "--json"))
        (mine,) = [each for each in said["processes"] if each["pid"] == os.getpid()]
        assert mine["parts"][0]["ranks"] == 4
        table = _top("--once", "--every", "0.1")
    for text in ("/data/[bold]x", str(os.getpid()), "1/4", "1 MiB", "1 GiB"):
        assert text in table


def test_rates_are_of_the_time_between_two_looks() -> None:
    def look(seconds: float, samples: int, source: int, waited_s: float) -> ProcessFigures:
        part = {"kind": "data", "path": "a", "rank": 0, "ranks": 1, "tiers": []}
        counts = {"samples": samples, "waited_s": waited_s}
        places = {"source": source << 20, "peer": 0, "ram": 0, "disk": 0}
        training = {"kind": "training", "epoch": 2, "epochs": 9, "step": 3, "steps": 8}
        parts = [{**part, **counts, "bytes": places}, training]
        return ProcessFigures(7, "", seconds, parts)

    out = io.StringIO()
    console = Console(width=100, file=out)
    console.print(view([look(10, 100, 50, 1.0)], [look(12, 1100, 57, 1.5)]))
    (row,) = [line for line in out.getvalue().splitlines() if line.strip().startswith("7")]
    assert " ".join(row.split()) == "7 0/1 epoch 2/9, step 3/8 500 25% 3.5 0.0 0.0 0.0"


def test_top_refuses_intervals_that_cannot_work() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "top", "--every", "0"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 2
    assert "--every 0.0: give seconds from 0.1 to 3,600" in process.stderr


def _top(*argv: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "dlio.cli", "top", *argv],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    ).stdout

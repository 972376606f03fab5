"""Ranks that are stopped are killed; those that compute or sleep are left alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dlio.comm import board
from dlio.comm.survival import node_watch
from dlio.comm.survival.node_watch import NodeWatch, WatchPolicy
from dlio.util.child_processes import is_stopped
from tests.conftest import in_time

# A signal that stops the stand-in would not stop its program.
pytestmark = pytest.mark.cold


@contextmanager
def _rank(text: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", text])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_stopped_rank_is_killed_and_others_are_not() -> None:
    with (
        _rank("while True: pass") as computes,
        _rank("import time; time.sleep(600)") as sleeps,
        _rank("import time; time.sleep(600)") as stops,
    ):
        ranks = {1: computes.pid, 2: sleeps.pid, 3: stops.pid, 0: 0}
        watch = NodeWatch(ranks, 0, lambda: (0, 1, 2, 3))
        try:
            stops.send_signal(signal.SIGSTOP)
            assert in_time(lambda: is_stopped(stops.pid))
            assert stops.wait(120) == -signal.SIGKILL
            assert (computes.poll(), sleeps.poll()) == (None, None)
        finally:
            watch.close()


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    with _rank("import time; time.sleep(600)") as stops:
        watch = NodeWatch({0: 0, 1: stops.pid}, 0, lambda: (0, 1))
        try:
            stops.send_signal(signal.SIGSTOP)
            assert in_time(lambda: is_stopped(stops.pid))
            stops.send_signal(signal.SIGCONT)
            time.sleep(2)
            assert stops.poll() is None
        finally:
            watch.close()


def test_the_lowest_rank_that_lives_and_is_not_stopped_watches_the_others() -> None:
    sleep = "import time; time.sleep(600)"
    with _rank(sleep) as two, _rank(sleep) as five, _rank(sleep) as seven:
        here = {2: two.pid, 5: five.pid, 7: seven.pid}
        made = {me: NodeWatch(here, me, lambda: (2, 5, 7)) for me in here}
        for each in made.values():
            each.close()

        def on_duty() -> list[int]:
            return [me for me, each in made.items() if each._is_on_duty([2, 5, 7], 0.0)]

        assert on_duty() == [2]
        five.send_signal(signal.SIGSTOP)
        assert in_time(lambda: is_stopped(five.pid))
        assert not made[7]._is_on_duty([2, 5, 7], 0.0)
        assert made[5]._is_on_duty([5, 7], 0.0)
        two.send_signal(signal.SIGSTOP)
        assert in_time(lambda: is_stopped(two.pid))
        assert made[7]._is_on_duty([2, 5, 7], 0.0)
        two.kill()
        two.wait()
        assert made[7]._is_on_duty([2, 5, 7], 0.0)


_HANGING = """
import ctypes, sys, time
from dlio.comm.board import WINDOW, computing, open_board
from dlio.comm.survival.node_watch import NodeWatch
import os
board = open_board()
watch = NodeWatch({0: os.getppid(), 1: os.getpid()}, 1, lambda: (0, 1), board, {1: board.file})
for _ in range(WINDOW):
    with computing():
        time.sleep(0.02)
def hang():
    with computing():
        print(board.file, flush=True)
        HANG
hang()
"""


@pytest.mark.parametrize(
    ("hang", "why"),
    [
        ("while True: pass", "it runs, and does not come to the end of its step"),
        pytest.param(
            "ctypes.PyDLL(None).sleep(600)",
            "no thread of it has run: a call into C holds Python's lock",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_rank_that_hangs_writes_its_stacks_and_is_killed(
    hang: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board, "_board", None)
    monkeypatch.setattr(node_watch, "_policy", WatchPolicy(hang_after_s=1.0))
    command = [sys.executable, "-c", _HANGING.replace("HANG", hang)]
    own = board.open_board()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as hangs:
        assert hangs.stdout is not None
        assert hangs.stderr is not None
        files = {0: own.file, 1: int(hangs.stdout.readline())}
        processes = {0: os.getpid(), 1: hangs.pid}
        watch = NodeWatch(processes, 0, lambda: (0, 1), own, files)
        try:
            with board.computing(), board.blocked():
                assert hangs.wait(120) == -signal.SIGKILL
        finally:
            watch.close()
            hangs.kill()
        stacks = hangs.stderr.read().decode()
    os.close(own.file)
    (said,) = caplog.messages
    assert said.startswith(f"rank 1 (process {hangs.pid}) hangs and is killed: all others of its")
    assert said.endswith(why)
    assert "in hang" in stacks


def test_a_rank_watches_that_beats_if_no_lower_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "_policy", None)
    rows = {member: board.Board() for member in range(3)}
    processes = dict.fromkeys(rows, os.getpid())
    files = {member: row.file for member, row in rows.items()}
    watch = NodeWatch(processes, 2, lambda: (0, 1, 2), rows[2], files)
    try:
        now = time.monotonic()
        assert not watch._is_on_duty([0, 1, 2], now)
        assert watch._is_on_duty([0, 1, 2], now + 60)  # Neither 0 nor 1 has beaten since.
        rows[1].beat()
        assert not watch._is_on_duty([0, 1, 2], time.monotonic())
        assert watch._is_on_duty([2], now)
    finally:
        watch.close()
        for row in rows.values():
            os.close(row.file)


def test_a_stopped_rank_is_killed_though_its_watcher_is_dead() -> None:
    """A generation is not over before the stopped rank is dead, too."""
    sleep = "import time; time.sleep(600)"
    with _rank(sleep) as dead, _rank(sleep) as stops:
        dead.kill()
        dead.wait()
        stops.send_signal(signal.SIGSTOP)
        watch = NodeWatch({0: dead.pid, 1: stops.pid, 2: os.getpid()}, 2, lambda: (0, 1, 2))
        try:
            assert stops.wait(120) == -signal.SIGKILL
        finally:
            watch.close()

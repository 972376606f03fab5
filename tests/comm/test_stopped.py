"""Ranks that are stopped are killed; those that compute or sleep are left alone."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dlio.comm.stopped import StoppedRanks, is_stopped
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
        _rank("import time; time.sleep(60)") as sleeps,
        _rank("import time; time.sleep(60)") as stops,
    ):
        ranks = {1: computes.pid, 2: sleeps.pid, 3: stops.pid, 0: 0}
        watch = StoppedRanks(ranks, 0, lambda: (0, 1, 2, 3))
        try:
            stops.send_signal(signal.SIGSTOP)
            assert in_time(lambda: is_stopped(stops.pid))
            assert stops.wait(30) == -signal.SIGKILL
            assert (computes.poll(), sleeps.poll()) == (None, None)
        finally:
            watch.close()


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    with _rank("import time; time.sleep(60)") as stops:
        watch = StoppedRanks({0: 0, 1: stops.pid}, 0, lambda: (0, 1))
        try:
            stops.send_signal(signal.SIGSTOP)
            assert in_time(lambda: is_stopped(stops.pid))
            stops.send_signal(signal.SIGCONT)
            time.sleep(2)
            assert stops.poll() is None
        finally:
            watch.close()


def test_the_lowest_rank_watches_the_others_and_the_next_one_watches_it() -> None:
    watched = {me: StoppedRanks({me: 0}, me, lambda: (2, 5, 7))._watched() for me in (2, 5, 7)}
    assert watched == {2: [], 5: [], 7: []}
    here = {2: 0, 5: 0, 7: 0}
    made = {me: StoppedRanks(here, me, lambda: (2, 5, 7)) for me in here}
    try:
        assert {me: each._watched() for me, each in made.items()} == {
            2: [5, 7],
            5: [2],
            7: [],
        }
    finally:
        for each in made.values():
            each.close()

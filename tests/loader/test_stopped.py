"""A peer that stops answering delays no batch by more than its deadline, and loses none."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import in_time

pytestmark = pytest.mark.mpi
BODY = str(Path(__file__).with_name("stopped_checks.py"))
N = 103
DEADLINE_S = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import small_pictures

    root = tmp_path_factory.mktemp("stopped") / "pictures"
    small_pictures(root, images=N)
    return root


def test_a_peer_that_stops_delays_a_batch_by_its_deadline(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], folder: Path, tmp_path: Path
) -> None:
    def resume() -> None:
        """When rank 0 has ended its epoch without it."""
        if in_time(lambda: (tmp_path / "done").exists(), 60):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)

    waiting = threading.Thread(target=resume)
    waiting.start()
    env = {"DLIO_PEER_TIMEOUT": str(DEADLINE_S)}
    done = mpirun(2, "-W", "error", BODY, str(folder), str(tmp_path), env=env)
    waiting.join()
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reports = {each["rank"]: each for each in lines}
    assert sorted(chain(*reports[0]["steps"], *reports[1]["steps"])) == list(range(N))
    assert reports[0]["late"] > 0
    # Without a deadline, it would wait for as long as the peer is stopped: 60 seconds.
    assert DEADLINE_S <= reports[0]["longest_s"] < DEADLINE_S + 30
    # Once given up, the peer is not waited for again: its samples came from the source.
    assert reports[1]["late"] == 0

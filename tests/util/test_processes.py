"""Groups of processes, which end together."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dlio.util.child_processes import end_groups, process_state
from tests.conftest import in_time

# cold: a stand-in's program has a session of its own, which no signal to the group reaches.
pytestmark = pytest.mark.cold

PARENT = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1] + ".tmp").write_text(str(child.pid))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def _has_ended(process: int) -> bool:
    return process_state(process) in ("X", "Z")


def test_groups_end_with_all_of_their_processes_those_too_that_ignore_sigterm(
    tmp_path: Path,
) -> None:
    leaders = [
        subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path / ear), ear], start_new_session=True
        )
        for ear in ("deaf", "hears")
    ]
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ended.wait(60)
    for ear in ("deaf", "hears"):
        assert in_time((tmp_path / ear).exists)
    end_groups([*leaders, ended], 0.5)
    assert [leader.returncode for leader in leaders] == [-signal.SIGKILL, -signal.SIGTERM]
    for ear in ("deaf", "hears"):
        assert in_time(partial(_has_ended, int((tmp_path / ear).read_text())))

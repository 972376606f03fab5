"""A signal that asks a run to end, when its processes are ending already."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os
from dlio.cli import guarded
atexit.register(lambda: print("left"))
atexit.register(lambda: os.kill(os.getpid(), {number}))

def run():
    print("done")
    if {code}:
        raise SystemExit({code})

guarded(run)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize("rank", [False, True])
def test_it_does_not_change_the_exit_code(number: int, code: int, rank: bool) -> None:
    program = PROGRAM.format(number=int(number), code=code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **({"OMPI_COMM_WORLD_SIZE": "1"} if rank else {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    # SIGTERM ends a process at once, but not a rank of MPI, which takes its time to leave.
    at_once = number == signal.SIGTERM and not rank
    assert done.stdout.split() == (["done"] if at_once else ["done", "left"])
    assert not done.stderr

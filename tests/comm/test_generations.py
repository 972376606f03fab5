"""Generations of ranks: a process may see thousands of them."""

from pathlib import Path

import pytest

from dlio.launch.mpi_launch import SURVIVING
from tests.conftest import MpiRun

RENEWING = Path(__file__).with_name("renewing.py")


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly
def test_memory_does_not_grow_with_generations(mpirun: MpiRun) -> None:
    surviving = {"DLIO_MIN_RANKS": "1", "MPI4PY_RC_THREAD_LEVEL": "serialized"}
    done = mpirun(3, str(RENEWING), "3000", env=surviving, timeout_s=900, options=SURVIVING)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5 * 1024  # KiB by 1,000 generations.

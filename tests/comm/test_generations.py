"""Generations of ranks: a process may see thousands of them."""

from pathlib import Path

import pytest

from dlio.launch.mpi_launch import SURVIVING
from tests.conftest import MpiRun

RENEWING = Path(__file__).with_name("renewing.py")
UNCLEAR = Path(__file__).with_name("unclear_errors.py")
WAITING = Path(__file__).with_name("waiting_for_the_living.py")


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly
def test_memory_does_not_grow_with_generations(mpirun: MpiRun) -> None:
    surviving = {"DLIO_MIN_RANKS": "1", "MPI4PY_RC_THREAD_LEVEL": "serialized"}
    done = mpirun(3, str(RENEWING), "3000", env=surviving, timeout_s=900, options=SURVIVING)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5 * 1024  # KiB by 1,000 generations.


@pytest.mark.mpi
@pytest.mark.cold
def test_an_error_of_mpi_that_names_no_loss_is_one_where_a_rank_is_lost(mpirun: MpiRun) -> None:
    surviving = {"DLIO_MIN_RANKS": "1", "MPI4PY_RC_THREAD_LEVEL": "serialized"}
    done = mpirun(3, str(UNCLEAR), env=surviving, timeout_s=300, options=SURVIVING)
    assert done.stdout.count("went on") == 2, done.stderr


@pytest.mark.mpi
@pytest.mark.cold
def test_a_rank_that_waits_for_a_living_one_learns_of_a_loss_that_only_that_one_sees(
    mpirun: MpiRun,
) -> None:
    surviving = {
        "DLIO_MIN_RANKS": "1",
        "MPI4PY_RC_THREAD_LEVEL": "serialized",
        "DLIO_TIMEOUT": "60",
    }
    done = mpirun(3, str(WAITING), env=surviving, timeout_s=300, options=SURVIVING)
    assert done.stdout.count("went on") == 2, done.stderr

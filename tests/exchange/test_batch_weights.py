"""Ranks count by the samples that the loader hands out, in loops that do not weigh."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun

BODY = str(Path(__file__).with_name("batch_weights_checks.py"))


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi_segments")
def test_a_loop_without_weigh_gets_the_weights_of_one_process(mpirun: MpiRun) -> None:
    done = mpirun(2, BODY)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi_segments")
def test_a_rank_that_decides_or_weighs_otherwise_than_others_is_told(mpirun: MpiRun) -> None:
    done = mpirun(2, str(Path(BODY).with_name("joined_batches_checks.py")))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi_segments")
def test_a_loss_whose_mean_over_ranks_is_not_one_process_s_is_told(mpirun: MpiRun) -> None:
    done = mpirun(2, str(Path(BODY).with_name("loss_watch_checks.py")))
    assert done.returncode == 0, done.stderr[-4000:]

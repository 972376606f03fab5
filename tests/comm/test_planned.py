"""Ranks that leave as planned: communicators of those that go on are made anew."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun

CHECKS = Path(__file__).with_name("planned_checks.py")


@pytest.mark.mpi
def test_ranks_leave_as_planned_and_wait_for_the_end(mpirun: MpiRun) -> None:
    done = mpirun(5, str(CHECKS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "well"

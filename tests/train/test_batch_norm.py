"""Batch normalisation over ranks."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from dlio.errors import UsageError
from dlio.train.config import TrainConfig
from tests.conftest import MpiRun

BODY = Path(__file__).with_name("batch_norm_checks.py")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.daily("3")
def test_ranks_normalise_as_one_process(mpirun: MpiRun, ranks: int) -> None:
    done = mpirun(ranks, str(BODY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kept"] * ranks


def test_one_rank_normalises_as_torch() -> None:
    runpy.run_path(str(BODY))["check_synchronised"]()


@pytest.mark.parametrize(
    "options",
    [{"exchange": "gossip"}, {"prune": "apoptosis"}, {"fault_tolerance": "shrink"}],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--batch-norm sync does not go with"):
        TrainConfig(source="data", batch_norm="sync", **options)

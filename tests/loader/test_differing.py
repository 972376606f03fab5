"""Ranks whose loaders differ are refused: their parts would not make up an epoch."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BODY = str(Path(__file__).with_name("differing_checks.py"))


@pytest.mark.mpi
def test_ranks_whose_orders_differ_are_refused_and_the_difference_is_named(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], pictures: Path
) -> None:
    done = mpirun(2, BODY, str(pictures))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    cases = {report["case"] for report in reports}
    assert len(cases) == 10
    for report in reports:
        if report["case"] == "nothing":
            samples = sum(1 for path in pictures.rglob("*") if path.is_file())
            assert report["said"] == f"{samples} samples"
        else:
            wanted = f"the ranks' loaders differ in {report['case']}: rank 0 has "
            assert report["said"].startswith(wanted), report
            assert len(report["said"]) < 400

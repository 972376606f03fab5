"""Map-style data sets behind tiers in a job of several ranks: each sample is asked for once."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader.mapstyle_checks import N

pytestmark = pytest.mark.mpi
BODY = str(Path(__file__).with_name("mapstyle_checks.py"))


@pytest.mark.parametrize("shapes", ["fixed", "varying"])
@pytest.mark.parametrize(
    ("ranks", "nodes", "leave"), [(2, 1, ""), (2, 2, ""), (4, 2, "leave"), (3, 3, "")]
)
@pytest.mark.daily("4-2-leave-varying", "3-3--fixed", "2-1--varying")
def test_each_sample_is_asked_for_once_by_the_whole_job(
    mpirun: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    shapes: str,
    ranks: int,
    nodes: int,
    leave: str,
) -> None:
    mode = "batch" if nodes == 1 else "global"
    arguments = [str(tmp_path), shapes, f"{tmp_path}:64MiB", mode, str(nodes), leave]
    done = mpirun(ranks, "-W", "error", BODY, *arguments)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for epoch in range(2):
        seen = [sample for report in reports for sample in report["epochs"][epoch]]
        assert sorted(seen) == list(range(N))
    calls = [int(n) for file in tmp_path.glob("calls.*") for n in file.read_text().split()]
    assert sorted(calls) == list(range(N))
    assert any(report["peers"] for report in reports) == (nodes > 1)

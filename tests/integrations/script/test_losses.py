"""Unmodified scripts go on when ranks are lost: every sample once, in as many steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.errors import UsageError
from dlio.integrations.script.run_options import RunOptions

HERE = Path(__file__).parent
ENDING, COUNTING = HERE / "losses" / "ending.py", HERE / "losses" / "counting.py"
SCRIPTS = HERE / "scripts"
# The stand-in ends a little later than the process that kills itself: at night, without it.
pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]


def _run(
    script: Path, *arguments: str, ranks: int, ends: dict[int, list[object]], more: list[str]
) -> subprocess.CompletedProcess[str]:
    argv = ["-m", "dlio.cli", "run", "-n", str(ranks), *more, str(ENDING), str(script), *arguments]
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DLIO_TIMEOUT": "180",
            "ENDS": json.dumps(ends),
        },
    )


def _survived(
    script: Path, *arguments: str, ranks: int, ends: dict[int, list[object]]
) -> subprocess.CompletedProcess[str]:
    more = ["--fault-tolerance", "shrink"]
    done = _run(script, *arguments, ranks=ranks, ends=ends, more=more)
    assert done.returncode == 0, done.stderr
    # Of ranks that are lost together, one line may be lost with the rank that was to print it.
    lost = re.findall(r"dlio run: ranks? (.+) lost at step \d+: \d ranks? goe?s? on", done.stderr)
    assert lost
    assert {int(rank) for line in lost for rank in re.findall(r"(\d+) \(node", line)} <= set(ends)
    return done


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        pytest.param(3, {1: [3, "before"]}, marks=pytest.mark.nightly),
        pytest.param(3, {2: [3, "after"]}, marks=pytest.mark.nightly),
        pytest.param(3, {0: [4, "before"]}, marks=pytest.mark.nightly),
        (4, {1: [2, "before"], 3: [9, "after"]}),
        (4, {0: [2, "after"], 1: [2, "before"], 2: [2, "before"]}),
        pytest.param(2, {1: [7, "before"]}, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.daily("4-ends4")
def test_each_sample_of_a_script_is_in_one_gradient_of_each_epoch(
    ranks: int, ends: dict[int, list[object]], tmp_path: Path
) -> None:
    done = _survived(COUNTING, str(tmp_path / "out.pt"), ranks=ranks, ends=ends)
    rows = re.findall(r"epoch (\d): \[(.*)\] in (\d+) steps", done.stdout)
    by_epoch = {int(epoch): (counts, int(steps)) for epoch, counts, steps in rows}
    assert sorted(by_epoch) == [0, 1, 2]  # Rank 0 prints; if it is lost, the next one does.
    for counts, steps in by_epoch.values():
        assert set(counts.split(", ")) == {"1"}
        assert steps in (7, 8)  # One more where the last batch of an epoch is torn.


@pytest.mark.nightly
def test_a_script_that_takes_batches_ahead_loses_none_either(tmp_path: Path) -> None:
    ends: dict[int, list[object]] = {1: [4, "before"]}
    done = _survived(COUNTING, str(tmp_path / "out.pt"), "ahead", ranks=3, ends=ends)
    rows = re.findall(r"epoch \d: \[(.*)\] in [78] steps", done.stdout)
    assert [set(counts.split(", ")) for counts in rows] == [{"1"}] * 3


def test_samples_that_no_pass_can_repeat_are_told(tmp_path: Path) -> None:
    """The last batch of the last pass, taken ahead of the one before it."""
    ends: dict[int, list[object]] = {1: [21, "before"]}
    done = _survived(COUNTING, str(tmp_path / "out.pt"), "ahead", ranks=2, ends=ends)
    missed = re.search(r"dlio run: not trained on: (\d+) samples? of lost ranks", done.stderr)
    assert missed is not None
    last = re.findall(r"epoch 2: \[(.*)\]", done.stdout)[0].split(", ")
    assert last.count("0") == int(missed[1]) > 0


def test_without_the_option_a_script_ends_with_any_rank(tmp_path: Path) -> None:
    done = _run(COUNTING, str(tmp_path / "out.pt"), ranks=2, ends={1: [3, "before"]}, more=[])
    assert done.returncode != 0
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("exchange", ["gossip", "asgd", "noloco", "noloco(1)+adaptive"])
def test_exchanges_without_common_sums_are_refused(exchange: str) -> None:
    with pytest.raises(UsageError, match="does not go with --fault-tolerance shrink"):
        RunOptions(exchange=exchange, fault_tolerance="shrink")
    RunOptions(exchange="local-sgd(8)", fault_tolerance="shrink")


_IN_CI = {"accumulation"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[] if path.stem in _IN_CI else [pytest.mark.nightly])
        for path in sorted(SCRIPTS.glob("*.py"))
        if path.stem != "deciding"
    ],
)
def test_each_script_survives_a_kill(name: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    option = ["--out"] if name == "clipping" else []
    path = SCRIPTS / f"{name}.py"
    alone = subprocess.run(
        [sys.executable, str(path), *option, str(tmp_path / "alone.pt")],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    done = _survived(path, *option, out, ranks=3, ends={1: [5, "before"]})
    assert re.sub(r"\d+\.?\d*", "#", done.stdout) == re.sub(r"\d+\.?\d*", "#", alone.stdout)
    expected, trained = (torch.load(tmp_path / each) for each in ("alone.pt", "out.pt"))
    before, after = _flat(expected), _flat(trained)
    assert before.shape == after.shape
    # One step had two thirds of its samples, and the next ones the rest.
    assert float((after - before).norm() / before.norm()) < 0.1


@pytest.mark.nightly
def test_a_decision_by_sizes_of_parts_is_told_once_a_batch_is_torn(tmp_path: Path) -> None:
    """A torn batch is divided otherwise than the others: means that are weighed by the sizes of
    parts differ from then on between ranks, and so do the best ones."""
    more = ["--fault-tolerance", "shrink"]
    ends: dict[int, list[object]] = {1: [5, "before"]}
    done = _run(SCRIPTS / "deciding.py", str(tmp_path / "out"), ranks=3, ends=ends, more=more)
    assert done.returncode == 2
    assert "deciding.py:26, deciding.py:27: the size of a training batch" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "dlio: error: the ranks of the script do different things" in last
    assert "torch.save at deciding.py:32" in last


def _flat(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved.reshape(-1).float()
    return torch.cat(
        [_flat(each) for each in (saved.values() if isinstance(saved, dict) else saved)]
    )

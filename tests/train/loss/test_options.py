"""Losses of ranks with other options of `dlio train`: each sample once, in one run and over two."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.train.loss.conftest import SAMPLES, Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold]


def _samples_before(trace: Path, epoch: int, step: int) -> Counter[int]:
    """Samples of an epoch's steps before `step`."""
    lines = map(json.loads, trace.read_text().splitlines())
    samples: Counter[int] = Counter()
    for line in lines:
        if line["epoch"] == epoch and line["step"] < step:
            samples.update(line["samples"])
    return samples


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_run_goes_on_from_a_checkpoint_after_a_loss(run: Run, tmp_path: Path, ranks: int) -> None:
    """Rank 0, which publishes checkpoints, is lost; the checkpoints of later steps are whole."""
    ran = run(3, {0: ["kill", 5, 1]}, "--checkpoint", "c", "--checkpoint-every", "2", "--keep", "9")
    check_exact(ran)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    print(names, ran.output, ran.errors)
    before = _samples_before(tmp_path / "t.jsonl", 0, 6)
    (tmp_path / "d").mkdir()
    shutil.move(tmp_path / "c" / "step-00000006", tmp_path / "d")
    resumed = run(ranks, {}, "--checkpoint", "d", "--resume")
    assert resumed.code == 0, resumed.errors
    assert "resumed from" in resumed.output
    assert before + resumed.samples[0] == Counter(range(SAMPLES))
    assert resumed.samples[1] == Counter(range(SAMPLES))


@pytest.mark.parametrize("step", [8, 9])
def test_a_loss_at_a_pruning_round_leaves_all_with_one_layout(
    run: Run, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setenv("PRUNE_EVERY", "4")
    ran = run(3, {1: ["kill", step, -1]}, "--prune", "apoptosis", "--prune-tolerance", "50")
    print(ran.output, ran.errors)
    print([e["pruning"] for e in ran.epochs])
    check_exact(ran)


def test_skipped(run: Run) -> None:
    ran = run(
        3,
        {1: ["kill", 7, 1], 0: ["kill", 13, 1]},
        "--skip-samples",
        "--skip-share",
        "0.4",
        "--epochs",
        "3",
        "--balance",
    )
    print(ran.output, ran.errors)
    print(ran.epochs, {k: len(v) for k, v in ran.samples.items()})
    assert 0

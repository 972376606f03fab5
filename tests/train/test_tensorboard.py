"""Curves for TensorBoard, of runs that were killed and resumed."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlio.train.callbacks import tensorboard
from dlio.train.callbacks.tensorboard import TensorBoard

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
_EPOCH = 12


def _train(folder: Path, steps: range, *, resume: bool) -> None:
    """Make steps as a run that is killed after the last one: nothing is closed."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    run: Any = SimpleNamespace(
        comm=SimpleNamespace(rank=0, size=2),
        config=SimpleNamespace(
            callbacks=SimpleNamespace(tensorboard=str(folder), summaries=None),
            checkpoints=SimpleNamespace(resume=resume),
        ),
        updates=steps.start - 1,
        losses=[],
        loader=SimpleNamespace(last_samples=[1]),
        last_loss=torch.ones(()),
        optimizer=torch.optim.SGD([parameter], lr=0.1),
        gradient_norm=None,
    )
    curves = TensorBoard()
    curves.begins(run)
    for step in steps:
        run.updates = step
        curves.after_step(run)
        if step % _EPOCH == 0:
            curves.epoch_ends(run, SimpleNamespace())  # type: ignore[arg-type]
    curves._writer.flush()


@pytest.mark.parametrize(
    "runs",
    [
        [(1, 24), (17, 37)],
        # At the end of an epoch, whose figures are known; twice from one checkpoint; from none.
        [(1, 16), (13, 30), (13, 37)],
        [(1, 7), (1, 12), (1, 37)],
        [(1, 12), (12, 37)],
    ],
)
def test_each_step_of_a_resumed_run_is_there_once(
    runs: Sequence[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_LOSS_EVERY", 2)
    monkeypatch.setattr(tensorboard, "figures_of", lambda _: {"epoch/loss": 1.0})
    for number, (first, end) in enumerate(runs):
        _train(tmp_path, range(first, end), resume=number > 0)
    read: Any = accumulators.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    read.Reload()
    steps = {tag: [each.step for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert steps["train/loss"] == list(range(1, 37, 2))
    assert steps["epoch/loss"] == [12, 24, 36]
    assert len(set(steps["ranks/number"])) == len(steps["ranks/number"])

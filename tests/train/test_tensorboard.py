"""Curves for TensorBoard, of runs that were killed and resumed."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlio.errors import UsageError
from dlio.train.callbacks import tensorboard
from dlio.train.callbacks.event_file import EventFile
from dlio.train.callbacks.tensorboard import TensorBoard
from tests.conftest import FullDisk

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
_EPOCH = 12


def _train(folder: Path, steps: range, *, resume: bool) -> None:
    """Make steps as a run that ends after the last one, in the middle of an epoch."""
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
    with TensorBoard() as curves:
        curves.begins(run)
        for step in steps:
            run.updates = step
            curves.after_step(run)
            if step % _EPOCH == 0:
                curves.epoch_ends(run, SimpleNamespace())  # type: ignore[arg-type]


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


@pytest.mark.parametrize("count", [0, 60, 400])
def test_a_full_disk_is_one_error_that_names_the_folder(
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_disk: FullDisk,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tensorboard, "figures_of", lambda _: {"epoch/loss": 1.0})
    with full_disk(count), pytest.raises(UsageError) as raised:
        _train(tmp_path / "curves", range(1, 60), resume=False)
    assert f"--tensorboard {tmp_path / 'curves'} cannot be written: File too" in str(raised.value)
    assert capfd.readouterr().err == ""  # No thread tells of the same in its own words.


def test_events_are_those_of_the_library_s_own_writer(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with (
        SummaryWriter(str(tmp_path / "a"), purge_step=2) as theirs,
        EventFile(str(tmp_path / "b"), purge=2) as ours,
    ):
        for file in (theirs, ours):
            file.add_scalar("curve", 0.1, 3)
            file.add_text("notes", "a rank is lost", 3)
            file.add_histogram("weights", values, 4)
            file.flush()
    read = [_events(tmp_path / name) for name in "ab"]
    assert read[0] == read[1]
    assert len(read[0]) == 6


def _events(folder: Path) -> list[str]:
    """Return the events of a folder's only file, without their times and their writer's name."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = folder.iterdir()
    events = list(EventFileLoader(str(path)).Load())
    for event in events:
        event.ClearField("wall_time")
        event.ClearField("source_metadata")
    return [str(event) for event in events]

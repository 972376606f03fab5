"""`--mixup` and `--cutmix`: images and classes of a run, mixed by the loader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.config import train_config
from dlio.train.rank_layout import RankLayout
from dlio.train.tasks.classification import Classes
from dlio.train.trainer import train
from dlio.train.training_data import RunData

CLASSES = 4


def batches(folder: Path, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of the batches of an epoch."""
    config = train_config(str(folder / "train"), image_size=32, batch_size=16, **options)
    sources = RunData(config, RankLayout(SingleCommunicator()))
    with (
        sources.open(config.data.source, "none", True) as data,
        sources.loader(data, True) as loader,
    ):
        return [(images.clone(), labels.clone()) for images, labels in loader]


def test_mixup_blends_each_image_with_the_one_before_it(pictures: Path) -> None:
    plain, mixed = batches(pictures), batches(pictures, mixup=0.4, workers=3)
    shares = []
    for (images, labels), (made, targets) in zip(plain, mixed, strict=True):
        assert (targets.shape, targets.dtype) == ((len(labels), CLASSES), torch.float32)
        assert torch.allclose(targets.sum(1), torch.ones(len(labels)))
        before, others = images.roll(1, 0), labels.roll(1)
        for k in (labels != others).nonzero()[:, 0].tolist():
            share = targets[k, labels[k]]
            assert targets[k, others[k]] == pytest.approx(1 - float(share), abs=1e-6)
            wanted = share * images[k].float() + (1 - share) * before[k].float()
            assert torch.allclose(made[k], wanted, atol=1e-3)
            shares.append(float(share))
    assert len(set(shares)) > 40  # Each image draws its own.
    again = batches(pictures, mixup=0.4, workers=1)
    assert all(
        torch.equal(a, b)
        for one, two in zip(mixed, again, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    other = batches(pictures, mixup=0.4, seed=1)
    assert not torch.equal(other[0][0], mixed[0][0])


def test_cutmix_pastes_a_part_as_large_as_its_class(pictures: Path) -> None:
    plain, mixed = batches(pictures), batches(pictures, cutmix=1.0)
    parts = 0
    for (images, labels), (made, targets) in zip(plain, mixed, strict=True):
        before, others = images.roll(1, 0), labels.roll(1)
        for k in (labels != others).nonzero()[:, 0].tolist():
            own = (made[k] == images[k]).all(0)
            pasted = (made[k] == before[k]).all(0)
            assert (own | pasted).all()
            area = float((~own).sum()) / own.numel()
            assert area <= float(targets[k, others[k]]) + 1e-6  # Alike pixels count as its own.
            parts += 0 < area < 1
    assert parts > 20


def test_soft_classes_weigh_losses_and_answers() -> None:
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0))
    first, second, share = torch.arange(6) % 4, torch.arange(6) % 3 + 1, 0.3
    one_hot = torch.nn.functional.one_hot
    soft = share * one_hot(first, CLASSES) + (1 - share) * one_hot(second, CLASSES)
    task = Classes(CLASSES)
    expected = share * cross_entropy(logits, first, reduction="none")
    expected += (1 - share) * cross_entropy(logits, second, reduction="none")
    assert torch.allclose(task.losses(logits, soft), expected)
    best = logits.argmax(1)
    assert torch.allclose(task.correct(logits, soft), soft[torch.arange(6), best])


def test_a_run_does_not_depend_on_the_number_of_threads(pictures: Path, tmp_path: Path) -> None:
    states = []
    for workers in (1, 3):
        file = str(tmp_path / f"{workers}.pt")
        report = train(
            train_config(
                str(pictures / "train"),
                val=str(pictures / "val"),
                epochs=1,
                image_size=32,
                model="lenet",
                mixup=0.2,
                cutmix=1.0,
                workers=workers,
                save=file,
            )
        )
        assert report.epochs[0].samples == 101
        assert np.isfinite(report.epochs[0].loss or np.nan)
        states.append(torch.load(file, weights_only=True))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"mixup": 0.2, "skip_samples": True, "epochs": 4},
            "--mixup does not go with --skip",
            marks=pytest.mark.needs("skipping"),
        ),
        ({"cutmix": 1.0, "fault_tolerance": "shrink"}, "--cutmix does not go with --fault"),
        ({"mixup": 0.2, "replay": "t.jsonl"}, "--mixup does not go with --replay"),
        ({"mixup": 0.0}, "--mixup"),
    ],
)
def test_options_that_mixtures_cannot_have_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_config(source="data", **options)


@pytest.mark.parametrize("task", ["regress", "autoencode"])
def test_tasks_without_classes_refuse_mixtures(pictures: Path, task: str) -> None:
    with pytest.raises(UsageError, match="--mixup mixes images with classes"):
        train(train_config(str(pictures / "train"), task=task, mixup=0.2, image_size=32))

"""Checkpoints of dlio 0.1.0's development (commit 7595db9) are resumed as that commit did.

`old_checkpoints.tar.xz` has a table, a checkpoint of a run on it with each feature, and the weights
with which that commit has ended the resumed run.
"""

import tarfile
from pathlib import Path

import pytest
import torch

from dlio.train.config import train_config
from dlio.train.trainer import train

_FILE = Path(__file__).with_name("old_checkpoints.tar.xz")
_FEATURES: dict[str, dict[str, object]] = {"ema": {"ema": 0.9}, "skip": {"skip_samples": True}}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ema", marks=pytest.mark.needs("ema")),
        pytest.param("skip", marks=pytest.mark.needs("skipping")),
    ],
)
def test_an_old_checkpoint_is_resumed(name: str, tmp_path: Path) -> None:
    with tarfile.open(_FILE) as file:
        file.extractall(tmp_path, filter="data")
    config = train_config(
        tmp_path / "rows.csv",
        batch_size=8,
        epochs=4,
        model="mlp(width=8)",
        tiers="none",
        optimizer="adam",
        checkpoint=tmp_path / name,
        resume=True,
        save=tmp_path / "weights.pt",
        **_FEATURES[name],
    )
    report = train(config)
    assert report.resumed is not None
    assert len(report.epochs) == 4
    old, new = (torch.load(tmp_path / file) for file in (f"{name}.pt", "weights.pt"))
    assert old.keys() == new.keys()
    for key in old:
        # Equal bits on one machine; processors round matrix products differently.
        torch.testing.assert_close(new[key], old[key], rtol=1e-4, atol=1e-6)

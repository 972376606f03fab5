"""Checkpoints that another user may have made: numbers in them are claims."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.errors import DlioError
from dlio.features.export import trained_model
from dlio.train.checkpoint.checkpoint_store import StoredCheckpoint


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ("resnet(width=1000000)", 64, "if you trust it"),
        ("resnet(width=0xfffff)", 64, "if you trust it"),
        ("resnet(width=1_000_000)", 64, "if you trust it"),
        ("resnet", 1_000_000, "if you trust it"),
        ("resnet", -1, "if you trust it"),
        ("resnet(width=16384)", 64, "claims to hold"),
    ],
)
def test_a_checkpoint_does_not_choose_the_memory_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, size: int, said: str
) -> None:
    about = {"model": model, "image_size": size}
    stored = StoredCheckpoint(str(tmp_path / "step-00000001"), 1, about, frozenset())
    whole: Any = {"model/fc.weight": torch.zeros(2, 3)}
    monkeypatch.setattr(trained_model, "open_checkpoint", lambda path: stored)
    monkeypatch.setattr(StoredCheckpoint, "whole", lambda self: self)
    monkeypatch.setattr(trained_model, "_mean_weights", lambda checkpoint: whole)
    Path(stored.path).mkdir()
    with pytest.raises(DlioError, match=said):
        trained_model.load_trained(stored.path, None, 2, None)

"""Layers that are trained one after another (`--layerwise`)."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dlio.errors import UsageError
from dlio.features.layerwise.layer_training import LayerwiseHooks
from dlio.features.layerwise.layerwise_feature import LayerwiseOptions
from dlio.train.config import train_config
from dlio.train.networks.autoencoder import autoencoder

Dlio = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.mpi
def test_layers_are_trained_in_turn_and_fine_tuned(
    dlio: Dlio, pictures: Path, tmp_path: Path
) -> None:
    shape = ("--image-size", "32", "--model", "autoencoder(width=8,depth=2)", "--batch-size", "8")
    done = dlio(
        *("train", str(pictures / "train"), "--val", str(pictures / "val"), *shape, "-n", "2"),
        *("--task", "autoencode", "--layerwise", "3", "--epochs", "8", "--optimizer", "adam"),
        *("--report", "r.json", "--save", "ae.pt", "--checkpoint", "ckpt"),
    )
    assert done.returncode == 0, done.stderr
    epochs = json.loads((tmp_path / "r.json").read_text())["epochs"]
    assert [epoch["layer"] for epoch in epochs] == [1, 1, 1, 2, 2, 2, None, None]
    losses: list[float] = [epoch["metrics"]["loss"] for epoch in epochs]
    assert losses[2] < losses[0]
    assert losses[5] < losses[3]
    assert epochs[-1]["metrics"]["image_loss"] == losses[-1]
    assert epochs[-1]["consensus_distance"] == 0
    fine = dlio(
        *("train", str(pictures / "train"), *shape, "--weights", "ae.pt", "--epochs", "1"),
    )
    assert fine.returncode == 0, fine.stderr
    assert "12 of 14 tensors of the model come from ae.pt" in fine.stdout
    wrong = dlio("train", str(pictures / "train"), *shape[:2], "--weights", "ae.pt")
    assert wrong.returncode == 2
    assert "none of its tensors" in wrong.stderr


def _hooks(model: nn.Module, epochs: int) -> LayerwiseHooks:
    config = train_config("x", task="autoencode", layerwise=2, epochs=epochs)
    run: Any = SimpleNamespace(config=config, model=model)
    return LayerwiseHooks(LayerwiseOptions(layerwise=2), run)


def test_each_layer_has_a_schedule_of_its_own() -> None:
    hooks = _hooks(autoencoder(1, 32, reconstructs=True, width=4, depth=2), 7)
    spans = [hooks.span(epoch) for epoch in range(7)]
    assert spans == [range(2)] * 2 + [range(2, 4)] * 2 + [range(4, 7)] * 3


def test_a_model_without_such_layers_or_too_few_epochs_are_refused() -> None:
    with pytest.raises(UsageError, match="a model with `depth` and `choose_layer`"):
        _hooks(nn.Linear(1, 1), 7)
    with pytest.raises(UsageError, match="give 2 layers --epochs 4 or more"):
        _hooks(autoencoder(1, 32, reconstructs=True, width=4, depth=2), 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layerwise": 2}, "needs --task autoencode"),
        ({"layerwise": 2, "task": "autoencode", "exchange": "gossip"}, "--exchange gossip"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_config("pictures", **options)

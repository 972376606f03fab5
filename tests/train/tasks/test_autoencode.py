"""Stacked autoencoders: layers that are trained one by one, and what remains as it is meanwhile."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.errors import UsageError
from dlio.train.networks.autoencoder import Autoencoder, EncoderClassifier, autoencoder

Dlio = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("size", [32, 50, 65])
def test_a_reconstruction_has_the_size_of_the_image(size: int) -> None:
    model = autoencoder(1, size, reconstructs=True, width=4, depth=2)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 3, size, size)
    with pytest.raises(UsageError, match="give 1 to 3"):
        autoencoder(1, 32, depth=4)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_chosen_layer_learns_alone(layer: int) -> None:
    torch.manual_seed(0)
    model = autoencoder(1, 32, reconstructs=True, width=4, depth=3).train()
    assert isinstance(model, Autoencoder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.choose_layer(layer)
    made, of = model(torch.randn(8, 3, 32, 32))
    assert made.shape == of.shape
    (made - of).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    mine = (f"encoder.{layer - 1}.", f"decoders.{layer - 1}.")
    assert changed
    assert all(name.startswith(mine) for name in changed)
    model.train()
    model.choose_layer(None)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_dense_layer_trains_on_one_sample_by_running_statistics() -> None:
    model = autoencoder(5, 32, width=8, dense=True)
    model(torch.randn(16, 3, 32, 32))  # Running statistics differ from the initial ones.
    state = {name: value.clone() for name, value in model.state_dict().items()}
    image = torch.randn(1, 3, 32, 32)
    logits = model.train()(image)
    assert torch.allclose(logits, model.eval()(image))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_classifier_has_the_encoders_names() -> None:
    encoder = autoencoder(5, 32, reconstructs=True).state_dict()
    classifier = autoencoder(5, 32)
    assert isinstance(classifier, EncoderClassifier)
    shared = [name for name in classifier.state_dict() if name in encoder]
    assert set(classifier.state_dict()) - set(shared) == {"head.weight", "head.bias"}


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


_BOTH = pytest.mark.needs("ema", "pruning")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layerwise": 2}, "needs --task autoencode"),
        ({"layerwise": 2, "task": "autoencode", "exchange": "gossip"}, "--exchange gossip"),
        pytest.param(
            {"ema": 0.9, "prune": "apoptosis"},
            "--prune apoptosis",
            marks=pytest.mark.needs("ema", "pruning"),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    from dlio.train.config import train_config

    with pytest.raises(UsageError, match=said):
        train_config("pictures", **options)

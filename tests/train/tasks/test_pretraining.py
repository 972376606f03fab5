"""Greedy layer-wise pre-training without labels, and fine-tuning with few of them."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import pytest
import torch
from torch import nn

from dlio.train.networks.autoencoder import Autoencoder, autoencoder

_SIDE: Final = 8
_CLASSES: Final = 6
_LABELLED: Final = 6
"""Samples of each class that have labels."""
_DEPTH: Final = 4
_SHAPE: Final[dict[str, Any]] = {"dense": True, "depth": _DEPTH, "width": 64, "noise": 0.3}
_RATES: Final = (0.01, 0.03)


def _samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noisy images (count, 3, 8, 8) of a curved surface with 4 dimensions, whose clusters are
    the classes; the noise has as much variance as the surface."""
    shape, draw = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(_CLASSES, 4, generator=shape)
    first = torch.randn(4, 32, generator=shape)
    second = torch.randn(32, 3 * _SIDE**2, generator=shape)
    labels = torch.arange(count) % _CLASSES
    places = centres[labels] + 0.5 * torch.randn(count, 4, generator=draw)
    images = (places @ first).relu() @ second
    images = (images - images.mean()) / images.std()
    images += torch.randn(images.shape, generator=draw)
    return images.view(count, 3, _SIDE, _SIDE), labels


@torch.no_grad()
def _layer_loss(model: Autoencoder, layer: int, images: torch.Tensor) -> float:
    model.eval()
    model.choose_layer(layer)
    made, of, _ = model(images)
    return float((made - of).square().mean())


@cache
def _pretrained(seed: int) -> tuple[Autoencoder, list[tuple[float, float]]]:
    """Return an autoencoder trained layer by layer, and each layer's held-out loss before and after
    its training."""
    torch.manual_seed(seed)
    model = autoencoder(1, _SIDE, reconstructs=True, **_SHAPE)
    assert isinstance(model, Autoencoder)
    images, held_out = _samples(2000, 1000 + seed)[0], _samples(500, 5000 + seed)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for layer in range(1, _DEPTH + 1):
        before = _layer_loss(model, layer, held_out)
        model.train()
        model.choose_layer(layer)
        for _ in range(6):
            for batch in torch.split(images[torch.randperm(len(images))], 64):
                made, of = model(batch)
                optimizer.zero_grad()
                torch.autograd.backward((made - of).square().mean())
                optimizer.step()
        losses.append((before, _layer_loss(model, layer, held_out)))
    return model, losses


def _accuracy(seed: int, rate: float, encoder: nn.Module | None) -> float:
    """Train a classifier, from an encoder or from scratch, and return its held-out accuracy."""
    torch.manual_seed(seed)
    model = autoencoder(_CLASSES, _SIDE, **_SHAPE)
    if encoder is not None:
        model.get_submodule("encoder").load_state_dict(encoder.state_dict())
    images, labels = _samples(_LABELLED * _CLASSES, 7 + seed)
    optimizer = torch.optim.SGD(
        model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    for _ in range(60):
        for chosen in torch.split(torch.randperm(len(images)), 12):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            torch.autograd.backward(loss)
            optimizer.step()
    held_out, right = _samples(1200, 9000)
    with torch.no_grad():
        return float((model(held_out).argmax(1) == right).float().mean())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rounding, and so a sample or two of the accuracy, depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.daily("1")
def test_the_loss_of_each_layer_falls_while_it_is_trained(seed: int) -> None:
    for before, after in _pretrained(seed)[1]:
        assert after < 0.8 * before


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.daily("1")
def test_with_few_labels_fine_tuning_is_better_than_training_from_scratch(seed: int) -> None:
    encoder = _pretrained(seed)[0].encoder
    scratch = max(_accuracy(seed, rate, None) for rate in _RATES)
    tuned = max(_accuracy(seed, rate, encoder) for rate in _RATES)
    assert tuned > scratch + 0.02

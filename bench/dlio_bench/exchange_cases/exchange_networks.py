"""Networks to train, and a batch for them."""

from typing import Final

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.networks.resnet import SmallResNet, resnet50

CLASSES: Final = 40
IMAGE_SIZE: Final = 64


def perceptron() -> nn.Sequential:
    """A million parameters in a few buckets, which cost next to nothing to compute."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, CLASSES))


def make(name: str, seed: int = 0) -> nn.Module:
    """`resnet50` (25.6 million parameters), `small` (the trainer's, 1.2 million), `perceptron` (1.1
    million). Raises UsageError for another name."""
    torch.manual_seed(seed)
    if name == "resnet50":
        return resnet50()
    if name == "small":
        return SmallResNet(CLASSES, IMAGE_SIZE)
    if name == "perceptron":
        return perceptron()
    raise UsageError(f"network {name}: choose resnet50, small or perceptron")


def batch(name: str, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, 64, 64), or vectors (count, 512), and labels (count,)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (512,) if name == "perceptron" else (3, IMAGE_SIZE, IMAGE_SIZE)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.randn(count, *shape, generator=generator), labels

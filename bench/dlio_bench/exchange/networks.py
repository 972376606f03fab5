"""Networks to train, and a batch for them."""

from typing import Final

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.model import SmallResNet

__all__ = ["CLASSES", "IMAGE_SIZE", "Bottleneck", "batch", "make", "perceptron", "resnet50"]

CLASSES: Final = 40
IMAGE_SIZE: Final = 64


class Bottleneck(nn.Module):
    """Three convolutions and a way around them (He et al., 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, inputs, h, w) -> (n, 4 width, h / stride, w / stride)
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """He et al.'s network of 25.6 million parameters; arXiv 1512.03385, table 1."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            stride = 2 if number == 0 and width > 64 else 1
            layers.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


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

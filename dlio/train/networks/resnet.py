"""Residual networks (He et al., arXiv 1512.03385): a small one for trials, and ResNet-50."""

import itertools

import torch
from torch import nn


def _normed(
    inputs: int, outputs: int, size: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., arXiv 1512.03385).

    Input (n, inputs, h, w), output (n, outputs, ceil(h / stride), ceil(w / stride)).
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _normed(inputs, outputs, 3, stride)
        self.conv2, self.norm2 = _normed(outputs, outputs, 3)
        # Each block starts as its shortcut, which allows a high learning rate from the start
        # (Goyal et al., arXiv 1706.02677).
        nn.init.zeros_(self.norm2.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                # ceil_mode: the convolutions round odd sizes up.
                nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity(),
                *_normed(inputs, outputs, 1),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, inputs, h, w) -> (n, outputs, h / stride, w / stride)
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network: a stem that reduces the image to 56 pixels at most, three residual stages
    and a linear classifier.

    1.2 million parameters at the default width; 45 million multiply-adds for an image of 64 x 64
    pixels, 146 million for one of 224 x 224. Input: float32 (n, 3, image_size, image_size),
    normalised; output: logits (n, classes).
    """

    def __init__(self, classes: int, image_size: int, width: int = 32) -> None:
        super().__init__()
        stem: list[nn.Module] = [*_normed(3, width, 3, 2), nn.ReLU()]
        side = image_size // 2
        while side > 56:
            stem.append(nn.MaxPool2d(3, 2, 1))
            side = (side + 1) // 2
        self.stem = nn.Sequential(*stem)
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(ResidualBlock(inputs, outputs, 2) for inputs, outputs in itertools.pairwise(widths))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, image_size, image_size), normalised -> logits (n, classes)
        features = self.stages(self.stem(x))
        logits: torch.Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class Bottleneck(nn.Module):
    """Three convolutions and a way around them (He et al., 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(*_normed(inputs, width, 1), nn.ReLU()),
            *(*_normed(width, width, 3, stride), nn.ReLU()),
            *_normed(width, outputs, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, inputs, h, w) -> (n, 4 width, h / stride, w / stride)
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """He et al.'s network of 25.6 million parameters; arXiv 1512.03385, table 1."""
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            stride = 2 if number == 0 and width > 64 else 1
            layers.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))

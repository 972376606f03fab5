"""LeNet-5, AlexNet and GoogLeNet."""

import torch
from torch import nn


def lenet(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """LeNet-5 for images (n, channels, 32, 32): 61,706 parameters with 10 classes and 1 channel.

    LeCun et al., "Gradient-based learning applied to document recognition" (1998), figure 2; with
    complete connections in C3, and a linear output, as is usual today.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )


def alexnet(classes: int = 1000) -> nn.Sequential:
    """AlexNet in one column for images (n, 3, s, s), s >= 63: 61,100,840 parameters.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997.
    Images of other sizes than 224 are pooled to the same number of features.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 11, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
    ]
    for inputs, outputs in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers,
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 36, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )


class Inception(nn.Module):
    """Four parallel paths, concatenated (Szegedy et al., arXiv 1409.4842, figure 2b); `widths` are
    the channels of #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5 and pool proj of table 1."""

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = widths
        self.outputs = one + three + five + pooled
        self.paths = nn.ModuleList(
            [
                _conv(inputs, one, 1),
                nn.Sequential(_conv(inputs, three_in, 1), _conv(three_in, three, 3)),
                nn.Sequential(_conv(inputs, five_in, 1), _conv(five_in, five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, inputs, h, w) -> (n, outputs, h, w)
        return torch.cat([path(x) for path in self.paths], dim=1)


_MODULES = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Inception modules of table 1; None is a max pooling of stride 2."""


def googlenet(classes: int = 1000) -> nn.Sequential:
    """GoogLeNet for images (n, 3, s, s), s >= 32: 6,998,552 parameters.

    Szegedy et al., arXiv 1409.4842, table 1, without the two auxiliary classifiers.
    """
    layers: list[nn.Module] = [
        _conv(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        _conv(64, 64, 1),
        _conv(64, 192, 3),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 192
    for widths in _MODULES:
        if widths is None:
            layers.append(nn.MaxPool2d(3, 2, 1))
        else:
            module = Inception(channels, widths)
            layers.append(module)
            channels = module.outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.ReLU())

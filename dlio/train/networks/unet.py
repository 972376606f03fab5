"""A small U-Net, which gives each pixel a class (Ronneberger et al., arXiv 1505.04597)."""

import torch
from torch import nn
from torch.nn.functional import interpolate

__all__ = ["UNet"]


class _Block(nn.Sequential):
    """Two 3x3 convolutions, each with batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """An encoder that halves the image `depth` times, and a decoder that gets its features.

    Input: float32 (n, 3, h, w), normalised; output: logits (n, classes, h, w). 0.5 million
    parameters at the default width and depth.

    Args:
        width: channels of the first stage; each further one has twice as many.
    """

    def __init__(self, classes: int, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width << k for k in range(depth + 1)]
        self.down = nn.ModuleList(
            _Block(inputs, outputs)
            for inputs, outputs in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.up = nn.ModuleList(
            _Block(widths[k] + widths[k + 1], widths[k]) for k in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, h, w), normalised -> logits (n, classes, h, w)
        features = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else self.pool(x))
            features.append(x)
        features.pop()
        for block in self.up:
            beside = features.pop()
            wide = interpolate(x, size=beside.shape[2:], mode="nearest")
            x = block(torch.cat([beside, wide], 1))
        logits: torch.Tensor = self.head(x)
        return logits

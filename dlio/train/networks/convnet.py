"""Networks of arrays of one to three dimensions: one with dense layers, and a small U-Net."""

from typing import Final

import torch
from torch import nn
from torch.nn.functional import interpolate

from dlio.errors import UsageError

_MOST_DIMENSIONS: Final = 3


def _of_dimensions(kind: str, dimensions: int, *args: object, **options: object) -> nn.Module:
    """Make torch's layer of a kind for 1 to 3 dimensions. Raises UsageError for others."""
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise UsageError(f"--model: dimensions={dimensions}: give 1 to {_MOST_DIMENSIONS}")
    layer: type[nn.Module] = getattr(nn, f"{kind}{dimensions}d")
    return layer(*args, **options)


class ConvNet(nn.Sequential):
    """Convolutions that halve the sides `depth` times, their mean over space, and dense layers.

    The form of CosmoFlow's network (Mathuriya et al., arXiv 1808.04728), with batch normalisation,
    and the mean in place of a dense layer over all places, so that sides of any size fit. Input:
    float32 (n, channels, ...), of 1 to 3 dimensions with sides of 2**depth or more; output: (n,
    classes). The first convolution has `width` channels, each further one twice as many.
    """

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        dimensions: int = 2,
        width: int = 16,
        depth: int = 3,
    ) -> None:
        layers: list[nn.Module] = []
        before = channels
        for number in range(depth):
            after = width << number
            layers += [
                _of_dimensions("Conv", dimensions, before, after, 3, padding=1, bias=False),
                _of_dimensions("BatchNorm", dimensions, after),
                nn.ReLU(),
                _of_dimensions("MaxPool", dimensions, 2),
            ]
            before = after
        layers += [_of_dimensions("AdaptiveAvgPool", dimensions, 1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(before, 64), nn.ReLU(), nn.Linear(64, classes))


class _Block(nn.Sequential):
    """Two convolutions of side 3, each with batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, dimensions: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                _of_dimensions("Conv", dimensions, channels, outputs, 3, 1, 1, bias=False),
                _of_dimensions("BatchNorm", dimensions, outputs),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """An encoder that halves the sides `depth` times, and a decoder that gets its features.

    It gives each pixel or voxel a class (Ronneberger et al., arXiv 1505.04597). Input: float32 (n,
    channels, ...), normalised, of 1 to 3 dimensions; output: logits (n, classes, ...). The first
    stage has `width` channels, each further one twice as many: 0.5 million parameters by default in
    two dimensions.
    """

    def __init__(
        self,
        classes: int,
        width: int = 16,
        depth: int = 3,
        channels: int = 3,
        dimensions: int = 2,
    ) -> None:
        super().__init__()
        widths = [width << k for k in range(depth + 1)]
        self.down = nn.ModuleList(
            _Block(inputs, outputs, dimensions)
            for inputs, outputs in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.pool = _of_dimensions("MaxPool", dimensions, 2, ceil_mode=True)
        self.up = nn.ModuleList(
            _Block(widths[k] + widths[k + 1], widths[k], dimensions) for k in reversed(range(depth))
        )
        self.head = _of_dimensions("Conv", dimensions, width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, channels, ...), normalised -> logits (n, classes, ...)
        features = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else self.pool(x))
            features.append(x)
        features.pop()
        for block in self.up:
            beside = features.pop()
            wide = interpolate(x, scale_factor=2, mode="nearest")
            if wide.shape[2:] != beside.shape[2:]:  # Halves of odd sides were rounded up.
                wide = wide[(slice(None), slice(None), *map(slice, beside.shape[2:]))]
            x = block(torch.cat([beside, wide], 1))
        logits: torch.Tensor = self.head(x)
        return logits

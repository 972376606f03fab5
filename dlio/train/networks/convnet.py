"""Networks of arrays of one to three dimensions: one with dense layers, and a small U-Net."""

from typing import Final

import torch
from torch import nn
from torch.nn.functional import interpolate

from dlio.errors import UsageError

_CONVOLUTIONS: Final[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS: Final[tuple[type[nn.Module], ...]] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MAX_POOLS: Final[tuple[type[nn.Module], ...]] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEANS: Final[tuple[type[nn.Module], ...]] = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)


def _of_dimensions(
    kinds: tuple[type[nn.Module], ...], dimensions: int, *args: object, **options: object
) -> nn.Module:
    """Make the layer of a kind for arrays of 1 to 3 dimensions. Raises UsageError for others."""
    if not 1 <= dimensions <= len(kinds):
        raise UsageError(f"--model: dimensions={dimensions}: give 1 to {len(kinds)}")
    return kinds[dimensions - 1](*args, **options)


class ConvNet(nn.Sequential):
    """Convolutions that halve the sides `depth` times, their mean over space, and dense layers.

    The form of CosmoFlow's network (Mathuriya et al., arXiv 1808.04728), with batch normalisation,
    and the mean in place of a dense layer over all places, so that sides of any size fit. Input:
    float32 (n, channels, ...), sides of 2**depth or more; output: (n, classes).

    Args:
        dimensions: of space, 1 to 3.
        width: channels of the first convolution; each further one has twice as many.
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
                _of_dimensions(_CONVOLUTIONS, dimensions, before, after, 3, padding=1, bias=False),
                _of_dimensions(_BATCH_NORMS, dimensions, after),
                nn.ReLU(),
                _of_dimensions(_MAX_POOLS, dimensions, 2),
            ]
            before = after
        layers += [_of_dimensions(_MEANS, dimensions, 1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(before, 64), nn.ReLU(), nn.Linear(64, classes))


class _Block(nn.Sequential):
    """Two convolutions of side 3, each with batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, dimensions: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                _of_dimensions(_CONVOLUTIONS, dimensions, channels, outputs, 3, 1, 1, bias=False),
                _of_dimensions(_BATCH_NORMS, dimensions, outputs),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """An encoder that halves the sides `depth` times, and a decoder that gets its features.

    It gives each pixel or voxel a class (Ronneberger et al., arXiv 1505.04597). Input: float32
    (n, channels, ...), normalised; output: logits (n, classes, ...). 0.5 million parameters at the
    default width and depth in two dimensions.

    Args:
        width: channels of the first stage; each further one has twice as many.
        dimensions: of space, 1 to 3.
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
        self.pool = _of_dimensions(_MAX_POOLS, dimensions, 2, ceil_mode=True)
        self.up = nn.ModuleList(
            _Block(widths[k] + widths[k + 1], widths[k], dimensions) for k in reversed(range(depth))
        )
        self.head = _of_dimensions(_CONVOLUTIONS, dimensions, width, classes, 1)

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

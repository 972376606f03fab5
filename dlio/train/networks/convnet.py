"""Convolutions and pooling of arrays of one to three dimensions, then dense layers."""

from typing import Final

from torch import nn

from dlio.errors import UsageError

CONVOLUTIONS: Final[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS: Final[tuple[type[nn.Module], ...]] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MAX_POOLS: Final[tuple[type[nn.Module], ...]] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEANS: Final[tuple[type[nn.Module], ...]] = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)


def of_dimensions(
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
                of_dimensions(CONVOLUTIONS, dimensions, before, after, 3, padding=1, bias=False),
                of_dimensions(BATCH_NORMS, dimensions, after),
                nn.ReLU(),
                of_dimensions(MAX_POOLS, dimensions, 2),
            ]
            before = after
        layers += [of_dimensions(_MEANS, dimensions, 1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(before, 64), nn.ReLU(), nn.Linear(64, classes))

"""A small U-Net, which gives each pixel or voxel a class (Ronneberger et al., arXiv 1505.04597)."""

import torch
from torch import nn
from torch.nn.functional import interpolate

from dlio.train.networks.convnet import BATCH_NORMS, CONVOLUTIONS, MAX_POOLS, of_dimensions


class _Block(nn.Sequential):
    """Two convolutions of side 3, each with batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, dimensions: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                of_dimensions(CONVOLUTIONS, dimensions, channels, outputs, 3, 1, 1, bias=False),
                of_dimensions(BATCH_NORMS, dimensions, outputs),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """An encoder that halves the sides `depth` times, and a decoder that gets its features.

    Input: float32 (n, channels, ...), normalised; output: logits (n, classes, ...). 0.5 million
    parameters at the default width and depth in two dimensions.

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
        self.pool = of_dimensions(MAX_POOLS, dimensions, 2, ceil_mode=True)
        self.up = nn.ModuleList(
            _Block(widths[k] + widths[k + 1], widths[k], dimensions) for k in reversed(range(depth))
        )
        self.head = of_dimensions(CONVOLUTIONS, dimensions, width, classes, 1)

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

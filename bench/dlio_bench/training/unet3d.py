"""A U-Net for volumes."""

from collections import OrderedDict

import torch
from torch import nn


class UNet3d(nn.Module):
    """The 3-D U-Net: 19,069,955 parameters.

    Çiçek et al., arXiv 1606.06650, figure 2. Convolutions are padded, so that volumes need no
    margin: input (n, 3, d, h, w), multiples of 8; output logits (n, classes, d, h, w). Batch
    normalisation has no parameters and the up-convolutions no biases, as in the paper's count.
    """

    def __init__(self, inputs: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_double(inputs, 32, 64), _double(64, 64, 128), _double(128, 128, 256)]
        )
        self.bottom = _double(256, 256, 512)
        self.wider = nn.ModuleList(
            [nn.ConvTranspose3d(n, n, 2, 2, bias=False) for n in (512, 256, 128)]
        )
        self.up = nn.ModuleList(
            [_double(768, 256, 256), _double(384, 128, 128), _double(192, 64, 64)]
        )
        self.head = nn.Conv3d(64, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, inputs, d, h, w) -> logits (n, classes, d, h, w)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = nn.functional.max_pool3d(x, 2)
        x = self.bottom(x)
        for wider, block in zip(self.wider, self.up, strict=True):
            x = block(torch.cat([kept.pop(), wider(x)], dim=1))
        logits: torch.Tensor = self.head(x)
        return logits


def _double(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (n, m) in enumerate(((inputs, middle), (middle, outputs)), 1):
        layers[f"conv{number}"] = nn.Conv3d(n, m, 3, padding=1)
        layers[f"norm{number}"] = nn.BatchNorm3d(m, affine=False)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)

"""A vision transformer of the size Tiny."""

from typing import Final

import torch
from torch import nn

HEADS: Final = 3
"""Heads of attention of each layer."""


class VisionTransformer(nn.Module):
    """ViT-Ti/16 for images (n, 3, side, side): 5,717,416 parameters at 224 pixels, 1,000 classes.

    Dosovitskiy et al., arXiv 2010.11929; of width 192, with 12 layers and 3 heads, as in Touvron et
    al., arXiv 2012.12877, table 1. Sides are multiples of 16.
    """

    def __init__(
        self, side: int = 224, classes: int = 1000, *, width: int = 192, depth: int = 12
    ) -> None:
        super().__init__()
        patches = (side // 16) ** 2
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, side, side) -> logits (n, classes)
        words = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), words], dim=1) + self.places
        logits: torch.Tensor = self.head(self.layers(tokens)[:, 0])
        return logits

"""Networks of volumes, and a transformer, for checks of meshes."""

import torch
from torch import nn


def block(inputs: int, outputs: int, norm: type[nn.Module]) -> nn.Sequential:
    normal = nn.GroupNorm(2, outputs) if norm is nn.GroupNorm else norm(outputs)
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1, bias=False), normal, nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    """A 3-D U-Net of two levels, with both ways to go up."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm3d) -> None:
        super().__init__()
        self.down1 = block(1, 4, norm)
        self.down2 = block(4, 8, norm)
        self.bottom = block(8, 8, norm)
        self.pool = nn.MaxPool3d(2)
        self.up2 = nn.Upsample(scale_factor=2, mode="trilinear")
        self.join2 = block(16, 4, norm)
        self.up1 = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.join1 = block(8, 4, norm)
        self.out = nn.Conv3d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 1, depth, height, width) -> (n, 3, depth, height, width)
        first = self.down1(x)
        second = self.down2(self.pool(first))
        third = self.bottom(self.pool(second))
        out = self.join2(torch.cat([self.up2(third), second], dim=1))
        out = self.join1(torch.cat([self.up1(out), first], 1))
        logits: torch.Tensor = self.out(out)
        return logits


class CosmoFlow(nn.Module):
    """Convolutions and pooling of a volume, then dense layers, as CosmoFlow (arXiv 1808.04728)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding="same"),
            nn.LeakyReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(4, 8, 3, stride=2, padding=1),
            nn.LeakyReLU(),
            nn.AvgPool3d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(8 * (side // 8) ** 3, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 2, side, side, side) -> (n, 4)
        parameters: torch.Tensor = self.head(self.body(x))
        return parameters


class Pictures(nn.Module):
    """A classifier of pictures with global pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=2, padding=2),
            nn.InstanceNorm2d(8, affine=True),
            nn.SiLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, height, width) -> (n, 5)
        logits: torch.Tensor = self.head(self.body(x).flatten(1))
        return logits


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.side = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, tokens, width); a rank has some of the heads.
        n, tokens, _ = x.shape
        heads = [
            layer(x).view(n, tokens, -1, self.side).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(n, tokens, -1))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A transformer over rows of numbers, with a class for each sequence."""

    def __init__(self, inputs: int, width: int = 16, heads: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.blocks = [Layer(width, heads) for _ in range(2)]
        self.layers = nn.ModuleList(self.blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, tokens, inputs) -> (n, classes)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits

"""Networks by name, and random batches for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from dlio.train.networks.classic_networks import alexnet, googlenet, lenet
from dlio.train.networks.resnet import resnet50
from dlio.train.networks.transformer import VisionTransformer

_WORDS: Final = 10_000


@dataclass(frozen=True, slots=True)
class BenchNetwork:
    """A network, and the form of its samples."""

    make: Callable[[int], nn.Module]
    """Make it, for images or volumes of a number of pixels per side."""
    side: int
    """Pixels per side of its samples in the benchmark; of text, words."""
    batch_size: int
    """Default number of samples of a rank in one batch."""
    channels: int = 3
    classes: int = 1000
    kind: str = "images"
    """`images`, `words` or `volumes`."""
    resizable: bool = True


NETWORKS: Final[dict[str, BenchNetwork]] = {
    "lenet": BenchNetwork(lambda _: lenet(), 32, 256, 1, 10, resizable=False),
    "alexnet": BenchNetwork(lambda _: alexnet(), 64, 16),
    "googlenet": BenchNetwork(lambda _: googlenet(), 64, 8),
    "resnet50": BenchNetwork(lambda _: resnet50(), 64, 8),
    "vit": BenchNetwork(VisionTransformer, 64, 16),
    "lstm": BenchNetwork(lambda _: LanguageModel(), 35, 8, 0, _WORDS, "words", resizable=False),
    "unet3d": BenchNetwork(lambda _: UNet3d(), 16, 2, 3, 3, "volumes"),
}
"""Networks by the names that --networks accepts."""


def make_network(name: str, side: int, seed: int = 0) -> nn.Module:
    """Make a network of NETWORKS with weights of a seed, for samples of `side` pixels per side.

    Dropout is off, so that steps of equal batches are equal work.
    """
    torch.manual_seed(seed)
    model = NETWORKS[name].make(side)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def make_batch(
    name: str, count: int, side: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random samples and labels of a network.

    Images (count, channels, side, side) and labels (count,); words (count, side) and the next words
    (count, side); volumes (count, channels, side, side, side) and labels (count, side, side, side).
    """
    network = NETWORKS[name]
    generator = torch.Generator().manual_seed(seed)
    if network.kind == "words":
        words = torch.randint(0, network.classes, (count, side + 1), generator=generator)
        return words[:, :-1], words[:, 1:]
    axes = (side,) * (3 if network.kind == "volumes" else 2)
    samples = torch.randn(count, network.channels, *axes, generator=generator)
    shape = (count, *axes) if network.kind == "volumes" else (count,)
    return samples, torch.randint(0, network.classes, shape, generator=generator)


# A language model of two LSTM layers


class LanguageModel(nn.Module):
    """The medium model for Penn Treebank: 19,780,400 parameters.

    Zaremba et al., "Recurrent neural network regularization", arXiv 1409.2329, section 4.1: two
    layers of 650 units, a vocabulary of 10,000 words, sequences of 35. torch's LSTM has two biases
    a layer, the paper's one: 2 * 4 * 650 parameters more.

    Input: words, int64 (n, steps). Output: logits of each next word (n, classes, steps).
    """

    def __init__(self) -> None:
        super().__init__()
        width = 650
        self.embedding = nn.Embedding(_WORDS, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, _WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, steps) -> (n, words, steps)
        states, _ = self.layers(self.embedding(x))
        logits: torch.Tensor = self.head(states).transpose(1, 2)
        return logits


# A U-Net for volumes


class UNet3d(nn.Module):
    """The 3-D U-Net: 19,069,955 parameters.

    Çiçek et al., arXiv 1606.06650, figure 2. Convolutions are padded, so that volumes need no
    margin: input (n, 3, d, h, w), multiples of 8; output logits (n, 3, d, h, w). Batch
    normalisation has no parameters and the up-convolutions no biases, as in the paper's count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_double(3, 32, 64), _double(64, 64, 128), _double(128, 128, 256)]
        )
        self.bottom = _double(256, 256, 512)
        self.wider = nn.ModuleList(
            [nn.ConvTranspose3d(n, n, 2, 2, bias=False) for n in (512, 256, 128)]
        )
        self.up = nn.ModuleList(
            [_double(768, 256, 256), _double(384, 128, 128), _double(192, 64, 64)]
        )
        self.head = nn.Conv3d(64, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, d, h, w) -> logits (n, 3, d, h, w)
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
    layers: list[nn.Module] = []
    for n, m in ((inputs, middle), (middle, outputs)):
        layers += [nn.Conv3d(n, m, 3, padding=1), nn.BatchNorm3d(m, affine=False), nn.ReLU()]
    return nn.Sequential(*layers)

"""Networks by name, and random batches for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from dlio.train.networks.classic_networks import alexnet, googlenet, lenet
from dlio.train.networks.resnet import resnet50
from dlio.train.networks.transformer import VisionTransformer
from dlio_bench.training.language_model import LanguageModel
from dlio_bench.training.unet3d import UNet3d

_WORDS: Final = 10_000


@dataclass(frozen=True, slots=True)
class BenchNetwork:
    """A network, and the form of its samples."""

    make: Callable[[int], nn.Module]
    """Make it, for images or volumes of a number of pixels per side."""
    side: int
    """Pixels per side of its samples in the benchmark; of text, words."""
    paper_side: int
    """Pixels per side in its paper, for which `parameters` counts."""
    parameters: int
    batch_size: int
    """Default number of samples of a rank in one batch."""
    channels: int = 3
    classes: int = 1000
    kind: str = "images"
    """`images`, `words` or `volumes`."""
    resizable: bool = True


NETWORKS: Final[dict[str, BenchNetwork]] = {
    "lenet": BenchNetwork(lambda _: lenet(), 32, 32, 61_706, 256, 1, 10, resizable=False),
    "alexnet": BenchNetwork(lambda _: alexnet(), 64, 224, 61_100_840, 16),
    "googlenet": BenchNetwork(lambda _: googlenet(), 64, 224, 6_998_552, 8),
    "resnet50": BenchNetwork(lambda _: resnet50(), 64, 224, 25_557_032, 8),
    "vit": BenchNetwork(VisionTransformer, 64, 224, 5_717_416, 16),
    "lstm": BenchNetwork(
        lambda _: LanguageModel(), 35, 35, 19_780_400, 8, 0, _WORDS, "words", resizable=False
    ),
    "unet3d": BenchNetwork(lambda _: UNet3d(), 16, 128, 19_069_955, 2, 3, 3, "volumes"),
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

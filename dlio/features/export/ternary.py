"""Ternary weights: -1, 0 and 1 times one positive scale per output channel, as TrueNorth has them.

Li and Liu, Ternary Weight Networks, arXiv 1605.04711; training with them follows Esser et al.,
Convolutional networks for fast, energy-efficient neuromorphic computing, arXiv 1603.08270.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from dlio.features.export.check_pictures import LabelledPictures
from dlio.features.export.layer_graph import LayerGraph

_BATCH: Final = 64
_LEARNING_RATE: Final = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Ternary:
    """Weights of a layer: `signs` times `scale` of their output."""

    signs: torch.Tensor
    """float32 of -1, 0 and 1, in the shape of the weights."""
    scale: torch.Tensor
    """float32 (outputs,), positive."""

    @property
    def weight(self) -> torch.Tensor:
        """The weights as a tensor of numbers."""
        return self.signs * self.scale.view(-1, *[1] * (self.signs.ndim - 1))


@torch.no_grad()
def ternarise(weight: torch.Tensor) -> Ternary:
    """Return the nearest ternary weights, by the squared error of each output channel.

    The k largest magnitudes of a channel keep their sign and get their mean as scale. The best k
    maximises (sum of the k largest)^2 / k; arXiv 1605.04711 approximates it by a threshold of 0.7
    of the mean magnitude. A channel of zeros gets scale 1.
    Weights have shape (outputs, ...).
    """
    flat = weight.abs().flatten(1)
    sorted_, _ = flat.sort(1, descending=True)
    sums = sorted_.cumsum(1)
    counts = torch.arange(1, flat.shape[1] + 1, dtype=sums.dtype)
    best = (sums.square() / counts).argmax(1, keepdim=True)
    scale = sums.gather(1, best) / counts[best]
    signs = weight.sign().flatten(1) * (flat >= sorted_.gather(1, best))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return Ternary(signs.view_as(weight), scale.flatten())


def ternary_network(network: LayerGraph) -> tuple[LayerGraph, dict[str, Ternary]]:
    """Return a network with ternary weights, and these by the names of their layers."""
    rounded = {
        layer.name: ternarise(layer.weight) for layer in network.learned if layer.weight is not None
    }
    changed = {
        name: replace(network.layers[name], weight=each.weight) for name, each in rounded.items()
    }
    return network.with_layers(changed), rounded


def tune_ternary(
    network: LayerGraph, pictures: LabelledPictures, epochs: int, say: Callable[[str], None]
) -> LayerGraph:
    """Return the network with weights that lose less when they are rounded by `ternarise`.

    Trains full-precision weights whose rounded values are used in both passes (the straight-through
    estimator), on labels and on the original network's answers, with Adam and a cosine schedule.
    Batch normalisations are already folded, so that biases learn in their place. `say` shows a line
    of progress.
    """
    layers = network.learned
    weights = [
        layer.weight.clone().requires_grad_() for layer in layers if layer.weight is not None
    ]
    biases = [layer.bias.clone().requires_grad_() for layer in layers if layer.bias is not None]
    optimizer = torch.optim.Adam([*weights, *biases], _LEARNING_RATE)
    steps = epochs * -(-len(pictures) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def changed(weights: Iterable[torch.Tensor], biases: Iterable[torch.Tensor]) -> LayerGraph:
        rows = zip(layers, weights, biases, strict=True)
        return network.with_layers({a.name: replace(a, weight=w, bias=b) for a, w, b in rows})

    generator = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        total = 0.0
        order = torch.randperm(len(pictures), generator=generator)
        for chosen in torch.split(order, _BATCH):
            pixels = pictures.images[chosen].float() / 255
            if torch.rand((), generator=generator) < 0.5:
                pixels = pixels.flip(3)
            with torch.no_grad():
                answers = network.logits(pixels).softmax(1)
            logits = changed(map(_rounded, weights), biases).logits(pixels)
            loss = functional.cross_entropy(logits, answers)
            loss = loss + functional.cross_entropy(logits, pictures.labels[chosen])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_([*weights, *biases], 1.0)
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        say(f"ternary weights, epoch {epoch + 1} of {epochs}: loss {total / len(pictures):.3f}")
    return changed([each.detach() for each in weights], [each.detach() for each in biases])


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """Ternary weights whose gradient is that of the weights themselves."""
    return weight + (ternarise(weight).weight - weight).detach()

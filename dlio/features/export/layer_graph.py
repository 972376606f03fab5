"""A network as a graph of the few layers that spiking hardware has, traced from a torch module.

Batch normalisations are folded into the convolution or linear layer before them, and residual sums
become layers with several inputs, as nodes of NIR have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import torch
from torch import nn
from torch.nn import functional

from dlio.errors import UsageError

Kind = Literal["input", "conv", "linear", "relu", "pool", "flatten", "output"]
Weights = Mapping[str, torch.Tensor]
"""Weights by the name of their layer, to use in place of the network's own."""
INPUT: Final = "input"
OUTPUT: Final = "output"


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayer:
    """One layer. Its input is the sum of the outputs of `inputs`."""

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of its output, without the batch."""
    weight: torch.Tensor | None = None
    """conv (outputs, inputs, side, side), linear (outputs, inputs)."""
    bias: torch.Tensor | None = None
    """(outputs,), of conv and linear."""
    kernel: tuple[int, int] = (1, 1)
    """Height and width that an average pooling covers."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    is_learned: bool = True
    """False for the normalisation of pixels, which no rounding may touch."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer to a batch.

        Args:
            weight: in place of the layer's own.
        """
        weight = self.weight if weight is None else weight
        match self.kind:
            case "conv":
                assert weight is not None
                return functional.conv2d(
                    x, weight, self.bias, self.stride, self.padding, self.dilation
                )
            case "linear":
                assert weight is not None
                return functional.linear(x, weight, self.bias)
            case "relu":
                return torch.relu(x)
            case "pool":
                return functional.avg_pool2d(x, self.kernel, self.stride, self.padding)
            case "flatten":
                return x.flatten(1)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class LayerGraph:
    """Layers in an order in which they can be computed, `input` first and `output` last."""

    layers: Mapping[str, GraphLayer] = field(default_factory=dict)

    def __call__(
        self, pixels: torch.Tensor, weights: Weights | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs of all layers, by name.

        Args:
            pixels: float32 (n, 3, height, width), 0 to 1.
        """
        values: dict[str, torch.Tensor] = {INPUT: pixels}
        for name, layer in self.layers.items():
            if layer.kind != "input":
                total = values[layer.inputs[0]]
                for other in layer.inputs[1:]:
                    total = total + values[other]
                values[name] = layer(total, (weights or {}).get(name))
        return values

    def logits(self, pixels: torch.Tensor, weights: Weights | None = None) -> torch.Tensor:
        """Return the outputs of the last layer, float32 (n, classes)."""
        return self(pixels, weights)[OUTPUT]

    @property
    def learned(self) -> list[GraphLayer]:
        """Layers whose weights were learned."""
        return [
            each for each in self.layers.values() if each.weight is not None and each.is_learned
        ]

    def with_layers(self, changed: Mapping[str, GraphLayer]) -> "LayerGraph":
        """Return the network with some layers replaced, by name."""
        return LayerGraph({name: changed.get(name, layer) for name, layer in self.layers.items()})

    def users(self, name: str) -> list[GraphLayer]:
        """Layers that read the output of a layer."""
        return [each for each in self.layers.values() if name in each.inputs]


@torch.no_grad()
def fold_norm(layer: GraphLayer, norm: nn.modules.batchnorm._BatchNorm) -> GraphLayer:
    """Return a convolution or linear layer that does a batch normalisation behind it, too.

    Raises UsageError if the normalisation has no running statistics.
    """
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or layer.weight is None or layer.bias is None:
        raise UsageError(f"{layer.name}: its batch normalisation has no running statistics")
    scale = (variance.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    bias = (layer.bias.double() - mean.double()) * scale
    if norm.bias is not None:
        bias = bias + norm.bias.double()
    weight = layer.weight.double() * scale.view(-1, *[1] * (layer.weight.ndim - 1))
    return replace(layer, weight=weight.float(), bias=bias.float())

"""Run a NIR graph for some time steps with nirtorch, the interpreter of NIR's authors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dlio.errors import UsageError
from dlio.features.export.check_pictures import batches
from dlio.features.export.nir_graph import import_nir
from dlio.util.extras import how_to_install

if TYPE_CHECKING:
    import nir

_BATCH: Final = 50


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """Results of a simulation."""

    logits: dict[int, torch.Tensor]
    """Mean output current (n, classes) over the first so many steps, by this number."""
    spikes: float
    """Mean spikes of a picture, over all neurons and steps."""
    neurons: int


@torch.no_grad()
def simulate(
    graph: "nir.NIRGraph", images: torch.Tensor, steps: Sequence[int], reset: str = "subtract"
) -> SimulationResult:
    """Show pictures to a graph as constant currents, pixels of 0 to 1.

    A step is the unit of time: a neuron's potential grows by its input in each step. When it is
    above the threshold, the neuron spikes.

    Args:
        images: uint8 (n, channels, height, width).
        steps: numbers of steps to read the output after, ascending.
        reset: `subtract` the threshold from the potential after a spike, which loses nothing
            (Rueckauer et al. 2017), or set it to `zero` (Diehl et al. 2015).

    Raises UsageError if nirtorch is not installed.
    """
    module = _module(graph)
    for each in module.modules():
        if isinstance(each, _IntegrateAndFire):
            each.is_subtracting = reset == "subtract"
    neurons = [each for each in module.modules() if isinstance(each, _IntegrateAndFire)]
    logits: dict[int, list[torch.Tensor]] = {count: [] for count in steps}
    for batch in batches(images, _BATCH):
        pixels = batch.float() / 255
        state: Any = None
        total = torch.zeros(())
        for step in range(1, steps[-1] + 1):
            current, state = module(pixels, state)
            total = total + current
            if step in logits:
                logits[step].append(total / step)
    return SimulationResult(
        {count: torch.cat(parts) for count, parts in logits.items()},
        sum(each.spikes for each in neurons) / max(1, len(images)),
        sum(each.threshold.numel() for each in neurons),
    )


class _IntegrateAndFire(nn.Module):
    """Neurons that integrate their input; `state` holds their potentials."""

    def __init__(self, node: "nir.IF") -> None:
        super().__init__()
        self.resistance, self.threshold = _tensor(node.r), _tensor(node.v_threshold)
        self.is_subtracting = True
        self.spikes = 0.0
        """Spikes so far, over all pictures."""

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        potential = x * self.resistance
        if state is not None:
            potential = potential + state
        spikes = (potential > self.threshold).float()
        self.spikes += float(spikes.sum())
        if self.is_subtracting:
            return spikes, potential - spikes * self.threshold
        return spikes, potential * (1 - spikes)


class _Convolution(nn.Module):
    def __init__(self, node: "nir.Conv2d") -> None:
        super().__init__()
        self.weight, self.bias = _tensor(node.weight), _tensor(node.bias)
        self.stride, self.padding = _pair(node.stride), _pair(node.padding)
        self.dilation = _pair(node.dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation
        )


class _Affine(nn.Module):
    def __init__(self, node: "nir.Affine") -> None:
        super().__init__()
        self.weight, self.bias = _tensor(node.weight), _tensor(node.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class _Scale(nn.Module):
    def __init__(self, node: "nir.Scale") -> None:
        super().__init__()
        self.scale = _tensor(node.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _module(graph: "nir.NIRGraph") -> nn.Module:
    nir = import_nir()
    try:
        import nirtorch
    except ImportError as error:
        raise UsageError(
            f"NIR graphs are simulated by nirtorch: {error}; {how_to_install('export')}"
        ) from error

    # All nodes that dlio writes: nirtorch's own map lacks IF and Scale, and forgets an Affine's
    # bias.
    made: nn.Module = nirtorch.nir_to_torch(
        graph,
        {
            nir.IF: _IntegrateAndFire,
            nir.Conv2d: _Convolution,
            nir.Affine: _Affine,
            nir.Scale: _Scale,
            nir.AvgPool2d: _pool,
            nir.Flatten: lambda _: nn.Flatten(1),
        },
    )
    return made


def _pool(node: "nir.AvgPool2d") -> nn.AvgPool2d:
    return nn.AvgPool2d(_pair(node.kernel_size), _pair(node.stride), _pair(node.padding))


def _pair(value: Any) -> tuple[int, int]:
    first, second = np.broadcast_to(np.asarray(value, np.int64), 2).tolist()
    return first, second


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))

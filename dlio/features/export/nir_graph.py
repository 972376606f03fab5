"""Convert a network of ReLUs into a NIR graph of integrate-and-fire neurons, and simulate it.

A neuron's spikes per time step stand for its activation, divided by the scale of its layer. The
scale is a high percentile of the layer's activations on training data, so that hardly any neuron
would have to spike more often than once a step (Diehl et al., IJCNN 2015; Rueckauer et al.,
Frontiers in Neuroscience 11:682, 2017). Scales are moved into weights and biases, all thresholds
are 1. Pixels enter and logits leave as currents, constant over time and averaged over time.

A simulation runs the graph with nirtorch, the interpreter of NIR's authors.

Format: Pedersen et al., Neuromorphic intermediate representation, Nature Communications 15, 2024.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.features.export.check_pictures import LabelledPictures
from dlio.features.export.layer_graph import GraphLayer, LayerGraph, pair_of
from dlio.features.export.ternary import Ternary
from dlio.util.extras import how_to_install

if TYPE_CHECKING:
    import nir


# Conversion
_BATCH: Final = 32
_DRAWN: Final = 1 << 15
"""Activations of each layer that are drawn from each batch."""


def import_nir() -> ModuleType:
    """Return the module `nir`. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module("nir")
    except ImportError as error:
        raise UsageError(f"NIR graphs need nir: {error}; {how_to_install('export')}") from error


@torch.no_grad()
def activation_scales(
    network: LayerGraph, pictures: LabelledPictures, percentile: float
) -> dict[str, float]:
    """Return the activation of each ReLU that becomes a rate of one spike in each step.

    It is a percentile, above 0 and at most 100, of the activations on training pictures.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, list[torch.Tensor]] = {}
    for images in torch.split(pictures.images, _BATCH):
        for name, values in network(images.float() / 255).items():
            if name in network.layers and network.layers[name].kind == "relu":
                flat = values.flatten()
                if len(flat) > _DRAWN:
                    flat = flat[torch.randint(len(flat), (_DRAWN,), generator=generator)]
                drawn.setdefault(name, []).append(flat)
    scales = {}
    for name, parts in drawn.items():
        scale = float(np.percentile(torch.cat(parts).numpy(), percentile))
        # A layer that never answers keeps its units.
        scales[name] = scale if scale > 0 else 1.0
    return scales


def spiking_graph(
    network: LayerGraph, scales: Mapping[str, float], ternary: Mapping[str, Ternary]
) -> "nir.NIRGraph":
    """Return the NIR graph of a network, with the scales of `activation_scales`.

    Nodes have the names of the network's layers. Ternary weights, given by layer, stay -1, 0 and 1
    in their node, and a Scale node `<layer>_scale` follows.

    Raises UsageError if nir is not installed.
    """
    return _GraphBuilder(network, scales, ternary).graph()


class _GraphBuilder:
    """Builds a graph. A node's output times `_units` of its layer is the layer's output."""

    def __init__(
        self, network: LayerGraph, scales: Mapping[str, float], ternary: Mapping[str, Ternary]
    ) -> None:
        self._nir = import_nir()
        self._network, self._scales, self._ternary = network, scales, ternary
        self._nodes: dict[str, nir.NIRNode] = {}
        self._edges: list[tuple[str, str]] = []
        self._ends: dict[str, str] = {}
        """Name of the node that gives the output of each layer."""
        self._units: dict[str, float] = {}

    def graph(self) -> "nir.NIRGraph":
        for layer in self._network.layers.values():
            self._layer(layer)
        return self._nir.NIRGraph(nodes=self._nodes, edges=self._edges)

    def _layer(self, layer: GraphLayer) -> None:
        nir, name = self._nir, layer.name
        units = self._units_of_inputs(layer)
        self._ends[name], self._units[name] = name, units
        match layer.kind:
            case "input":
                self._nodes[name] = nir.Input({"input": np.array(layer.shape)})
            case "output":
                self._nodes[name] = nir.Output({"output": np.array(layer.shape)})
            case "relu":
                ones = np.ones(layer.shape, np.float32)
                self._nodes[name] = nir.IF(
                    r=ones, v_threshold=ones.copy(), v_reset=np.zeros_like(ones)
                )
            case "pool":
                self._nodes[name] = nir.AvgPool2d(
                    kernel_size=np.array(layer.kernel),
                    stride=np.array(layer.stride),
                    padding=np.array(layer.padding),
                )
            case "flatten":
                before = self._network.layers[layer.inputs[0]].shape
                # NIR counts dimensions without the batch.
                self._nodes[name] = nir.Flatten(
                    {"input": np.array(before)}, start_dim=0, end_dim=-1
                )
            case "conv" | "linear":
                self._units[name] = self._units_of_output(layer)
                self._weights(layer, units, self._units[name])
        for source in layer.inputs:
            self._connect(source, name, units)

    def _weights(self, layer: GraphLayer, before: float, after: float) -> None:
        """Add the nodes of a convolution or linear layer with these units of input and output."""
        assert layer.weight is not None
        assert layer.bias is not None
        ternary = self._ternary.get(layer.name)
        if ternary is None:
            weight, bias = layer.weight * (before / after), layer.bias / after
        else:
            weight, bias = ternary.signs, layer.bias / (ternary.scale * before)
            scale = ternary.scale * (before / after)
            shaped = scale.view(-1, *[1] * (len(layer.shape) - 1)).expand(layer.shape)
            end = self._ends[layer.name] = self._new_name(f"{layer.name}_scale")
            self._nodes[end] = self._nir.Scale(scale=_array(shaped))
            self._edges.append((layer.name, end))
        if layer.kind == "linear":
            self._nodes[layer.name] = self._nir.Affine(weight=_array(weight), bias=_array(bias))
            return
        height, width = self._network.layers[layer.inputs[0]].shape[1:]
        self._nodes[layer.name] = self._nir.Conv2d(
            input_shape=(height, width),
            weight=_array(weight),
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=1,
            bias=_array(bias),
        )

    def _new_name(self, wanted: str) -> str:
        while wanted in self._nodes or wanted in self._network.layers:
            wanted += "_"
        return wanted

    def _units_of_inputs(self, layer: GraphLayer) -> float:
        """Units in which a layer takes its input, and in which it gives its output unless it has
        weights."""
        if layer.kind == "relu":
            return self._scales[layer.name]
        if layer.kind in ("input", "output"):
            return 1.0
        return self._units[layer.inputs[0]]

    def _units_of_output(self, layer: GraphLayer) -> float:
        """Units of a layer with weights: those of the neurons that it feeds, if they agree."""
        users = self._network.users(layer.name)
        wanted = {self._scales[each.name] if each.kind == "relu" else 1.0 for each in users}
        return wanted.pop() if len(wanted) == 1 else 1.0

    def _connect(self, source: str, name: str, units: float) -> None:
        """Add an edge, through a Scale node where a layer takes its input in other units."""
        end = self._ends[source]
        if self._units[source] != units:
            through = self._new_name(f"{source}_to_{name}")
            shape = self._network.layers[source].shape
            self._nodes[through] = self._nir.Scale(
                scale=np.full(shape, self._units[source] / units, np.float32)
            )
            self._edges.append((end, through))
            end = through
        self._edges.append((end, name))


def _array(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return tensor.detach().contiguous().numpy().astype(np.float32)


# Simulation
_SIMULATED: Final = 50
"""Pictures in a batch of a simulation."""


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
    above the threshold, the neuron spikes; `reset` then subtracts the threshold from the potential,
    which loses nothing (Rueckauer et al. 2017), or sets it to zero (Diehl et al. 2015). Images are
    uint8 (n, channels, height, width). The output is read after each number of `steps`, ascending.

    Raises UsageError if nirtorch is not installed.
    """
    module = _module(graph)
    for each in module.modules():
        if isinstance(each, _IntegrateAndFire):
            each.is_subtracting = reset == "subtract"
    neurons = [each for each in module.modules() if isinstance(each, _IntegrateAndFire)]
    logits: dict[int, list[torch.Tensor]] = {count: [] for count in steps}
    for batch in torch.split(images, _SIMULATED):
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


def _convolution(node: "nir.Conv2d") -> nn.Module:
    outputs, inputs, *kernel = node.weight.shape
    stride, padding, dilation = map(pair_of, (node.stride, node.padding, node.dilation))
    return _filled(nn.Conv2d(inputs, outputs, pair_of(kernel), stride, padding, dilation), node)


def _filled(layer: nn.Module, node: "nir.Conv2d | nir.Affine") -> nn.Module:
    layer.load_state_dict({"weight": _tensor(node.weight), "bias": _tensor(node.bias)})
    return layer


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
            nir.Conv2d: _convolution,
            nir.Affine: lambda node: _filled(nn.Linear(*reversed(node.weight.shape)), node),
            nir.Scale: _Scale,
            nir.AvgPool2d: _pool,
            nir.Flatten: lambda _: nn.Flatten(1),
        },
    )
    return made


def _pool(node: "nir.AvgPool2d") -> nn.AvgPool2d:
    return nn.AvgPool2d(pair_of(node.kernel_size), pair_of(node.stride), pair_of(node.padding))


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))

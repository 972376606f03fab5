"""A network as a graph of the few layers that spiking hardware has, traced from a torch module.

Batch normalisations are folded into the convolution or linear layer before them, and residual sums
become layers with several inputs, as nodes of NIR have. Layers that spiking hardware lacks are
refused.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from dlio.errors import UsageError
from dlio.train.model import PIXEL_MEAN, PIXEL_STD
from dlio.util.printable import first_line
from dlio.util.units import counted

# Graphs
Kind = Literal["input", "conv", "linear", "relu", "pool", "flatten", "output"]
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to a batch."""
        match self.kind:
            case "conv":
                assert self.weight is not None
                return functional.conv2d(
                    x, self.weight, self.bias, self.stride, self.padding, self.dilation
                )
            case "linear":
                assert self.weight is not None
                return functional.linear(x, self.weight, self.bias)
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

    def __call__(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs of all layers, by name, from pixels of 0 to 1.

        Pixels are float32 (n, 3, height, width).
        """
        values: dict[str, torch.Tensor] = {INPUT: pixels}
        for name, layer in self.layers.items():
            if layer.kind != "input":
                total = values[layer.inputs[0]]
                for other in layer.inputs[1:]:
                    total = total + values[other]
                values[name] = layer(total)
        return values

    def logits(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last layer, float32 (n, classes)."""
        return self(pixels)[OUTPUT]

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
    own, shift = layer.weight.double(), layer.bias.double()
    weight, bias = fuse_conv_bn_weights(
        own, shift, mean.double(), variance.double(), norm.eps, norm.weight, norm.bias
    )
    return replace(layer, weight=weight.detach().float(), bias=bias.detach().float())


# Tracing
_NORMALISE: Final = "normalise"
_REMEDY: Final = (
    "a NIR graph has convolutions, linear layers, ReLU, average pooling, sums and flattening, with "
    "batch normalisation behind a convolution: train a network of these"
)
_REMEDIES: Final[dict[str, str]] = {
    "MaxPool2d": "average pooling or a stride in its place; --model resnet has no max pooling "
    "up to --image-size 112",
    "Tanh": "nn.ReLU in its place",
    "Sigmoid": "nn.ReLU in its place",
    "GELU": "nn.ReLU in its place",
    "SiLU": "nn.ReLU in its place",
}
_RELU: Final[tuple[object, ...]] = (torch.relu, torch.relu_, functional.relu, functional.relu_)
_ADD: Final[tuple[object, ...]] = (torch.add, operator.add, operator.iadd)
_SKIPPED: Final = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)


def trace_network(module: nn.Module, image_size: int) -> LayerGraph:
    """Return the network that a module computes on pixels of 0 to 1, which it normalises first.

    The module, in evaluation mode, maps float32 (n, 3, image_size, image_size), normalised as
    `dlio train` does, to logits (n, classes).

    Raises UsageError, which names the layer, if the network has one that NIR cannot express.
    """
    try:
        graph = fx.symbolic_trace(module)
        ShapeProp(graph).propagate(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:  # Tracing runs the module's own code.
        raise UsageError(
            f"the model cannot be traced by torch.fx: {first_line(error)}; its forward must not "
            "branch on values"
        ) from error
    return _GraphTracer(graph).network(image_size)


class _GraphTracer:
    """Translates the nodes of an fx graph, one after another."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._layers: dict[str, GraphLayer] = {}
        self._sums: dict[fx.Node, tuple[str, ...]] = {}
        """Names of the layers whose sum each fx node is."""

    def network(self, image_size: int) -> LayerGraph:
        shape = (3, image_size, image_size)
        std = torch.tensor(PIXEL_STD)
        self._layers[INPUT] = GraphLayer(INPUT, "input", (), shape)
        # In a layer of its own: a convolution pads with the mean, which is 0 only behind it.
        self._layers[_NORMALISE] = GraphLayer(
            _NORMALISE,
            "conv",
            (INPUT,),
            shape,
            (1 / std).diag().view(3, 3, 1, 1),
            -torch.tensor(PIXEL_MEAN) / std,
            is_learned=False,
        )
        for node in self._graph.graph.nodes:
            match node.op:
                case "placeholder":
                    if self._sums:
                        raise UsageError(f"the model has a second input, {node.name}; {_REMEDY}")
                    self._sums[node] = (_NORMALISE,)
                case "output":
                    (logits,) = node.args
                    if not isinstance(logits, fx.Node):
                        raise UsageError(f"the model has several outputs; {_REMEDY}")
                    size = len(_shape(logits))
                    if size != 1:
                        raise UsageError(
                            f"the model's output has {counted(size, 'dimension')}, not 1"
                        )
                    inputs = self._sums[logits]
                    if len(inputs) > 1:
                        raise _refused(node, "sum as its output", "end it with a linear layer")
                    self._layers[OUTPUT] = GraphLayer(OUTPUT, "output", inputs, _shape(logits))
                case "call_module":
                    self._module(node, self._graph.get_submodule(str(node.target)))
                case "call_function" | "call_method":
                    self._function(node)
                case _:
                    raise _refused(node, f"the tensor {node.target}")
        return LayerGraph(self._layers)

    def _module(self, node: fx.Node, module: nn.Module) -> None:
        kind = type(module).__name__
        if isinstance(module, _SKIPPED):
            self._sums[node] = self._sums[_source(node)]
        elif type(module) is nn.Conv2d:
            self._convolution(node, module)
        elif type(module) is nn.Linear:
            if len(_shape(_source(node))) != 1:
                raise _refused(
                    node, f"{kind} on {counted(len(_shape(_source(node))), 'dimension')}"
                )
            bias = _bias(module.bias, module.out_features)
            self._add(node, "linear", weight=module.weight.detach().clone(), bias=bias)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            self._norm(node, module)
        elif isinstance(module, nn.ReLU):
            self._add(node, "relu")
        elif isinstance(module, nn.AvgPool2d):
            if module.divisor_override is not None:
                raise _refused(node, f"{kind} with divisor_override")
            padding = pair_of(module.padding)
            if any(padding) and not module.count_include_pad:
                raise _refused(node, f"{kind} with count_include_pad=False")
            self._pool(node, pair_of(module.kernel_size), pair_of(module.stride), padding)
        elif isinstance(module, nn.AdaptiveAvgPool2d):
            self._adaptive(node, module.output_size)
        elif isinstance(module, nn.Flatten):
            self._flatten(node, module.start_dim, module.end_dim)
        else:
            raise _refused(node, kind)

    def _convolution(self, node: fx.Node, module: nn.Conv2d) -> None:
        if module.padding_mode != "zeros":
            raise _refused(node, f"Conv2d with padding_mode={module.padding_mode}")
        weight, padding = module.weight.detach(), list(_padding(module))
        # nir takes kernels for square and groups for one when it compares shapes: fill up with 0.
        side = max(weight.shape[2:])
        for dim in (0, 1):
            more, odd = divmod(side - weight.shape[2 + dim], 2)
            if odd:
                raise _refused(node, f"kernel of {tuple(weight.shape[2:])}", "make it square")
            edges = (0, 0, more, more) if dim == 0 else (more, more)
            weight = functional.pad(weight, edges)
            padding[dim] += more * module.dilation[dim]
        self._add(
            node,
            "conv",
            weight=_dense(weight, module.groups),
            bias=_bias(module.bias, module.out_channels),
            stride=pair_of(module.stride),
            padding=(padding[0], padding[1]),
            dilation=pair_of(module.dilation),
        )

    def _function(self, node: fx.Node) -> None:
        target = node.target
        if target in _RELU or target in ("relu", "relu_"):
            self._add(node, "relu")
        elif target in _ADD or target in ("add", "add_"):
            self._sum(node)
        elif target is torch.flatten or target == "flatten":
            start = _argument(node, 1, "start_dim", 0)
            self._flatten(node, start, _argument(node, 2, "end_dim", -1))
        elif target is torch.mean or target == "mean":
            self._mean(node)
        elif target is functional.adaptive_avg_pool2d:
            self._adaptive(node, _argument(node, 1, "output_size", None))
        elif target is functional.avg_pool2d:
            kernel = pair_of(_argument(node, 1, "kernel_size", None))
            if len(node.args) > 4 or set(node.kwargs) - {"kernel_size", "stride", "padding"}:
                raise _refused(node, "avg_pool2d with further arguments")
            stride = _argument(node, 2, "stride", None)
            padding = pair_of(_argument(node, 3, "padding", 0))
            self._pool(node, kernel, kernel if stride is None else pair_of(stride), padding)
        elif target is functional.dropout:
            self._sums[node] = self._sums[_source(node)]
        else:
            raise _refused(node, getattr(target, "__name__", str(target)))

    def _add(self, node: fx.Node, kind: Kind, **more: Any) -> None:
        name = self._named(node.name, kind, self._sums[_source(node)], _shape(node), **more)
        self._sums[node] = (name,)

    def _named(
        self, name: str, kind: Kind, inputs: tuple[str, ...], shape: tuple[int, ...], **more: Any
    ) -> str:
        """Add a layer under a name that no other one has, and return the name."""
        while name in self._layers or name in (INPUT, OUTPUT, _NORMALISE):
            name += "_"
        self._layers[name] = GraphLayer(name, kind, inputs, shape, **more)
        return name

    def _sum(self, node: fx.Node) -> None:
        terms = [each for each in node.args if isinstance(each, fx.Node)]
        if len(terms) != 2 or node.kwargs or _shape(terms[0]) != _shape(terms[1]):
            raise _refused(node, "a sum of other than two outputs of equal shape")
        names = (*self._sums[terms[0]], *self._sums[terms[1]])
        if len(set(names)) < len(names):
            raise _refused(node, "an output added to itself")
        self._sums[node] = names

    def _norm(self, node: fx.Node, norm: nn.modules.batchnorm._BatchNorm) -> None:
        source = _source(node)
        names = self._sums[source]
        layer = self._layers[names[0]]
        is_alone = len(names) == 1 and len(source.users) == 1
        if not is_alone or layer.kind not in ("conv", "linear") or not layer.is_learned:
            raise _refused(node, f"{type(norm).__name__} that no convolution stands before")
        self._layers[layer.name] = fold_norm(layer, norm)
        self._sums[node] = names

    def _pool(
        self,
        node: fx.Node,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> None:
        before, after = _shape(_source(node)), _shape(node)
        for side in (0, 1):
            room = before[1 + side] + 2 * padding[side] - kernel[side]
            if room // stride[side] + 1 != after[1 + side]:
                raise _refused(
                    node,
                    f"average pooling that rounds {before[1 + side]} pixels up (ceil_mode)",
                    "choose an --image-size that halves evenly, such as 64",
                )
        self._add(node, "pool", kernel=kernel, stride=stride, padding=padding)

    def _adaptive(self, node: fx.Node, size: object) -> None:
        if size not in (1, (1, 1), [1, 1]):
            raise _refused(node, f"adaptive pooling to {size}")
        sides = _shape(_source(node))[1:]
        self._add(node, "pool", kernel=sides, stride=sides)

    def _mean(self, node: fx.Node) -> None:
        dims = _argument(node, 1, "dim", None)
        source = _source(node)
        shape = _shape(source)
        if not isinstance(dims, tuple | list) or sorted(d % 4 for d in dims) != [2, 3]:
            raise _refused(node, f"a mean over dimensions {dims}")
        inputs, pooled, sides = self._sums[source], (shape[0], 1, 1), (shape[1], shape[2])
        name = f"{node.name}_pool"
        name = self._named(name, "pool", inputs, pooled, kernel=sides, stride=sides)
        if not _argument(node, 2, "keepdim", False):
            name = self._named(node.name, "flatten", (name,), shape[:1])
        self._sums[node] = (name,)

    def _flatten(self, node: fx.Node, start: object, end: object) -> None:
        if start != 1 or end not in (-1, len(_shape(_source(node)))):
            raise _refused(node, f"flattening of dimensions {start} to {end}")
        if _shape(_source(node)) == _shape(node):
            self._sums[node] = self._sums[_source(node)]
        else:
            self._add(node, "flatten")


def _refused(node: fx.Node, layer: str, remedy: str = "") -> UsageError:
    where = str(node.target) if node.op == "call_module" else node.name
    if not remedy:
        remedy = _REMEDY
        if layer in _REMEDIES:
            remedy = f"train with {_REMEDIES[layer]}"
    return UsageError(f"{where}: NIR graphs of spike rates have no {layer}: {remedy}")


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(source, fx.Node):
        raise _refused(node, "layer without an input")
    return source


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(cast(torch.Size, node.meta["tensor_meta"].shape))[1:]


def _argument(node: fx.Node, place: int, name: str, default: object) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def pair_of(value: int | Sequence[int] | npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return height and width, of two numbers or one for both."""
    first, second = np.broadcast_to(np.asarray(value, np.int64), 2).tolist()
    return first, second


def _padding(module: nn.Conv2d) -> tuple[int, int]:
    if not isinstance(module.padding, str):
        return pair_of(module.padding)
    if module.padding == "valid":
        return 0, 0
    spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if any(span % 2 for span in spans):
        raise UsageError("a convolution with an even kernel and padding='same' pads unevenly")
    return spans[0] // 2, spans[1] // 2


def _dense(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Weights (outputs, inputs, height, width) of a convolution in groups, 0 between groups."""
    parts = weight.chunk(groups)
    inputs = weight.shape[1]
    dense = weight.new_zeros(weight.shape[0], groups * inputs, *weight.shape[2:])
    for group, part in enumerate(parts):
        first = group * len(part)
        dense[first : first + len(part), group * inputs : (group + 1) * inputs] = part
    return dense


def _bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    return torch.zeros(outputs) if bias is None else bias.detach().clone()

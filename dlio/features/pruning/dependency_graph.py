"""Translate torch-pruning's dependency graph into groups of coupled channels.

torch-pruning guesses at operations that it does not know, so `verify` has to confirm each group.
Nothing here changes the given model.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.features.pruning.neuron_groups import (
    Activation,
    GroupMember,
    Indices,
    NeuronGroup,
    Side,
    UnprunableLayer,
    is_depthwise,
    layer_side,
    reads_zeros,
)
from dlio.util.extras import how_to_install

_MOST_PATHS: Final = 1000
_UNKNOWN: Final = (None, None)
_IDENTITY: Final = Activation("identity", 1.0, True)
_OTHER: Final = Activation("other", float("inf"), False)
_KINDS: Final = {
    "relu": Activation("relu", 1.0, True),
    "sigmoid": Activation("sigmoid", 0.25, False),
    "tanh": Activation("tanh", 1.0, False),
    # Upper bounds of the slopes of x Phi(x), its tanh approximation, and x sigmoid(x).
    "gelu": Activation("gelu", 1.13, False),
    "silu": Activation("silu", 1.1, False),
    "softplus": Activation("softplus", 1.0, False),
    "hardtanh": Activation("hardtanh", 1.0, False),
    "logsigmoid": Activation("logsigmoid", 1.0, False),
}
_NEUTRAL: Final = (
    # These move, select or average values within each channel. They have slope 1 at most and
    # commute with positive factors.
    *("view", "unsafeview", "reshape", "transpose", "permute", "squeeze", "unsqueeze"),
    *("tbackward", "clone", "alias", "tocopy", "mean", "maxpool", "avgpool", "adaptiveavgpool"),
    *("cat", "adaptivemaxpool", "mkldnnmaxpool", "mkldnnadaptiveavgpool"),
)


class _UntraceableLayer(Exception):
    """A layer that cannot be pruned; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    """torch-pruning's DependencyGraph."""
    names: dict[nn.Module, str]
    shared: frozenset[str]
    """Names of layers that share a parameter with another layer."""


def candidates(
    model: nn.Module, forward: Callable[[nn.Module], object]
) -> tuple[list[NeuronGroup], list[UnprunableLayer]]:
    """Return the groups in torch-pruning's graph, still to be verified, and the layers left alone.

    All parameters of the model require gradients; `forward` calls it on an example.

    Raises UsageError if torch-pruning is not installed.
    """
    try:
        # Its import and its tracing emit warnings that do not concern users of dlio.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch_pruning import DependencyGraph
    except ImportError as error:
        raise UsageError(
            "pruning finds layers that depend on each other with torch-pruning, which is not "
            f"installed: {how_to_install('prune')}"
        ) from error
    graph = DependencyGraph()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph.build_dependency(
                model, None, forward_fn=lambda model, _: forward(model), verbose=False
            )
    except Exception as error:
        return [], [UnprunableLayer("", f"torch-pruning cannot follow it: {_line(error)}")]
    names = {module: name for name, module in model.named_modules()}
    return _groups(_Graph(graph, names, _shared(model)))


def make_member(
    module: nn.Module,
    name: str,
    side: Side,
    channels: Indices | Sequence[Sequence[int]],
    constant: str = "",
) -> GroupMember | None:
    """Make a member from the channels of each neuron, shape (width, k).

    None if the layer cannot be cut on that side.
    """
    shape = layer_side(module, side)
    if shape is None or any(
        tensor not in module._parameters and tensor not in module._buffers
        for tensor, _ in shape.tensors
    ):
        return None
    dim = dict(shape.tensors).get("weight", 0)
    padded = side == "in" and reads_zeros(module)
    array = np.array(channels, dtype=np.int64)
    return GroupMember(name, side, array, dim, padded, constant)


def _groups(graph: _Graph) -> tuple[list[NeuronGroup], list[UnprunableLayer]]:
    groups: list[NeuronGroup] = []
    left: list[UnprunableLayer] = []
    seen: set[nn.Module] = set()
    roots = [
        module
        for module in graph.names
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and not is_depthwise(module)
    ]
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        producers: set[nn.Module] = {root}
        try:
            if root not in graph.graph.module2node:
                raise _UntraceableLayer("its output has no gradient to follow")
            groups.append(_group(graph, root, producers))
        except _UntraceableLayer as reason:
            left += [UnprunableLayer(graph.names[module], str(reason)) for module in producers]
        seen |= producers
    return groups, left


def _group(graph: _Graph, root: nn.Module, producers: set[nn.Module]) -> NeuronGroup:
    """Return the group that contains the outputs of `root`.

    Adds the layers whose outputs belong to the group to `producers`, also on failure. Raises
    _UntraceableLayer.
    """
    dependency = graph.graph
    pruner = dependency.get_pruner_of_module(root)
    width = pruner.get_out_channels(root)
    try:
        items = dependency.get_pruning_group(root, pruner.prune_out_channels, list(range(width)))
    except Exception as error:
        raise _UntraceableLayer(f"torch-pruning cannot follow it: {_line(error)}") from error
    parts, consumers = _members(graph, items, width, producers)
    if not parts["in"]:
        raise _UntraceableLayer("no layer reads it: it is the model's output")
    if width < 2:
        raise _UntraceableLayer("it has one neuron")
    order = {name: at for at, name in enumerate(graph.names.values())}
    for members in parts.values():
        members.sort(key=lambda member: order[member.module])
    activation, norm = _activation(graph, root, parts, consumers)
    return NeuronGroup(
        name=parts["out"][0].module,
        width=width,
        producers=tuple(parts["out"]),
        through=tuple(parts["through"]),
        consumers=tuple(parts["in"]),
        activation=activation,
        norm=norm,
    )


def _members(
    graph: _Graph, items: Any, width: int, producers: set[nn.Module]
) -> tuple[dict[Side, list[GroupMember]], set[nn.Module]]:
    """Return the members of torch-pruning's group by side, and the consuming layers.

    Adds the producing layers to `producers`, also on failure. Raises _UntraceableLayer.
    """
    dependency = graph.graph
    problems: list[str] = []
    parts: dict[Side, list[GroupMember]] = {"out": [], "through": [], "in": []}
    consumers: set[nn.Module] = set()
    for item in items:
        module = item.dep.target.module
        out = dependency.is_out_channel_pruning_fn(item.dep.handler)
        if module not in graph.names:
            if isinstance(module, nn.Parameter):
                problems.append("a parameter outside the layers has its width")
            elif type(module).__name__ == "_OutputOp":
                problems.append("it is the model's output")
            continue
        if isinstance(module, nn.PReLU) and module.num_parameters == 1:
            continue
        side: Side = "through"
        if isinstance(module, nn.Linear | nn.Embedding) or (
            isinstance(module, nn.modules.conv._ConvNd) and not is_depthwise(module)
        ):
            side = "out" if out else "in"
        if side == "out":
            producers.add(module)
        name = graph.names[module]
        if name in graph.shared:
            problems.append(f"{name} shares a parameter with another layer")
        channels = _per_neuron(item.idxs, item.root_idxs, width)
        constant = _takes_constant(graph, module) if side == "in" else ""
        member = make_member(module, name, side, channels, constant) if channels else None
        if channels is None:
            problems.append(f"the channels of {name} belong to several neurons each")
        elif member is None:
            problems.append(_why_not(name, module))
        else:
            parts[side].append(member)
            if side == "in":
                consumers.add(module)
    if problems:
        raise _UntraceableLayer(problems[0])
    return parts, consumers


def _per_neuron(indices: Any, roots: Any, width: int) -> list[list[int]] | None:
    """Channels of each neuron; None unless each neuron has equally many channels of its own."""
    channels: list[list[int]] = [[] for _ in range(width)]
    for index, root in zip(indices, roots, strict=True):
        if root is None or not 0 <= root < width:
            return None
        channels[root].append(int(index))
    count = len(channels[0])
    if count == 0 or any(len(of) != count for of in channels):
        return None
    return [sorted(of) for of in channels]


def _activation(
    graph: _Graph, root: nn.Module, parts: dict[Side, list[GroupMember]], consumers: set[nn.Module]
) -> tuple[Activation | None, str]:
    """The activation and the batch norm that all paths to the consumers share; else (None, "")."""
    if len(parts["out"]) != 1 or len(parts["through"]) > 1:
        return None, ""
    paths = set(_paths(graph, graph.graph.module2node[root], consumers))
    if len(paths) != 1:
        return None, ""
    path = list(paths.pop())
    norm = ""
    if path and isinstance(path[0], str):
        norm = str(path.pop(0))
    if len(path) > 1 or any(isinstance(step, str) for step in path):
        return None, ""
    if bool(norm) != bool(parts["through"]):
        return None, ""
    return (path[0] if path and isinstance(path[0], Activation) else _IDENTITY), norm


def _paths(
    graph: _Graph, node: Any, consumers: set[nn.Module]
) -> Iterator[tuple[Activation | str | None, ...]]:
    """Activations, and names of norms, on each path to a consumer; `_UNKNOWN` for other layers."""
    stack: list[tuple[Any, tuple[Activation | str | None, ...]]] = [(node, ())]
    for _ in range(_MOST_PATHS):
        if not stack:
            return
        node, path = stack.pop()
        for after in node.outputs:
            module = after.module
            if module in consumers:
                yield path
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                stack.append((after, (*path, graph.names[module])))
            elif module in graph.names:
                yield _UNKNOWN
            else:
                step = None if _is_inside(after, consumers) else _classify(after)
                stack.append((after, path if step is None else (*path, step)))
    yield _UNKNOWN


def _is_inside(node: Any, consumers: set[nn.Module]) -> bool:
    """True for a node that autograd records inside a linear layer on more than two dimensions.

    Such a layer shows up as a matrix product with views around it, or with a view and a sum.
    """
    op = _op(node)
    if "mm" not in op and "view" not in op:
        return False

    def leads_on(after: Any) -> bool:
        next_op = _op(after)
        if isinstance(after.module, nn.Linear) and after.module in consumers:
            return "view" in next_op or ("add" in next_op and "mm" not in next_op)
        return "mm" in op and "view" in next_op and _is_inside(after, consumers)

    return all(map(leads_on, node.outputs))


def _op(node: Any) -> str:
    return str(node.grad_fn.name()).lower() if hasattr(node.grad_fn, "name") else ""


def _takes_constant(graph: _Graph, module: nn.Module) -> str:
    """Name of the tensor that can absorb a constant in a consumer's output; see Member."""
    name = graph.names[module]
    if module._parameters.get("bias") is not None:
        return f"{name}.bias"
    outputs = graph.graph.module2node[module].outputs
    if len(outputs) == 1 and isinstance(outputs[0].module, nn.modules.batchnorm._BatchNorm):
        norm = outputs[0].module
        if norm in graph.names and norm.running_mean is not None:
            return f"{graph.names[norm]}.running_mean"
    return ""


def _shared(model: nn.Module) -> frozenset[str]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return frozenset(name for names in owners.values() if len(names) > 1 for name in names)


def _why_not(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    match module:
        case nn.LayerNorm() | nn.GroupNorm() | nn.RMSNorm():
            return f"{name} ({kind}) normalises over several channels"
        case nn.modules.conv._ConvNd() if module.groups > 1:
            return f"{name} ({kind}) has groups of channels"
        case nn.MultiheadAttention():
            return f"{name} ({kind}) has one width for its input, its heads and its output"
    return f"{name} ({kind}) is not a layer that can be cut here"


def _line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _classify(node: Any) -> Activation | None:
    """Return the activation of an autograd node.

    None for an operation that leaves each channel's values in proportion, such as a reshape or a
    pooling; _OTHER for an unknown operation.
    """
    name = _op(node)
    if name.startswith("leakyrelu"):
        slope = abs(float(getattr(node.grad_fn, "_saved_negative_slope", float("inf"))))
        return Activation("leaky_relu", max(1.0, slope), True)
    for kind, activation in _KINDS.items():
        if name.startswith(kind):
            return activation
    if name.lstrip("_").startswith(_NEUTRAL):
        return None
    return _OTHER

"""Which channels hang together, as torch-pruning's dependency graph sees it.

Its graph is a guess where it meets operations that it does not know, which is why `verify` tries
each group out. Nothing here changes the model that is given.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.pruning.activations import IDENTITY, classify
from dlio.train.pruning.groups import Activation, Group, LeftAlone, Member
from dlio.train.pruning.layers import Side, is_depthwise, reads_zeros, shape_of, tensor_of

_MOST_WAYS: Final = 1000
_UNKNOWN: Final = (None, None)


class _CannotFollow(Exception):
    """With the reason."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    names: dict[nn.Module, str]
    shared: frozenset[str]
    """Layers with a parameter that is another layer's, too."""


def candidates(
    model: nn.Module, forward: Callable[[nn.Module], Any]
) -> tuple[list[Group], list[LeftAlone]]:
    """Groups that torch-pruning finds, each to be tried before it is believed.

    Args:
        model: all its parameters want gradients.
        forward: calls the model on an example.

    Raises UsageError where torch-pruning is not installed.
    """
    try:
        # Its import and its tracing warn about what does not concern a user of ours.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch_pruning import DependencyGraph
    except ImportError as error:
        raise UsageError(
            "pruning finds layers that depend on each other with torch-pruning, which is not "
            "installed: pip install --no-deps torch-pruning"
        ) from error
    graph = DependencyGraph()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph.build_dependency(
                model, None, forward_fn=lambda model, _: forward(model), verbose=False
            )
    except Exception as error:
        return [], [LeftAlone("", f"torch-pruning cannot follow it: {_line(error)}")]
    names = {module: name for name, module in model.named_modules()}
    return _groups(_Graph(graph, names, _shared(model)))


def make_member(
    module: nn.Module, name: str, side: Side, channels: Any, constant: str = ""
) -> Member | None:
    """None for a layer that cannot be cut on that side."""
    shape = shape_of(module, side)
    if shape is None or any(
        tensor not in module._parameters and tensor not in module._buffers
        for tensor, _ in shape.tensors
    ):
        return None
    dim = dict(shape.tensors).get("weight", 0)
    padded = side == "in" and reads_zeros(module)
    array = np.array(channels, dtype=np.int64)
    return Member(name, side, array, dim, padded, constant)


def _groups(graph: _Graph) -> tuple[list[Group], list[LeftAlone]]:
    found: list[Group] = []
    left: list[LeftAlone] = []
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
        made: set[nn.Module] = {root}
        try:
            if root not in graph.graph.module2node:
                raise _CannotFollow("its output has no gradient to follow")
            found.append(_group(graph, root, made))
        except _CannotFollow as reason:
            left += [LeftAlone(graph.names[module], str(reason)) for module in made]
        seen |= made
    return found, left


def _group(graph: _Graph, root: nn.Module, made: set[nn.Module]) -> Group:
    """Raises _CannotFollow. `made` gets the layers whose outputs are the group's."""
    dependency = graph.graph
    pruner = dependency.get_pruner_of_module(root)
    width = pruner.get_out_channels(root)
    try:
        items = dependency.get_pruning_group(root, pruner.prune_out_channels, list(range(width)))
    except Exception as error:
        raise _CannotFollow(f"torch-pruning cannot follow it: {_line(error)}") from error
    problems: list[str] = []
    parts: dict[Side, list[Member]] = {"out": [], "through": [], "in": []}
    readers: set[nn.Module] = set()
    for item in items:
        module = item.dep.target.module
        out = dependency.is_out_channel_pruning_fn(item.dep.handler)
        if module not in graph.names:
            if isinstance(module, nn.Parameter):
                problems.append("a parameter outside of the layers has its width")
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
            made.add(module)
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
                readers.add(module)
    if problems:
        raise _CannotFollow(problems[0])
    if not parts["in"]:
        raise _CannotFollow("no layer reads it: it is the model's output")
    if width < 2:
        raise _CannotFollow("it has one neuron")
    order = {name: at for at, name in enumerate(graph.names.values())}
    for members in parts.values():
        members.sort(key=lambda member: order[member.module])
    activation, norm = _way(graph, root, parts, readers)
    return Group(
        name=parts["out"][0].module,
        width=width,
        producers=tuple(parts["out"]),
        through=tuple(parts["through"]),
        consumers=tuple(parts["in"]),
        activation=activation,
        norm=norm,
    )


def _per_neuron(indices: Any, roots: Any, width: int) -> list[list[int]] | None:
    """Channels of each neuron; None where they are not as many for each, and of one only."""
    channels: list[list[int]] = [[] for _ in range(width)]
    for index, root in zip(indices, roots, strict=True):
        if root is None or not 0 <= root < width:
            return None
        channels[root].append(int(index))
    count = len(channels[0])
    if count == 0 or any(len(of) != count for of in channels):
        return None
    return [sorted(of) for of in channels]


def _way(
    graph: _Graph, root: nn.Module, parts: dict[Side, list[Member]], readers: set[nn.Module]
) -> tuple[Activation | None, str]:
    """The activation and the batch norm on all ways from the producer to its readers."""
    if len(parts["out"]) != 1 or len(parts["through"]) > 1:
        return None, ""
    ways = set(_ways(graph, graph.graph.module2node[root], readers))
    if len(ways) != 1:
        return None, ""
    way = list(ways.pop())
    norm = ""
    if way and isinstance(way[0], str):
        norm = str(way.pop(0))
    if len(way) > 1 or any(isinstance(step, str) for step in way):
        return None, ""
    if bool(norm) != bool(parts["through"]):
        return None, ""
    return (way[0] if way and isinstance(way[0], Activation) else IDENTITY), norm


def _ways(
    graph: _Graph, node: Any, readers: set[nn.Module]
) -> Iterator[tuple[Activation | str | None, ...]]:
    """What lies on each way: activations, and norms by name; `_UNKNOWN` for a way that is none."""
    stack: list[tuple[Any, tuple[Activation | str | None, ...]]] = [(node, ())]
    for _ in range(_MOST_WAYS):
        if not stack:
            return
        node, way = stack.pop()
        for after in node.outputs:
            module = after.module
            if module in readers:
                yield way
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                stack.append((after, (*way, graph.names[module])))
            elif module in graph.names:
                yield _UNKNOWN
            else:
                step = None if _is_inside(after, readers) else classify(after.grad_fn)
                stack.append((after, way if step is None else (*way, step)))
    yield _UNKNOWN


def _is_inside(node: Any, readers: set[nn.Module]) -> bool:
    """Whether it is the product within a linear layer of more than two dimensions, which gives
    autograd a product of two and a view, or a view and a sum."""
    op = _op(node)
    if "mm" not in op and "view" not in op:
        return False

    def leads_on(after: Any) -> bool:
        next_op = _op(after)
        if isinstance(after.module, nn.Linear) and after.module in readers:
            return "view" in next_op or ("add" in next_op and "mm" not in next_op)
        return "mm" in op and "view" in next_op and _is_inside(after, readers)

    return all(map(leads_on, node.outputs))


def _op(node: Any) -> str:
    return node.grad_fn.name().lower() if hasattr(node.grad_fn, "name") else ""


def _takes_constant(graph: _Graph, module: nn.Module) -> str:
    """Where what a layer always adds can go, by its name in the state dict."""
    name = graph.names[module]
    if tensor_of(module, "bias") is not None:
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

"""Search a model for groups of neurons that can be pruned, and verify them on a copy."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from dlio.features.pruning.dependency_graph import candidates, make_member
from dlio.features.pruning.model_surgery import cut_layers, split_key, update_counts
from dlio.features.pruning.neuron_groups import (
    GroupMember,
    Indices,
    ModelInput,
    NeuronGroup,
    PrunableGroups,
    UnprunableLayer,
    channels_gone,
    forward_on,
    is_depthwise,
)
from dlio.train.model_copies import bare_copy, without_graphs
from dlio.util.printable import first_line

# Verification on a copy of the model with random weights
#
# The outputs after cutting some neurons must equal the outputs of the whole model when the
# consumers read zeros for these neurons. Groups from a graph that missed a consumer, confused
# channels or overlooked a reshape fail this check.
_TOLERANCE = 1e-4

Forward = Callable[[nn.Module], object]
"""Call a model on an example input."""


class GroupVerifier:
    """Check whether groups of one model, whose weights become random numbers, can be cut.

    `forward` calls a model on the same example each time.
    """

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        self._model = _randomised(model)
        self._forward = forward
        self._whole = self._outputs(self._model)

    def failure(self, groups: Sequence[NeuronGroup]) -> str:
        """Reason why these groups cannot be cut together; empty if they can."""
        keep = {group.name: _keep(group.width) for group in groups}
        gone = channels_gone(groups, keep)
        small = self._copy({split_key(key)[0] for key in gone})
        try:
            cut_layers(small, gone)
            update_counts(small, groups, keep)
            after = self._outputs(small)
        except Exception as error:
            return f"a model with fewer of its neurons does not run: {first_line(error)}"
        expected = self._zeroed_outputs(groups, gone)
        if len(after) != len(expected) or any(
            a.shape != b.shape for a, b in zip(after, expected, strict=True)
        ):
            return "the shape of the model's output changes with it"
        if _distance(expected, self._whole) < 10 * _TOLERANCE:
            return "removing it has no effect on the model's output"
        if not _distance(after, expected) <= _TOLERANCE:
            return "the model's output depends on it in other ways than through its consumers"
        return ""

    def _zeroed_outputs(
        self, groups: Sequence[NeuronGroup], gone: dict[str, Indices]
    ) -> list[torch.Tensor]:
        """Outputs of the whole model when consumers read zeros for the channels in `gone`."""
        zeroed = [
            (self._model.get_submodule(member.module).get_parameter("weight"), member, gone)
            for group in groups
            for member in group.consumers
        ]
        before = [weight.detach().clone() for weight, _, _ in zeroed]
        try:
            with torch.no_grad():
                for weight, member, _ in zeroed:
                    weight.index_fill_(member.dim, torch.from_numpy(gone[member.key]), 0)
            return self._outputs(self._model)
        finally:
            with torch.no_grad():
                for (weight, _, _), values in zip(zeroed, before, strict=True):
                    weight.copy_(values)

    def _copy(self, layers: set[str]) -> nn.Module:
        """Copy the model with new tensors for these layers only; all others are shared."""
        memo = without_graphs(self._model)
        for name, module in self._model.named_modules():
            if name not in layers:
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    memo[id(tensor)] = tensor
        return copy.deepcopy(self._model, memo)

    def _outputs(self, model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            output = self._forward(model)
        # pytree does not walk subclasses of dict, such as Hugging Face's outputs.
        leaves = _pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
        return [leaf.float() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _keep(width: int) -> Indices:
    """Keep all neurons except up to three in different places."""
    gone = {1, width // 2, width - 2} if width > 4 else {1}
    return np.array([at for at in range(width) if at not in gone], dtype=np.int64)


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Greatest absolute difference, relative to the greatest absolute value of `others`."""
    worst = 0.0
    for a, b in zip(some, others, strict=True):
        if a.numel():
            scale = float(b.abs().max().clamp(min=1e-12))
            worst = max(worst, float((a - b).abs().max()) / scale)
            if worst != worst:
                return worst
    return worst


@torch.no_grad()
def _randomised(model: nn.Module) -> nn.Module:
    """Fill with random weights: new models contain zeros that would hide differences."""
    for module in model.modules():
        module.training = False
    generator = torch.Generator().manual_seed(0)

    def fill(tensor: torch.Tensor) -> None:
        values = torch.empty(tensor.shape)
        if tensor.ndim > 1:
            fan_in = max(1, tensor[0].numel())
            values.normal_(0, fan_in**-0.5, generator=generator)
        else:
            values.uniform_(0.5, 1.5, generator=generator)
        tensor.copy_(values)

    for parameter in model.parameters():
        if parameter.is_floating_point():
            fill(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            fill(buffer)
    return model


# Search
_HEADS = ("num_heads", "n_heads", "heads", "nhead", "num_attention_heads", "n_head")
_WIDTHS = ("all_head_size", "inner_dim", "inner_size", "attn_dim", "embed_dim", "hidden_size")


def find_groups(model: nn.Module, example: ModelInput) -> PrunableGroups:
    """Find the groups of neurons that can be cut, and give a reason for each layer left alone.

    Works on a copy of the model: traces it with `example`, of which two samples are enough, and
    verifies each group there. Every rank finds the same groups in the same model. A pruned model
    has groups of the same names.

    Raises UsageError if torch-pruning is not installed. Errors of the model's forward pass on
    `example` are passed on.
    """
    work = bare_copy(model).cpu()
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in work.parameters()):
        work = work.float()
    for parameter in work.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    forward = forward_on(example)
    with torch.no_grad():
        forward(work)
    proposed, left = candidates(work, forward)
    verifier = GroupVerifier(work, forward)
    groups, failed = _verified(work, verifier, proposed)
    taken = {member.key for group in groups for member in group.members}
    for group in _joint_heads(work):
        if taken.isdisjoint(m.key for m in group.members) and not verifier.failure([group]):
            groups.append(group)
            taken |= {member.key for member in group.members}
    order = {name: at for at, (name, _) in enumerate(work.named_modules())}
    groups.sort(key=lambda group: order[group.name])
    return PrunableGroups(tuple(groups), _left_alone(work, groups, left + failed))


def _verified(
    model: nn.Module, verifier: GroupVerifier, proposed: list[NeuronGroup]
) -> tuple[list[NeuronGroup], list[UnprunableLayer]]:
    """Keep the proposed groups that pass verification, whole or as attention heads."""
    if proposed and not verifier.failure(proposed):
        return proposed, []
    groups: list[NeuronGroup] = []
    left: list[UnprunableLayer] = []
    for group in proposed:
        reason = verifier.failure([group])
        if not reason:
            groups.append(group)
            continue
        heads = next((g for g in _as_heads(model, group) if not verifier.failure([g])), None)
        if heads is not None:
            groups.append(heads)
        else:
            left += [UnprunableLayer(member.module, reason) for member in group.producers]
    return groups, left


def _as_heads(model: nn.Module, group: NeuronGroup) -> Iterator[NeuronGroup]:
    """Propose to treat the group's channels as attention heads, with the counts to update."""
    prefix = group.producers[0].module.rpartition(".")[0]
    for module, attribute, heads in _counts(model, prefix, _HEADS):
        if heads < 2 or group.width % heads:
            continue
        size = group.width // heads

        def together(member: GroupMember, heads: int = heads) -> GroupMember:
            return replace(member, channels=member.channels.reshape(heads, -1))

        whole = replace(group.with_members(together), width=heads, activation=None, norm="")
        widths = [
            (name, other, size)
            for name, other, value in _counts(model, prefix, _WIDTHS)
            if value == group.width
        ]
        count = (module, attribute, 1)
        for attributes in ((count, *widths), (count,), ()):
            yield replace(whole, attributes=attributes)


def _joint_heads(model: nn.Module) -> Iterator[NeuronGroup]:
    """Propose heads whose queries, keys and values come from one linear layer of an attention."""
    for name, module in model.named_modules():
        linears = [
            (child, layer) for child, layer in module.named_children() if type(layer) is nn.Linear
        ]
        for attribute in _HEADS:
            heads = getattr(module, attribute, None)
            if type(heads) is not int or heads < 2:
                continue
            for producer in linears:
                for consumer in linears:
                    width = consumer[1].in_features
                    is_pair = producer is not consumer and producer[1].out_features == 3 * width
                    if is_pair and width % heads == 0:
                        yield from _fused_heads(name, module, attribute, producer, consumer)


def _fused_heads(
    name: str,
    module: nn.Module,
    attribute: str,
    producer: tuple[str, nn.Linear],
    consumer: tuple[str, nn.Linear],
) -> Iterator[NeuronGroup]:
    """Propose the heads of one attention module, for both usual orders of the fused rows.

    `attribute` counts its heads. `producer` is (name, layer) of queries, keys and values, with
    3 * width output features; `consumer` reads the heads, with width input features.
    """
    heads, width = int(getattr(module, attribute)), consumer[1].in_features
    size = width // heads
    prefix = f"{name}." if name else ""
    constant = f"{prefix}{consumer[0]}.bias" if consumer[1].bias is not None else ""
    columns = np.arange(width, dtype=np.int64).reshape(heads, size)
    reads = make_member(consumer[1], prefix + consumer[0], "in", columns, constant)
    widths = [(name, key, size) for key in _WIDTHS if getattr(module, key, None) == width]
    rows: Indices = np.arange(3 * width, dtype=np.int64)
    # (query, key, value) of all heads, or those of each head side by side.
    for channels in (
        rows.reshape(3, heads, size).transpose(1, 0, 2).reshape(heads, -1),
        rows.reshape(heads, -1),
    ):
        produces = make_member(producer[1], prefix + producer[0], "out", channels)
        if produces is None or reads is None:
            continue
        for extra in (widths, []):
            attributes = ((name, attribute, 1), *extra)
            group_name = prefix + producer[0]
            yield NeuronGroup(group_name, heads, (produces,), (), (reads,), attributes=attributes)


def _counts(model: nn.Module, prefix: str, names: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Return (module, attribute, value) from the nearest parent that has one of these counts."""
    while True:
        module = model.get_submodule(prefix)
        counts = [
            (prefix, name, value)
            for name in names
            for value in (getattr(module, name, None),)
            if type(value) is int
        ]
        if counts or not prefix:
            return counts
        prefix = prefix.rpartition(".")[0]


def _left_alone(
    model: nn.Module, groups: list[NeuronGroup], left: list[UnprunableLayer]
) -> tuple[UnprunableLayer, ...]:
    """Give one reason for each layer whose outputs are in no group, in the model's order."""
    made = {member.module for group in groups for member in group.producers}
    reasons: dict[str, str] = {}
    for one in left:
        reasons.setdefault(one.module, one.reason)
    alone = [UnprunableLayer("", reasons[""])] if "" in reasons else []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name in made or not name or name.startswith(inside):
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside += (f"{name}.",)
        if name in reasons:
            alone.append(UnprunableLayer(name, reasons[name]))
        elif isinstance(module, nn.MultiheadAttention):
            reason = "its heads, its input and its output share one width"
            alone.append(UnprunableLayer(name, reason))
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
            alone.append(UnprunableLayer(name, f"{type(module).__name__} reads its own outputs"))
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and not is_depthwise(module):
            alone.append(UnprunableLayer(name, "torch-pruning's graph does not reach it"))
        elif any(True for _ in module.parameters(recurse=False)) and not _known(module):
            alone.append(
                UnprunableLayer(name, f"{type(module).__name__} is not a layer known here")
            )
    return tuple(alone)


def _known(module: nn.Module) -> bool:
    """True for a layer that follows its producers, or that has no neurons of its own to prune."""
    return is_depthwise(module) or isinstance(
        module,
        nn.modules.batchnorm._BatchNorm
        | nn.modules.instancenorm._InstanceNorm
        | nn.LayerNorm
        | nn.GroupNorm
        | nn.RMSNorm
        | nn.PReLU
        | nn.Embedding,
    )

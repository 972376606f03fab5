"""What of a model can be pruned."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dlio.train.pruning.copies import bare_copy
from dlio.train.pruning.dependency_graph import candidates, make_member
from dlio.train.pruning.groups import Group, Indices, LeftAlone, Member, PrunableGroups
from dlio.train.pruning.layers import is_depthwise
from dlio.train.pruning.verify import GroupVerifier

_HEADS = ("num_heads", "n_heads", "heads", "nhead", "num_attention_heads", "n_head")
_WIDTHS = ("all_head_size", "inner_dim", "inner_size", "attn_dim", "embed_dim", "hidden_size")


def find_groups(model: nn.Module, example: Any) -> PrunableGroups:
    """The groups of neurons that can be cut from a model, and what is left alone, with reasons.

    Pure: the model is copied, traced with `example`, and each group is tried out on the copy. The
    same model gives the same groups on every rank; a shrunk model gives groups of the same names.

    Args:
        example: a tensor, a tuple of arguments or a dictionary of named ones; small is enough.

    Raises UsageError where torch-pruning is not installed, and what the model raises for the
    example.
    """
    work = bare_copy(model).cpu()
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in work.parameters()):
        work = work.float()
    for parameter in work.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    arguments = _on_cpu(example)

    def forward(module: nn.Module) -> Any:
        if isinstance(arguments, dict):
            return module(**arguments)
        return module(*arguments) if isinstance(arguments, tuple) else module(arguments)

    with torch.no_grad():
        forward(work)
    some, left = candidates(work, forward)
    trial = GroupVerifier(work, forward)
    found: list[Group] = []
    if some and not trial.fails(some):
        found = some
    else:
        for group in some:
            reason = trial.fails([group])
            if not reason:
                found.append(group)
                continue
            heads = next((g for g in _as_heads(work, group) if not trial.fails([g])), None)
            if heads is not None:
                found.append(heads)
            else:
                left += [LeftAlone(member.module, reason) for member in group.producers]
    taken = {member.key for group in found for member in group.members}
    for group in _joint_heads(work):
        if taken.isdisjoint(m.key for m in group.members) and not trial.fails([group]):
            found.append(group)
            taken |= {member.key for member in group.members}
    return PrunableGroups(_in_order(work, found), _named(work, found, left))


def _as_heads(model: nn.Module, group: Group) -> Iterator[Group]:
    """The group's channels taken together as heads of attention, with the counts to keep."""
    prefix = group.producers[0].module.rpartition(".")[0]
    for module, attribute, heads in _counts(model, prefix, _HEADS):
        if heads < 2 or group.width % heads:
            continue
        size = group.width // heads

        def together(member: Member, heads: int = heads) -> Member:
            return replace(member, channels=member.channels.reshape(heads, -1))

        whole = replace(
            group,
            width=heads,
            producers=tuple(map(together, group.producers)),
            through=tuple(map(together, group.through)),
            consumers=tuple(map(together, group.consumers)),
            activation=None,
            norm="",
        )
        widths = [
            (name, other, size)
            for name, other, value in _counts(model, prefix, _WIDTHS)
            if value == group.width
        ]
        count = (module, attribute, 1)
        for attributes in ((count, *widths), (count,), ()):
            yield replace(whole, attributes=attributes)


def _joint_heads(model: nn.Module) -> Iterator[Group]:
    """Heads whose queries, keys and values one linear layer makes, and another reads."""
    for name, module in model.named_modules():
        linears = [
            (child, layer) for child, layer in module.named_children() if type(layer) is nn.Linear
        ]
        for attribute in _HEADS:
            heads = getattr(module, attribute, None)
            if type(heads) is not int or heads < 2:
                continue
            for child, made in linears:
                for other, read in linears:
                    width = read.in_features
                    if made is read or made.out_features != 3 * width or width % heads:
                        continue
                    size = width // heads
                    rows: Indices = np.arange(3 * width, dtype=np.int64)
                    # (query, key, value) of all heads, or those of each head side by side.
                    layouts = (
                        rows.reshape(3, heads, size).transpose(1, 0, 2).reshape(heads, -1),
                        rows.reshape(heads, -1),
                    )
                    full = f"{name}." if name else ""
                    constant = f"{full}{other}.bias" if read.bias is not None else ""
                    columns = np.arange(width, dtype=np.int64).reshape(heads, size)
                    reader = make_member(read, full + other, "in", columns, constant)
                    widths = [
                        (name, key, size) for key in _WIDTHS if getattr(module, key, None) == width
                    ]
                    for layout in layouts:
                        maker = make_member(made, full + child, "out", layout)
                        if maker is None or reader is None:
                            continue
                        for extra in (widths, []):
                            yield Group(
                                full + child,
                                heads,
                                (maker,),
                                (),
                                (reader,),
                                attributes=((name, attribute, 1), *extra),
                            )


def _counts(model: nn.Module, prefix: str, names: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """(module, attribute, value) of a layer's nearest parent that has such a count."""
    while True:
        module = model.get_submodule(prefix)
        found = [
            (prefix, name, value)
            for name in names
            for value in (getattr(module, name, None),)
            if type(value) is int
        ]
        if found or not prefix:
            return found
        prefix = prefix.rpartition(".")[0]


def _in_order(model: nn.Module, groups: list[Group]) -> tuple[Group, ...]:
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(groups, key=lambda group: order[group.name]))


def _named(model: nn.Module, groups: list[Group], left: list[LeftAlone]) -> tuple[LeftAlone, ...]:
    """One reason for each layer whose outputs nothing cuts, in the model's order."""
    made = {member.module for group in groups for member in group.producers}
    reasons: dict[str, str] = {}
    for one in left:
        reasons.setdefault(one.module, one.reason)
    alone = [LeftAlone("", reasons[""])] if "" in reasons else []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name in made or not name or name.startswith(inside):
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside += (f"{name}.",)
        if name in reasons:
            alone.append(LeftAlone(name, reasons[name]))
        elif isinstance(module, nn.MultiheadAttention):
            reason = "its heads, its input and its output have one width between them"
            alone.append(LeftAlone(name, reason))
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
            alone.append(LeftAlone(name, f"{type(module).__name__} reads its own outputs"))
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and not is_depthwise(module):
            alone.append(LeftAlone(name, "torch-pruning's graph does not reach it"))
        elif any(True for _ in module.parameters(recurse=False)) and not _known(module):
            alone.append(LeftAlone(name, f"{type(module).__name__} is not a layer known here"))
    return tuple(alone)


def _known(module: nn.Module) -> bool:
    """Whether a layer goes along with what others make, or makes nothing to prune."""
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


def _on_cpu(example: Any) -> Any:
    match example:
        case torch.Tensor():
            return example.detach().cpu().float() if example.is_floating_point() else example.cpu()
        case Mapping():
            return {key: _on_cpu(value) for key, value in example.items()}
        case tuple() | list():
            return tuple(_on_cpu(value) for value in example)
    return example

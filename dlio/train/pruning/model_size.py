"""How large a model is."""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from dlio.train.pruning.copies import bare_copy


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_layer(model: nn.Module) -> dict[str, int]:
    """Of each module's own, by its name; shared ones where they come first."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        counts[layer] = counts.get(layer, 0) + parameter.numel()
    return counts


def flops_per_sample(model: nn.Module, example: Any) -> int:
    """Of a forward pass, multiplications and additions, as torch counts them; on a copy.

    Args:
        example: a tensor, a tuple of arguments or a dictionary of named ones, samples first.
    """
    copy = bare_copy(model).cpu().float()
    leaves = [leaf for leaf in _pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    samples = max([len(leaf) for leaf in leaves if leaf.ndim], default=1)
    example = _pytree.tree_map_only(torch.Tensor, _to_host, example)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if isinstance(example, dict):
            copy(**example)
        elif isinstance(example, tuple | list):
            copy(*example)
        else:
            copy(example)
    return int(counter.get_total_flops() // max(1, samples))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().float() if tensor.is_floating_point() else tensor.detach().cpu()

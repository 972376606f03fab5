"""Count the parameters and FLOPs of a model."""

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from dlio.features.pruning.neuron_groups import ModelInput
from dlio.train.model_copies import bare_copy


def count_parameters(model: nn.Module) -> int:
    """Number of entries in all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_layer(model: nn.Module) -> dict[str, int]:
    """Number of own parameters of each module, by name; shared ones count once, where first."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        counts[layer] = counts.get(layer, 0) + parameter.numel()
    return counts


def flops_per_sample(model: nn.Module, example: ModelInput) -> int:
    """Multiplications and additions of a forward pass per sample, as torch counts them.

    Runs the forward pass on a copy of the model, on the CPU.

    Args:
        example: input of the model, with samples along the first dimension.
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

"""Groups tried out: what is cut must be what is read, and nothing else.

On a copy of the model with random weights, cutting some neurons must give the outputs that it
gives when only the layers that read them see zeros in their place. That is what a cut promises; a
graph that missed a reader, mixed up channels or did not see a reshape fails it.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from dlio.train.pruning.copies import without_graphs
from dlio.train.pruning.cutting import cut_layers, split_key
from dlio.train.pruning.groups import Group, Indices, channels_gone

_TOLERANCE = 1e-4

Forward = Callable[[nn.Module], Any]


class GroupVerifier:
    """Tries groups of one model.

    Args:
        model: its weights are overwritten with random numbers.
        forward: calls a model on an example; the same each time.
    """

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        self._model = _randomised(model)
        self._forward = forward
        self._whole = self._outputs(self._model)

    def fails(self, groups: Sequence[Group]) -> str:
        """Why they cannot be cut together; empty where they can."""
        keep = {group.name: _keep(group.width) for group in groups}
        gone = channels_gone(groups, keep)
        small = self._copy({split_key(key)[0] for key in gone})
        try:
            cut_layers(small, gone)
            count_anew(small, groups, keep)
            after = self._outputs(small)
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            return f"a model with fewer of its neurons does not run: {text}"
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
            expected = self._outputs(self._model)
        finally:
            with torch.no_grad():
                for (weight, _, _), values in zip(zeroed, before, strict=True):
                    weight.copy_(values)
        if len(after) != len(expected) or any(
            a.shape != b.shape for a, b in zip(after, expected, strict=True)
        ):
            return "the model's output changes its shape with it"
        if _distance(expected, self._whole) < 10 * _TOLERANCE:
            return "removing it cannot be seen in the model's output"
        if not _distance(after, expected) <= _TOLERANCE:
            return "the model's output depends on it by other ways than the layers that read it"
        return ""

    def _copy(self, layers: set[str]) -> nn.Module:
        """A copy that has tensors of its own only for these layers, and shares all others."""
        memo = without_graphs(self._model)
        for name, module in self._model.named_modules():
            if name not in layers:
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    memo[id(tensor)] = tensor
        return copy.deepcopy(self._model, memo)

    def _outputs(self, model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            leaves = _pytree.tree_leaves(_plain(self._forward(model)))
        return [leaf.float() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def count_anew(model: nn.Module, groups: Sequence[Group], keep: dict[str, Indices]) -> None:
    """Set the counts that models keep outside of their layers."""
    for group in groups:
        if group.name in keep:
            for module, attribute, each in group.attributes:
                setattr(model.get_submodule(module), attribute, each * len(keep[group.name]))


def _keep(width: int) -> Indices:
    """All but some, here and there."""
    gone = {1, width // 2, width - 2} if width > 4 else {1}
    return np.array([at for at in range(width) if at not in gone], dtype=np.int64)


def _plain(output: Any) -> Any:
    """Outputs as Hugging Face's models give them are dictionaries, too."""
    return dict(output) if isinstance(output, dict) else output


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Greatest difference, beside the greatest value."""
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
    """Weights under which everything shows: models begin with layers that are zero."""
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

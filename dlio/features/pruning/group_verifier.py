"""Verify groups on a copy of the model with random weights.

The outputs after cutting some neurons must equal the outputs of the whole model when the consumers
read zeros for these neurons. Groups from a graph that missed a consumer, confused channels or
overlooked a reshape fail this check.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from dlio.features.pruning.layer_cuts import cut_layers, split_key, update_counts
from dlio.features.pruning.neuron_groups import Indices, NeuronGroup, channels_gone
from dlio.train.model_copies import without_graphs

_TOLERANCE = 1e-4

Forward = Callable[[nn.Module], object]
"""Call a model on an example input."""


class GroupVerifier:
    """Check whether groups of one model can be cut.

    Args:
        model: the model; its weights are overwritten with random numbers.
        forward: call the model on an example; the same example each time.
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
            text = str(error).strip().split("\n")[0]
            return f"a model with fewer of its neurons does not run: {text}"
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
            leaves = _pytree.tree_leaves(_plain(self._forward(model)))
        return [leaf.float() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _keep(width: int) -> Indices:
    """Keep all neurons except up to three in different places."""
    gone = {1, width // 2, width - 2} if width > 4 else {1}
    return np.array([at for at in range(width) if at not in gone], dtype=np.int64)


def _plain(output: object) -> object:
    """Turn dict subclasses, such as Hugging Face's outputs, into dicts that pytree can walk."""
    return dict(output) if isinstance(output, dict) else output


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

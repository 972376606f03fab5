"""Carry out a removal plan in place on a model, its gradients and its optimizers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dlio.errors import DlioError
from dlio.exchange.cut import TensorCut
from dlio.features.pruning.layer_cuts import cut_layers, update_counts
from dlio.features.pruning.neuron_groups import NeuronGroup, channels_gone, shrunk
from dlio.features.pruning.pruned_layout import PrunedLayout
from dlio.features.pruning.removal_plan import RemovalPlan


@dataclass(frozen=True, slots=True)
class SurgeryResult:
    """The result of a cut."""

    groups: tuple[NeuronGroup, ...]
    """Groups of the smaller model, for the next plan."""
    layout: PrunedLayout
    cuts: tuple[TensorCut, ...]
    """Every parameter and buffer whose shape changed. Anything else that depends on these shapes,
    such as flat buffers and gradient buckets, has to be rebuilt."""


@torch.no_grad()
def apply(
    model: nn.Module,
    groups: Sequence[NeuronGroup],
    plan: RemovalPlan,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    layout: PrunedLayout | None = None,
    aligned: Iterable[Callable[[Sequence[TensorCut]], None]] = (),
) -> SurgeryResult:
    """Compensate for the neurons to remove, then remove them.

    Parameters keep their identity, hooks and attributes; see `cutting`. An empty plan changes
    nothing, not even the layout's version.

    Args:
        plan: removals planned for these groups.
        optimizers: optimizers whose state is cut along.
        layout: the cuts so far; None for an unpruned model.
        aligned: callbacks that run last, with all cuts. They replace tensors of the same shapes
            held elsewhere (error-feedback residuals, averaged copies) by `cut.of(tensor)`.

    Raises DlioError, with the model unchanged, if the plan belongs to other groups, and for the
    reasons that `cut_layers` lists.
    """
    layout = layout or PrunedLayout()
    if not plan.keep:
        return SurgeryResult(tuple(groups), layout, ())
    by_name = {group.name: group for group in groups}
    for name, keep in plan.keep.items():
        if name not in by_name or not 0 <= keep.min() <= keep.max() < by_name[name].width:
            raise DlioError(
                f"the plan is for a different width of '{name}': call plan_removals again"
            )
    gone = channels_gone(groups, plan.keep)
    after = layout.after(model, groups, plan.keep)
    undo = _compensate(model, by_name, plan)
    try:
        cuts = cut_layers(model, gone, optimizers)
    except DlioError:
        for tensor, before in undo:
            tensor.copy_(before)
        raise
    update_counts(model, groups, plan.keep)
    for callback in aligned:
        callback(cuts)
    return SurgeryResult(shrunk(groups, plan.keep), after, tuple(cuts))


def _compensate(
    model: nn.Module, groups: dict[str, NeuronGroup], plan: RemovalPlan
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Add constants and the weights of twins; return (tensor, copy of its old value) to undo."""
    undo: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, shift in plan.shifts.items():
        layer, _, tensor = name.rpartition(".")
        target: torch.Tensor = getattr(model.get_submodule(layer), tensor)
        undo.append((target, target.clone()))
        target.add_(torch.from_numpy(shift).to(target.device, target.dtype))
    twins = [removal for removal in plan.removals if removal.twin >= 0]
    weights = {
        id(weight): weight
        for removal in twins
        for member in groups[removal.group].consumers
        for weight in (model.get_submodule(member.module).get_parameter("weight"),)
    }
    undo += [(weight, weight.clone()) for weight in weights.values()]
    for removal in twins:
        for member in groups[removal.group].consumers:
            weight = model.get_submodule(member.module).get_parameter("weight")
            channels = torch.from_numpy(member.channels).to(weight.device)
            part = weight.index_select(member.dim, channels[removal.neuron])
            weight.index_add_(member.dim, channels[removal.twin], part, alpha=removal.scale)
    return undo

"""A plan carried out on a live model, its gradients and its optimizers, in place."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dlio.errors import DlioError
from dlio.train.cut import Cut
from dlio.train.pruning.cutting import cut_layers
from dlio.train.pruning.groups import Group, channels_gone, shrunk
from dlio.train.pruning.pruned_layout import PrunedLayout
from dlio.train.pruning.removal import RemovalPlan
from dlio.train.pruning.verify import count_anew


@dataclass(frozen=True, slots=True)
class Applied:
    """What there is after a cut."""

    groups: tuple[Group, ...]
    """Of the smaller model; for the next plan."""
    layout: PrunedLayout
    cuts: tuple[Cut, ...]
    """Every parameter and buffer that changed its shape: what else depends on those shapes, flat
    buffers and buckets of gradients above all, is to be made anew."""


@torch.no_grad()
def apply(
    model: nn.Module,
    groups: Sequence[Group],
    plan: RemovalPlan,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    layout: PrunedLayout | None = None,
    aligned: Iterable[Callable[[Sequence[Cut]], None]] = (),
) -> Applied:
    """Make up for the neurons that go, and take them out.

    Parameters stay the objects that they were, with their hooks and attributes; see `cutting`. A
    plan that removes nothing changes nothing, the layout's version included.

    Args:
        layout: what had been cut before.
        aligned: called last, with all cuts, for tensors beside the model's, each to be replaced by
            `cut.of(tensor)`: residuals of error feedback, averaged copies.

    Raises DlioError where a plan is not for these groups, and as cut_layers; the model is then
    unchanged.
    """
    layout = layout or PrunedLayout()
    if not plan.keep:
        return Applied(tuple(groups), layout, ())
    by_name = {group.name: group for group in groups}
    for name, keep in plan.keep.items():
        if name not in by_name or not 0 <= keep.min() <= keep.max() < by_name[name].width:
            raise DlioError(f"the plan is for other widths of '{name}': make it anew")
    gone = channels_gone(groups, plan.keep)
    after = layout.after(model, groups, plan.keep)
    undo = _make_up(model, by_name, plan)
    try:
        cuts = cut_layers(model, gone, optimizers)
    except DlioError:
        for tensor, before in undo:
            tensor.copy_(before)
        raise
    count_anew(model, groups, plan.keep)
    for callback in aligned:
        callback(cuts)
    return Applied(shrunk(groups, plan.keep), after, tuple(cuts))


def _make_up(
    model: nn.Module, groups: dict[str, Group], plan: RemovalPlan
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Twins take over, constants go where they are added; gives the tensors as they were."""
    undo: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, shift in plan.shifts.items():
        layer, _, tensor = name.rpartition(".")
        target: torch.Tensor = getattr(model.get_submodule(layer), tensor)
        undo.append((target, target.clone()))
        target.add_(torch.from_numpy(shift).to(target.device, target.dtype))
    heirs = [removal for removal in plan.removals if removal.twin >= 0]
    weights = {
        id(weight): weight
        for removal in heirs
        for member in groups[removal.group].consumers
        for weight in (model.get_submodule(member.module).get_parameter("weight"),)
    }
    undo += [(weight, weight.clone()) for weight in weights.values()]
    for removal in heirs:
        for member in groups[removal.group].consumers:
            weight = model.get_submodule(member.module).get_parameter("weight")
            channels = torch.from_numpy(member.channels).to(weight.device)
            part = weight.index_select(member.dim, channels[removal.neuron])
            weight.index_add_(member.dim, channels[removal.twin], part, alpha=removal.scale)
    return undo

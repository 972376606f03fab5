"""Carry out a removal plan in place on a model, its gradients and its optimizers; keep a record."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from dlio.errors import DlioError
from dlio.exchange.cut import TensorCut
from dlio.features.pruning.neuron_groups import (
    Indices,
    JsonRecord,
    NeuronGroup,
    Side,
    channels_gone,
    layer_side,
    shrunk,
)
from dlio.features.pruning.removal_plan import RemovalPlan
from dlio.util.units import counted

# Cuts of tensors, gradients and optimizer state
#
# Each Parameter keeps its identity by means of `torch.utils.swap_tensors`. The keys of optimizers,
# lists of parameters and attributes on them therefore stay valid. Hooks move to the smaller tensor,
# and their handles still remove them. Autograd's C++ state does not move: objects that hold a
# parameter's AccumulateGrad node, such as torch's DDP, have to be rebuilt.


# torch does not annotate this function.
_swap_tensors: Final[Callable[[torch.Tensor, torch.Tensor], None]] = torch.utils.swap_tensors


@torch.no_grad()
def cut_layers(
    model: nn.Module,
    gone: Mapping[str, Indices],
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> list[TensorCut]:
    """Remove channels, given by Member.key, from layers, gradients and optimizer state.

    Raises DlioError, and changes nothing, if an optimizer's state lacks its parameter's shape, or
    if an autograd graph still refers to a parameter.
    """
    optimizers = tuple(optimizers)
    cuts, counts = _plan_cuts(model, gone)
    states = [
        # Fused optimizers walk memory linearly: keep the parameter's memory format.
        (state, name, _same_format(cut.of(value, f"the optimizer's '{name}'"), value))
        for cut in cuts
        for optimizer in optimizers
        if cut.tensor in optimizer.state
        for state in (optimizer.state[cut.tensor],)
        for name, value in _tensors(state, cut.name)
    ]
    _swap([(cut, _small(cut)) for cut in cuts])
    for state, name, value in states:
        state[name] = value
    for module, attribute, count in counts:
        setattr(module, attribute, count)
    return cuts


def _plan_cuts(
    model: nn.Module, gone: Mapping[str, Indices]
) -> tuple[list[TensorCut], list[tuple[nn.Module, str, int]]]:
    """Return the cut of each tensor, and (module, attribute, value) of the counts to set."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    kept: dict[str, dict[int, torch.Tensor]] = {}
    counts: list[tuple[nn.Module, str, int]] = []
    for key, channels in gone.items():
        name, side = split_key(key)
        module = model.get_submodule(name)
        shape = layer_side(module, side)
        if shape is None:
            raise DlioError(f"{name}: a {type(module).__name__} has no side '{side}' to cut")
        if len(channels) == 0:
            continue
        stay = torch.from_numpy(np.delete(np.arange(shape.size, dtype=np.int64), channels))
        if len(stay) == 0 or len(stay) + len(channels) != shape.size:
            raise DlioError(
                f"{key}: cannot take {counted(len(channels), 'channel')} of {shape.size}"
            )
        for tensor, dim in shape.tensors:
            full = f"{name}.{tensor}" if name else tensor
            owners[full] = (module, tensor)
            kept.setdefault(full, {})[dim] = stay
        counts += [(module, attribute, len(stay)) for attribute in shape.attributes]
    cuts = []
    for full, dims in kept.items():
        tensor = getattr(*owners[full])
        on_device = tuple((dim, stay.to(tensor.device)) for dim, stay in dims.items())
        cuts.append(TensorCut(full, tensor, tuple(tensor.shape), on_device))
    return cuts, counts


def _tensors(state: Mapping[str, object], parameter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an optimizer's state for one parameter.

    Raises DlioError for tensors nested in lists or dictionaries, whose channels are unknown.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif any(
            isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in _pytree.tree_leaves(value)
        ):
            raise DlioError(
                f"the optimizer's '{name}' of {parameter} is a {type(value).__name__} of tensors, "
                "which cannot be cut with it: choose an optimizer whose state has the shape of its "
                "parameters"
            )


def update_counts(
    model: nn.Module, groups: Sequence[NeuronGroup], keep: Mapping[str, Indices]
) -> None:
    """Set the counts that a model keeps outside its layers, such as `num_heads`."""
    for group in groups:
        if group.name in keep:
            for module, attribute, each in group.attributes:
                setattr(model.get_submodule(module), attribute, each * len(keep[group.name]))


def split_key(key: str) -> tuple[str, Side]:
    """Split a Member.key into module name and side."""
    name, _, side = key.rpartition(":")
    if side == "out":
        return name, "out"
    return (name, "in") if side == "in" else (name, "through")


def _small(cut: TensorCut) -> torch.Tensor:
    tensor = cut.tensor
    small = _same_format(cut.of(tensor.detach()), tensor)
    if isinstance(tensor, nn.Parameter):
        small = nn.Parameter(small, requires_grad=tensor.requires_grad)
        if tensor.grad is not None:
            small.grad = _same_format(cut.of(tensor.grad), tensor.grad)
    # The same dictionaries, because hook handles refer to them.
    small._backward_hooks = tensor._backward_hooks
    small._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    small.__dict__.update(tensor.__dict__)
    return small


def _swap(pairs: list[tuple[TensorCut, torch.Tensor]]) -> None:
    """Swap each of the model's tensors with its smaller one, in place; all or none."""
    for done, (cut, small) in enumerate(pairs):
        try:
            _swap_tensors(cut.tensor, small)
        except RuntimeError as error:
            for before, its_small in pairs[:done]:
                _swap_tensors(before.tensor, its_small)
            raise DlioError(
                f"{cut.name} cannot be shrunk while something else refers to it, such as an output "
                f"of the model without its backward pass: delete that reference first ({error})"
            ) from error


def _same_format(small: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return small.contiguous(memory_format=last)
    return small.contiguous()


# The record of everything cut, for checkpoints


@dataclass(frozen=True, slots=True, eq=False)
class PrunedLayout:
    """The original neurons that remain. `PrunedLayout()` belongs to an unpruned model."""

    version: int = 0
    """Number of cuts. Messages of another version have other shapes."""
    groups: Mapping[str, Indices] = field(default_factory=dict)
    """Remaining neurons of each group that was cut, as numbered in the original model."""
    layers: Mapping[str, tuple[int, Indices]] = field(default_factory=dict)
    """Original width and remaining channels, by Member.key."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Values of counts kept outside the layers, by `module:attribute`."""

    def after(
        self, model: nn.Module, groups: Sequence[NeuronGroup], keep: Mapping[str, Indices]
    ) -> "PrunedLayout":
        """Return the layout after a cut of `model`, which has this layout now. Pure."""
        cut = dict(self.groups)
        layers = dict(self.layers)
        counts = dict(self.counts)
        for group in groups:
            if group.name in keep:
                cut[group.name] = cut.get(group.name, np.arange(group.width))[keep[group.name]]
                for module, attribute, each in group.attributes:
                    counts[f"{module}:{attribute}"] = each * len(keep[group.name])
        for key, channels in channels_gone(groups, keep).items():
            name, side = split_key(key)
            shape = layer_side(model.get_submodule(name), side)
            assert shape is not None
            size, left = layers.get(key, (shape.size, np.arange(shape.size, dtype=np.int64)))
            layers[key] = size, np.delete(left, channels)
        return PrunedLayout(self.version + 1, cut, layers, counts)

    def to_json(self) -> JsonRecord:
        """Convert to JSON types, for a checkpoint."""
        return {
            "version": self.version,
            "groups": {name: left.tolist() for name, left in self.groups.items()},
            "layers": {key: (size, left.tolist()) for key, (size, left) in self.layers.items()},
            "counts": dict(self.counts),
        }

    @staticmethod
    def from_json(record: JsonRecord) -> "PrunedLayout":
        """Rebuild the layout that `to_json` converted. Raises DlioError for any other record."""
        try:
            return PrunedLayout(
                int(record["version"]),
                {name: np.array(left, np.int64) for name, left in record["groups"].items()},
                {
                    key: (int(size), np.array(left, np.int64))
                    for key, (size, left) in record["layers"].items()
                },
                {key: int(count) for key, count in record["counts"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DlioError(f"not a layout of a pruned model: {error}") from error


def shrink_to(
    model: nn.Module, layout: PrunedLayout, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> list[TensorCut]:
    """Cut an unpruned model in place to a pruned layout; it can then load the pruned state dict.

    Needs no example input and no tracing.

    Raises DlioError, before any change, if the model's widths differ from the original ones.
    """
    gone: dict[str, Indices] = {}
    for key, (size, left) in layout.layers.items():
        name, side = split_key(key)
        try:
            shape = layer_side(model.get_submodule(name), side)
        except AttributeError as error:
            raise DlioError(f"the pruned model has a layer '{name}', this one has none") from error
        valid = left.ndim == 1 and len(left) > 0 and left.min() >= 0 and left.max() < size
        if shape is None or shape.size != size or not valid:
            there = "none" if shape is None else str(shape.size)
            raise DlioError(
                f"{key}: the pruned model was cut from a width of {size}, this one has {there}: "
                "make the model with the options of the one that was trained"
            )
        gone[key] = np.delete(np.arange(size, dtype=np.int64), left)
    modules = dict(model.named_modules())
    counts = [(*key.partition(":")[::2], count) for key, count in layout.counts.items()]
    for name, attribute, count in counts:
        # Only an integer, made smaller: a layout may be another user's.
        whole = getattr(modules.get(name), attribute, None)
        if type(whole) is not int or not 0 < count <= whole:
            there = f"has {whole}" if type(whole) is int else "has none"
            raise DlioError(
                f"the pruned model has a count '{name}.{attribute}' of {count}, this one {there}"
            )
    cuts = cut_layers(model, gone, optimizers)
    for name, attribute, count in counts:
        setattr(modules[name], attribute, count)
    return cuts


# Removal plans


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

    Parameters keep their identity, hooks and attributes; see `cut_layers`. An empty plan changes
    nothing, not even the layout's version.

    `layout` holds the cuts so far; None for an unpruned model. The state of `optimizers` is cut
    along. The callbacks in `aligned` run last, with all cuts: they replace tensors of the same
    shapes held elsewhere (error-feedback residuals, averaged copies) by `cut.of(tensor)`.

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

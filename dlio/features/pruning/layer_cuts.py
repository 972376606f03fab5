"""Remove channels from a model in place, from its gradients and from optimizer state.

Each Parameter keeps its identity by means of `torch.utils.swap_tensors`. The keys of optimizers,
lists of parameters and attributes on them therefore stay valid. Hooks move to the smaller tensor,
and their handles still remove them. Autograd's C++ state does not move: objects that hold a
parameter's AccumulateGrad node, such as torch's DDP, have to be rebuilt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from dlio.errors import DlioError
from dlio.exchange.cut import TensorCut
from dlio.features.pruning.layer_sides import Side, layer_side
from dlio.features.pruning.neuron_groups import Indices, NeuronGroup

# torch does not annotate this function.
_swap_tensors: Final[Callable[[torch.Tensor, torch.Tensor], None]] = torch.utils.swap_tensors


@torch.no_grad()
def cut_layers(
    model: nn.Module,
    gone: Mapping[str, Indices],
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> list[TensorCut]:
    """Remove channels from layers, gradients and optimizer state.

    Args:
        gone: the channels to remove, by Member.key.

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
            raise DlioError(f"{key}: cannot take {len(channels)} channels of {shape.size}")
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
    """Make the smaller tensor that replaces the model's."""
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
    """Convert to the memory format of `tensor`."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return small.contiguous(memory_format=last)
    return small.contiguous()

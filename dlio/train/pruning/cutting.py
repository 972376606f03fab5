"""Channels taken out of a live model, in place.

A Parameter stays the object that it was, by `torch.utils.swap_tensors`: an optimizer's keys, lists
of parameters and attributes set on them stay true, and its hooks go over to the smaller tensor, so
that handles remove them as before. What autograd keeps in C++ about a parameter does not: whoever
holds on to its AccumulateGrad node (torch's DDP does) must be made anew.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from dlio.errors import DlioError
from dlio.train.cut import Cut
from dlio.train.pruning.groups import Indices
from dlio.train.pruning.layers import Side, shape_of


@torch.no_grad()
def cut_layers(
    model: nn.Module,
    gone: Mapping[str, Indices],
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> list[Cut]:
    """Take channels out of layers, gradients and optimizers' state.

    Args:
        gone: by Member.key, the channels that go.

    Raises DlioError, and leaves all as it was, for state of an optimizer that does not have its
    parameter's shape, and while a graph of autograd still refers to a parameter.
    """
    optimizers = tuple(optimizers)
    owners: dict[str, tuple[nn.Module, str]] = {}
    kept: dict[str, dict[int, torch.Tensor]] = {}
    counts: list[tuple[nn.Module, str, int]] = []
    for key, channels in gone.items():
        name, side = split_key(key)
        module = model.get_submodule(name)
        shape = shape_of(module, side)
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
        there = tuple((dim, stay.to(tensor.device)) for dim, stay in dims.items())
        cuts.append(Cut(full, tensor, tuple(tensor.shape), there))
    states = [
        # Fused optimizers walk memory: it lies as the parameter's does.
        (state, name, _alike(cut.of(value, f"the optimizer's '{name}'"), value))
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


def _tensors(state: Mapping[str, Any], parameter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """An optimizer's, of one parameter. Raises DlioError for those that lie in lists and the like:
    nobody knows what of them belongs to which channel."""
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


def split_key(key: str) -> tuple[str, Side]:
    """Member.key's module and side."""
    name, _, side = key.rpartition(":")
    if side == "out":
        return name, "out"
    return (name, "in") if side == "in" else (name, "through")


def _small(cut: Cut) -> torch.Tensor:
    """A smaller tensor, to take the place of the model's."""
    tensor = cut.tensor
    small = _alike(cut.of(tensor.detach()), tensor)
    if isinstance(tensor, nn.Parameter):
        small = nn.Parameter(small, requires_grad=tensor.requires_grad)
        if tensor.grad is not None:
            small.grad = _alike(cut.of(tensor.grad), tensor.grad)
    # The very dictionaries, as handles refer to them.
    small._backward_hooks = tensor._backward_hooks
    small._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    small.__dict__.update(tensor.__dict__)
    return small


def _swap(pairs: list[tuple[Cut, torch.Tensor]]) -> None:
    """Make the model's tensors the smaller ones, the same objects; all or none."""
    for done, (cut, small) in enumerate(pairs):
        try:
            torch.utils.swap_tensors(cut.tensor, small)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            for before, its_small in pairs[:done]:
                torch.utils.swap_tensors(before.tensor, its_small)  # type: ignore[no-untyped-call]
            raise DlioError(
                f"{cut.name} cannot be shrunk while something else refers to it, such as an output "
                f"of the model whose gradients were not computed: let go of it first ({error})"
            ) from error


def _alike(small: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """In the memory format of the whole tensor."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return small.contiguous(memory_format=last)
    return small.contiguous()

"""Copies of a model for experiments, without hooks and autograd graphs."""

import copy
from collections import OrderedDict
from typing import TypeVar

import torch
from torch import nn
from torch.utils import _pytree

_MARK = "_dlio_bare_copy"
Module = TypeVar("Module", bound=nn.Module)


def bare_copy(model: Module) -> Module:
    """Copy a model, in evaluation mode and without its hooks.

    Hooks would otherwise also run for the copy, and may refer to objects that cannot be copied.
    Observers of all modules in a process recognise such a copy by `is_bare_copy` and ignore it.
    """
    memo = without_graphs(model)
    for module in model.modules():
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
    bare = copy.deepcopy(model, memo)
    for module in bare.modules():
        # Models may override eval(), and others may watch it.
        module.training = False
        module.__dict__[_MARK] = True
    return bare


def is_bare_copy(module: nn.Module) -> bool:
    """True if `bare_copy` made this module."""
    return _MARK in module.__dict__


def without_graphs(model: nn.Module) -> dict[int, object]:
    """Return a memo for `copy.deepcopy` that detaches tensors left in attributes.

    torch refuses to deep-copy a tensor that belongs to an autograd graph, such as an output that a
    forward pass stored in the module.
    """
    return {
        id(value): value.detach()
        for module in model.modules()
        for value in _pytree.tree_leaves(list(vars(module).values()))
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }

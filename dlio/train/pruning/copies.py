"""Copies of a model to try things on."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

_MARK = "_dlio_bare_copy"


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy to try things on, in evaluation; without hooks, which would be called for it, too, and
    may belong to what no copy can be made of. What watches all modules of a process is to leave it
    alone, by `is_bare_copy`."""
    memo = without_graphs(model)
    for module in model.modules():
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        # Not by eval(), which others watch.
        module.training = False
        module.__dict__[_MARK] = True
    return made


def is_bare_copy(module: nn.Module) -> bool:
    return _MARK in module.__dict__


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """For `copy.deepcopy`: what a forward pass left in attributes, which torch copies only without
    the graph that made it."""
    return {
        id(value): value.detach()
        for module in model.modules()
        for value in _pytree.tree_leaves(list(vars(module).values()))
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }

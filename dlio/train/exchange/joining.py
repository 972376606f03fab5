"""Joining what is under way before it is used: by module, in the order of a forward pass."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from dlio.train.exchange.buckets import Named


def join_before_use(
    modules: Iterable[nn.Module], groups: Sequence[Named], join: Callable[[Sequence[int]], None]
) -> list[Any]:
    """Have `join` called, before a module's forward pass, with the numbers of the groups that its
    own parameters are in; the hooks.

    A module is taken to use its own parameters, and its children to be called for theirs. Attention
    is the exception in torch: it reads its output layer's without calling it.
    """
    number_of = {p: number for number, group in enumerate(groups) for _, p in group}
    hooks = []
    for module in modules:
        reads_children = isinstance(module, nn.MultiheadAttention)
        parameters = module.parameters(recurse=reads_children)
        used = sorted({number_of[p] for p in parameters if p in number_of})
        if used:
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _module, _inputs, used=tuple(used): join(used)
                )
            )
    return hooks

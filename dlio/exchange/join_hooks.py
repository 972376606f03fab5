"""Wait for parameters under way just before a module's forward pass uses them."""

from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from dlio.exchange.buckets import Named


def join_before_use(
    modules: Iterable[nn.Module], groups: Sequence[Named], join: Callable[[Sequence[int]], None]
) -> list[RemovableHandle]:
    """Call `join` before a module's forward pass with the numbers of its parameters' groups.

    A module is assumed to use its own parameters, and to call its children for theirs. torch's
    attention is the exception: it reads its output layer's parameters without calling the layer.

    Returns the registered hooks.
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

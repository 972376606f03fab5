"""The losses of a backward that the script can look at afterwards."""

from collections import deque
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Final, cast

import torch

_MOST_NODES: Final = 64
"""Steps of a computation, back from the loss, in which other losses are looked for."""


def losses_of(tensors: Any, frames: Sequence[FrameType], most: int) -> list[torch.Tensor]:
    """Return the number that a backward begins at, and its summands and the like among the
    variables of the script's frames: at most `most` scalars, in an order that follows from the
    script alone.

    Only those whose graph this backward uses up: autograd may need the value of others yet.
    """
    kind = torch.Tensor
    if type(tensors) is not kind and isinstance(tensors, list | tuple):
        if len(tensors) != 1:
            return []
        (tensors,) = tensors
    if not _is_scalar(tensors):
        return []
    losses = [tensors]
    for frame in frames:
        for each in frame.f_locals.values():
            # A call takes longer than these looks at each variable.
            is_other = type(each) is kind and each is not tensors
            if is_other and each.requires_grad and each.numel() == 1 and _is_scalar(each):
                losses.append(each)
    if len(losses) > 1:  # In most scripts there is one, and its graph need not be walked.
        nodes = set(_nodes(tensors.grad_fn))
        several = {id(each): each for each in losses if each.grad_fn in nodes}
        losses = list(several.values())
    return losses[:most]


def _is_scalar(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.requires_grad
        and not value.is_leaf
        and value.numel() == 1
        and value.is_floating_point()
        # The memory of some views is a parameter's.
        and not (value._is_view() and cast(torch.Tensor, value._base).is_leaf)
    )


def _nodes(first: Any) -> Iterable[object]:
    """Yield the nearest nodes of a graph, the first one included."""
    seen = {first}
    left = deque([first])
    while left and len(seen) < _MOST_NODES:
        for node, _ in left.popleft().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                left.append(node)
    return seen

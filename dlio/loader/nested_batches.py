"""Batches of any structure: tuples, lists, dictionaries and named tuples, nested, of tensors.

torch walks the types that are registered with it. Subclasses of dict, list and
tuple that are not registered are walked here, as torch's own loader walks them.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Final

import torch

from dlio.loader.contract import BatchData
from dlio.loader.picture_targets import Target
from dlio.loader.torch_private import tree_leaves, tree_map

_FIELDS: Final = 4
"""Most fields of a batch that is a list of tensors, as far as nothing else tells."""


def map_leaves(act: Callable[[BatchData], BatchData], data: BatchData) -> BatchData:
    """Return a batch of the same structure with `act` applied to each leaf."""

    def visit(leaf: BatchData) -> BatchData:
        if isinstance(leaf, dict):
            made = {key: map_leaves(act, item) for key, item in leaf.items()}
            return Target(made) if isinstance(leaf, Target) else made
        if isinstance(leaf, tuple | list):
            return type(leaf)(map_leaves(act, item) for item in leaf)
        return act(leaf)

    return tree_map(visit, data)


def tensors_in(data: BatchData) -> Iterator[torch.Tensor]:
    """The tensors of a batch."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, dict | tuple | list) and leaf:
            yield from tensors_in(list(leaf.values() if isinstance(leaf, dict) else leaf))


def emptied(data: BatchData) -> BatchData:
    """Return a batch of the same structure without samples: tensors and lists of length 0."""
    return tree_map(_cut, data, is_leaf=_lists_values)


def samples_in(data: BatchData) -> int:
    """Number of samples of a batch: the length of its first tensor or list of values."""
    leaves = tree_leaves(data, is_leaf=_lists_values)
    first = leaves[0] if leaves else None
    if isinstance(first, torch.Tensor):
        if first.is_nested:
            return len(first.unbind())
        return len(first) if first.ndim else 1
    if isinstance(first, dict) and first:
        return samples_in(next(iter(first.values())))
    return len(first) if isinstance(first, tuple | list) else 1


def may_hold(data: BatchData, samples: int) -> bool:
    """True if a batch may be one of a number of samples: a dimension of one of its tensors, or the
    length of one of its lists, is that number."""
    tensors = [each for each in tensors_in(data) if not each.is_nested]
    return any(samples in each.shape for each in tensors) or _lists_samples(data, samples)


def _lists_samples(data: BatchData, samples: int, *, of_fields: bool = True) -> bool:
    """True if one of a batch's lists has an item for each sample, as for boxes, of which samples
    have more or fewer; `of_fields` if a short list of tensors of one length may be the fields."""
    if isinstance(data, dict):
        return any(_lists_samples(each, samples, of_fields=False) for each in data.values())
    if not isinstance(data, tuple | list):
        return False
    lengths = {len(t) if t.ndim else 0 for t in data if isinstance(t, torch.Tensor)}
    may_be_fields = of_fields and len(data) <= _FIELDS and len(lengths) == 1
    return (len(data) == samples and not may_be_fields) or any(
        _lists_samples(each, samples, of_fields=False) for each in data
    )


def _cut(leaf: BatchData) -> BatchData:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            with warnings.catch_warnings():  # The only layout that may be empty is a prototype.
                warnings.simplefilter("ignore", UserWarning)
                return torch.nested.nested_tensor([], dtype=leaf.dtype, device=leaf.device)
        return leaf[:0] if leaf.ndim else leaf
    if isinstance(leaf, dict):
        return {key: emptied(item) for key, item in leaf.items()}
    if isinstance(leaf, tuple | list):
        return type(leaf)() if _lists_values(leaf) else type(leaf)(emptied(k) for k in leaf)
    return leaf


def _lists_values(node: BatchData) -> bool:
    """True for a list of samples' values, such as strings, which is not walked."""
    if not isinstance(node, tuple | list) or hasattr(node, "_fields"):
        return False
    if not node or isinstance(node[0], Target):
        return True
    return not isinstance(node[0], torch.Tensor | dict | tuple | list)

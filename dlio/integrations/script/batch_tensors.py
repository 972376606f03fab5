"""Sizes of the tensors of batches that a loader of a script yields."""

import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch


def sizes_of(data: object, tensors: Sequence[torch.Tensor], samples: int) -> int:
    """Return a digest of the sizes of a batch's tensors but for the number of samples; 0 if there
    are none with a dimension of samples and another one, or if samples may be apart in a list."""
    if _is_apart(data, samples):
        return 0
    sizes = []
    for tensor in tensors:
        shape = list(tensor.shape)
        if len(shape) > 1 and samples in shape[:2]:
            shape.remove(samples)
            sizes.append(shape)
    return zlib.crc32(repr(sizes).encode()) | 1 if sizes else 0


def rows_of(data: object) -> frozenset[int]:
    """Return how many rows the tensors of a list in a batch have together, such as the boxes of all
    of its samples."""
    return frozenset(sum(map(len, every)) for every in _lists(data))


def _lists(data: object) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the lists of tensors inside a batch, as those of one field."""
    if isinstance(data, Mapping | list | tuple):
        for each in data.values() if isinstance(data, Mapping) else data:
            tensors = isinstance(each, list | tuple) and all(
                isinstance(t, torch.Tensor) for t in each
            )
            if tensors and all(t.ndim for t in each):
                yield each
            else:
                yield from _lists(each)


def _is_apart(data: object, samples: int) -> bool:
    """True if some sequence in a batch has as many items as there are samples."""
    if isinstance(data, Mapping):
        return any(_is_apart(each, samples) for each in data.values())
    if isinstance(data, list | tuple):
        return len(data) == samples or any(_is_apart(each, samples) for each in data)
    return False

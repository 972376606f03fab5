"""Sizes of the tensors of batches that a loader of a script yields."""

import zlib
from collections.abc import Mapping, Sequence

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


def _is_apart(data: object, samples: int) -> bool:
    """True if some sequence in a batch has as many items as there are samples."""
    if isinstance(data, Mapping):
        return any(_is_apart(each, samples) for each in data.values())
    if isinstance(data, list | tuple):
        return len(data) == samples or any(_is_apart(each, samples) for each in data)
    return False

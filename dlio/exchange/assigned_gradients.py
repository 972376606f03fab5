"""Gradients that no backward of a parameter has made: `torch.autograd.grad` assigned to `.grad`."""

from collections.abc import Iterable
from typing import Final

import torch

_MEAN: Final = "_dlio_mean"
"""Attribute of gradients that are the mean over all ranks: their version when they were."""


def mark_means(parameters: Iterable[torch.Tensor]) -> None:
    """Note that the gradients in place are means over all ranks."""
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            setattr(grad, _MEAN, grad._version)


def has_assigned(parameters: Iterable[torch.Tensor], looks_at_changes: bool) -> bool:
    """True if a gradient is in place that is not the mean.

    Changed ones are not, if `looks_at_changes`; after a backward they may have been clipped. A mean
    that was moved into another tensor is taken for one that is not: to average it again changes
    nothing.
    """
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            version = getattr(grad, _MEAN, None)
            if version is None or (looks_at_changes and version != grad._version):
                return True
    return False

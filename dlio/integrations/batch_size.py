"""Number of samples in a batch of any structure."""

import torch
from torch.utils._pytree import tree_leaves


class BatchSize:
    """Finds the number of samples in the batches of one loader."""

    def __init__(self) -> None:
        self._dim = 0
        """Dimension of the samples in a batch's first tensor."""

    def of(self, batch: object, usual: int | None) -> float:
        """Return the number of samples in a batch: the length of its first tensor in the dimension
        of samples, or 1 without a tensor.

        The dimension is the first in which a tensor has had the length `usual`, the loader's batch
        size: sequences may have their time first. Otherwise it is the first of all.
        """
        leaves = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
        if not leaves:
            return 1.0
        shape = leaves[0].shape
        if usual is not None and usual in shape[:2]:
            self._dim = list(shape).index(usual)
        return float(shape[min(self._dim, len(shape) - 1)])

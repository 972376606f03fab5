"""Samples of other ranks for a rank that an epoch's last, small batch does not reach.

Such a rank has to take part in the step. It computes on a few samples of that batch, as torch's
Join does with its shadow steps, and they count nothing.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Protocol

import numpy as np
import torch

from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.nested_batches import map_leaves


class SmallBatches(Protocol):
    """A pass of which batches may have no samples on a rank."""

    def counts(self, step: int) -> tuple[int, ...]: ...

    def repeated(self, step: int) -> list[int]: ...


def with_repeats(
    feed: BatchStream,
    batches: SmallBatches,
    rank: int,
    made: Callable[[list[int], BatchData], BatchData] | None,
) -> BatchStream:
    """Yield a feed's batches, with samples of others in those that have none of `rank`.

    `made` makes a batch of samples, given the empty one; None if the feed has these samples
    already. The result's count of samples is 0.
    """
    with closing(feed):
        yield None
        step = 0
        for fed in feed:
            assert fed is not None
            if fed.in_place:
                if fed.error is None and not batches.counts(step)[rank]:
                    data = fed.data
                    if made is not None:
                        data = made(batches.repeated(step), data)
                    fed = BatchResult(data, 0, np.empty(0, np.int64), epoch=fed.epoch)
                step += 1
            yield fed
            del fed


def repeated_batch(
    options: LoaderOptions, data: Dataset, device: torch.device | None
) -> Callable[[list[int], BatchData], BatchData]:
    """Return the maker of batches for `with_repeats`, for samples that dlio reads itself."""

    def made(numbers: list[int], empty: BatchData) -> BatchData:
        if data.recipe.mixes:  # Labels of mixed samples have another shape.
            return map_leaves(lambda leaf: _zeros(leaf, len(numbers)), empty)
        batch = options.collate_fn([data[number] for number in numbers])
        if device is None:
            return batch
        return map_leaves(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, batch)

    return made


def _zeros(leaf: BatchData, count: int) -> BatchData:
    is_batched = isinstance(leaf, torch.Tensor) and leaf.ndim
    return leaf.new_zeros((count, *leaf.shape[1:])) if is_batched else leaf

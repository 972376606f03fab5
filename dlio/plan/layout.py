"""How a data set is cut into blocks, and which block holds a sample."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.plan.order import Order

MAX_BLOCK_BYTES = 8 << 20
"""Blocks aim at this many payload bytes …"""
MIN_BLOCKS = 512
"""… or fewer, so that a small data set still has about this many, enough to share out evenly …"""
MIN_BLOCK_BYTES = 1 << 15
"""… but not so small that a block's file is mostly its header."""
_STRETCH = 1 << 18
"""Samples that are looked at together where all of a data set's are."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a data set's samples are cut into blocks, storage position by storage position."""

    starts: npt.NDArray[np.int64]
    """First storage position of each block, then the number of samples; shape (blocks + 1,)."""
    order: Order
    """Storage position -> sample index: sequential for containers, keyed for class folders."""

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    def block_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The block that holds each sample; same shape as `samples`."""
        return self.locate(samples)[0]

    def locate(
        self, samples: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(block, place in the block) of each sample; both of the shape of `samples`."""
        positions = self.order.positions(samples)
        blocks = np.searchsorted(self.starts, positions, side="right") - 1
        return blocks.astype(np.int64), positions - self.starts[blocks]

    def sums(
        self, values: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> npt.NDArray[np.int64]:
        """The sum over each block's samples of what `values` gives for them; shape (blocks,)."""
        sums = np.zeros(self.blocks, np.int64)
        for first in range(0, int(self.starts[-1]), _STRETCH):
            last = min(first + _STRETCH, int(self.starts[-1]))
            found = values(self.order.samples(np.arange(first, last, dtype=np.int64)))
            low = int(np.searchsorted(self.starts, first, side="right")) - 1
            high = int(np.searchsorted(self.starts, last, side="left"))
            cuts = np.maximum(self.starts[low:high], first) - first
            sums[low:high] += np.add.reduceat(found, cuts)
        return sums

    def samples_of(self, block: int) -> npt.NDArray[np.int64]:
        """The sample indices of one block, in storage order."""
        return self.order.samples(np.arange(self.starts[block], self.starts[block + 1]))


def cut_blocks(
    sizes: npt.NDArray[np.int64], order: Order, units: npt.NDArray[np.int64] | None = None
) -> Layout:
    """Cut a data set into blocks of about even bytes, along a storage order.

    Args:
        sizes: payload bytes of each sample; shape (samples,). Looked at a stretch at a time, so
            that a data set of any length takes little memory.
        order: storage position -> sample index.
        units: storage positions at which groups begin that are read as one, chunks or row groups;
            those that are not larger than a block are not split.
    """
    total = int(sizes.sum(dtype=np.int64))
    target = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, total // MIN_BLOCKS))
    count = max(1, min(len(sizes), round(total / target)))
    # Block k begins with the first sample that starts at or behind k/count of the bytes.
    marks = total * np.arange(1, count, dtype=np.float64) / count
    starts = [np.zeros(1, np.int64)]
    edges = np.zeros(0, np.int64) if units is None else np.append(units, len(sizes))
    before = np.zeros(len(edges), np.int64)
    done = 0
    for first in range(0, len(sizes), _STRETCH):
        positions = np.arange(first, min(first + _STRETCH, len(sizes)), dtype=np.int64)
        ends = done + np.cumsum(sizes[order.samples(positions)], dtype=np.int64)
        here = marks[(marks > done) & (marks <= ends[-1])]
        starts.append(first + np.searchsorted(ends, here, side="left") + 1)
        inside = (edges > first) & (edges <= positions[-1] + 1)
        before[inside] = ends[edges[inside] - 1 - first]
        done = int(ends[-1])
    found = np.concatenate(starts)
    if units is not None:
        found = _snap(found, edges, before)
    found = np.unique(np.append(found[found < len(sizes)], len(sizes)))
    return Layout(found.astype(np.int64), order)


def _snap(
    starts: npt.NDArray[np.int64], edges: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Move what would split a group to the nearer end of it, unless the group is too large.

    Args:
        edges: where groups begin, and the end.
        before: bytes before each of these.
    """
    group = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, len(edges) - 2)
    low, high = edges[group], edges[group + 1]
    whole = before[group + 1] - before[group] <= MAX_BLOCK_BYTES
    nearer = np.where(starts - low <= high - starts, low, high)
    return np.where(whole, nearer, starts)

"""Layout: a data set cut into blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dlio.plan.order import Order

MAX_BLOCK_BYTES = 8 << 20
"""Intended payload bytes of a block, in a data set that is large enough."""
MIN_BLOCKS = 512
"""Intended number of blocks of a smaller data set, enough to share out evenly."""
MIN_BLOCK_BYTES = 1 << 15
"""Least intended payload bytes, so that a block's file is not mostly its header."""
STORAGE_SEED = 0xD110
"""Seed of the storage order of samples that are files of their own."""
_MOST_EVEN = 1 << 31
"""Samples whose numbers can be multiplied by that of blocks."""
_STRETCH = 1 << 18
"""Samples per step when all samples of a data set are visited."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a data set: runs of its samples in storage order."""

    starts: npt.NDArray[np.int64]
    """First storage position of each block, then the number of samples; shape (blocks + 1,)."""
    order: Order
    """Storage position -> sample index: sequential for containers, keyed for class folders."""

    is_even: bool = field(init=False)
    """True if each block begins less than a block's mean length from where it would if all had the
    same length."""

    def __post_init__(self) -> None:
        total, count = int(self.starts[-1]), self.blocks
        mean = total / max(1, count)
        far = np.abs(self.starts - mean * np.arange(count + 1)).max(initial=0.0)
        is_even = 0 < total <= _MOST_EVEN and far < mean - 1
        object.__setattr__(self, "is_even", bool(is_even))

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    def block_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the block of each sample; same shape as `samples`."""
        return self.locate(samples)[0]

    def locate(
        self, samples: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (block, place in the block) of each sample; both of the shape of `samples`."""
        positions = self.order.positions(samples)
        if self.is_even:
            # In a fifth of the time of a search.
            blocks = positions * self.blocks // self.starts[-1]
            blocks -= self.starts[blocks] > positions
            blocks += self.starts[blocks + 1] <= positions
        else:
            blocks = (np.searchsorted(self.starts, positions, side="right") - 1).astype(np.int64)
        return blocks, positions - self.starts[blocks]

    def sums(
        self, values: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> npt.NDArray[np.int64]:
        """Sum the results of `values` over each block's samples; shape (blocks,)."""
        sums = np.zeros(self.blocks, np.int64)
        for first in range(0, int(self.starts[-1]), _STRETCH):
            last = min(first + _STRETCH, int(self.starts[-1]))
            results = values(self.order.samples(np.arange(first, last, dtype=np.int64)))
            low = int(np.searchsorted(self.starts, first, side="right")) - 1
            high = int(np.searchsorted(self.starts, last, side="left"))
            cuts = np.maximum(self.starts[low:high], first) - first
            sums[low:high] += np.add.reduceat(results, cuts)
        return sums

    def samples_of(self, block: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of one block, in storage order."""
        return self.order.samples(np.arange(self.starts[block], self.starts[block + 1]))


def cut_blocks(
    sizes: npt.NDArray[np.int64], order: Order, units: npt.NDArray[np.int64] | None = None
) -> Layout:
    """Cut a data set into blocks of about even bytes, along a storage order.

    The payload bytes of each sample are read a stretch at a time, so that a data set of any length
    takes little memory. At the storage positions `units` chunks or row groups begin, which are read
    as a whole; those that are not larger than a block are not split.
    """
    total = sum_of(sizes)
    target = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, total // MIN_BLOCKS))
    count = max(1, min(len(sizes), round(total / target)))
    # Block k begins with the first sample that starts at or behind k/count of all bytes.
    marks = total * np.arange(1, count, dtype=np.float64) / count
    edges = np.zeros(0, np.int64) if units is None else np.append(units, len(sizes))
    if _are_alike(sizes):
        size = int(sizes[0])
        starts, before = [np.zeros(1, np.int64), _ends_at(marks, size)], edges * size
    else:
        starts, before = _starts_at(marks, sizes, order, edges)
    firsts = np.concatenate(starts)
    if units is not None:
        firsts = _snap(firsts, edges, before)
    firsts = np.unique(np.append(firsts[firsts < len(sizes)], len(sizes)))
    return Layout(firsts.astype(np.int64), order)


def sum_of(sizes: npt.NDArray[np.int64]) -> int:
    """Return the sum of the bytes of samples, at once where one number stands for all."""
    return int(sizes[0]) * len(sizes) if _are_alike(sizes) else int(sizes.sum(dtype=np.int64))


def _are_alike(sizes: npt.NDArray[np.int64]) -> bool:
    """True for a size that is broadcast, as those of arrays are: 10^10 rows take no time then."""
    return len(sizes) > 0 and sizes.strides == (0,)


def _ends_at(marks: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.int64]:
    """Return how many samples of a size reach each mark, which is a number of bytes."""
    if not size:
        return np.zeros(0, np.int64)
    counts = np.ceil(marks / size).astype(np.int64)
    # The quotient is rounded.
    counts -= (counts - 1) * size >= marks
    counts += counts * size < marks
    return counts


def _starts_at(
    marks: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    order: Order,
    edges: npt.NDArray[np.int64],
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    """Return how many samples reach each mark, in pieces, and the bytes before each edge."""
    starts = [np.zeros(1, np.int64)]
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
    return starts, before


def shuffled_layout(sizes: npt.NDArray[np.int64]) -> Layout:
    """Cut samples that are files of their own into blocks, along a keyed order, so that each block
    mixes classes."""
    return cut_blocks(sizes, Order(len(sizes), STORAGE_SEED, shuffled=True))


def _snap(
    starts: npt.NDArray[np.int64], edges: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Move block starts that would split a group to the group's nearer end, unless it is too large.
    Groups begin at the storage positions `edges`, of which the last is the number of samples, with
    `before` bytes before each.
    """
    group = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, len(edges) - 2)
    low, high = edges[group], edges[group + 1]
    whole = before[group + 1] - before[group] <= MAX_BLOCK_BYTES
    nearer = np.where(starts - low <= high - starts, low, high)
    return np.where(whole, nearer, starts)

"""The order of an epoch whose source is read block by block.

Where blocks are streamed from the source and samples are small, a uniformly random order would
read a block's neighbourhood once for each of its samples. This order shuffles the blocks, cuts them
into windows of k, and shuffles the samples within each window. A block's samples are used within
one window, so a block is read once. Like `Order` it is a formula that works for any number of
ranks; but its batches are draws from k blocks, not from the whole data set.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import UsageError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.util.arguments import nearest

DEFAULT_WINDOW: Final = 16
"""Blocks per window of `block` without a number."""
_PATTERN: Final = re.compile(r"block(?:\(\s*(\d{1,9})\s*\))?")
_I64 = npt.NDArray[np.int64]


def window_of(source_order: str) -> int | None:
    """Return the blocks per window of `block(k)`; None for `sample`. Raises UsageError."""
    if source_order == "sample":
        return None
    match = _PATTERN.fullmatch(source_order) if isinstance(source_order, str) else None
    window = int(match[1] or DEFAULT_WINDOW) if match else 0
    if window < 1:
        raise UsageError(
            f"source order {source_order!r}: choose sample, block or block(k); samples are "
            f"shuffled within k blocks, 1 or more{nearest(str(source_order), ('sample', 'block'))}"
        )
    return window


@dataclass(frozen=True)
class BlockOrder(Order):
    """Blocks in a keyed order, samples in a keyed order within each `window` of them.

    Cost: that of an `Order` of a window's samples, and 0.1 ms for each window of the positions
    that are asked for; memory, 16 bytes a block.
    """

    layout: Layout | None = None
    window: int = DEFAULT_WINDOW

    @cached_property
    def blocks(self) -> _I64:
        """Block numbers in the order in which the epoch reads them; shape (blocks,)."""
        assert self.layout is not None
        count = self.layout.blocks
        order = Order(count, self.seed, self.epoch, self.shuffled)
        return order.samples(np.arange(count, dtype=np.int64))

    @cached_property
    def starts(self) -> _I64:
        """Samples before each of these blocks, then all samples; shape (blocks + 1,)."""
        assert self.layout is not None
        sizes = np.diff(self.layout.starts)[self.blocks]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def edges(self) -> _I64:
        """First position of each window, then n; shape (windows + 1,)."""
        return np.append(self.starts[: -1 : self.window], self.n)

    def _map(self, given: _I64, inverse: bool) -> _I64:
        self._check(given)
        if not self.shuffled:
            return given.copy()
        assert self.layout is not None
        flat = given.reshape(-1)
        if inverse:
            block, place = self.layout.locate(flat)
            turn = Order(len(self.blocks), self.seed, self.epoch).positions(block)
            return self._within(self.starts[turn] + place, True).reshape(given.shape)
        stored = self._within(flat, False)
        turn = np.searchsorted(self.starts, stored, side="right") - 1
        place = self.layout.starts[self.blocks[turn]] + stored - self.starts[turn]
        return self.layout.order.samples(place).reshape(given.shape)

    def _within(self, positions: _I64, inverse: bool) -> _I64:
        """Positions shuffled within their windows, or back."""
        window = np.searchsorted(self.edges, positions, side="right") - 1
        moved = np.empty_like(positions)
        by_window = np.argsort(window, kind="stable")
        windows, begins = np.unique(window[by_window], return_index=True)
        for number, here in zip(windows.tolist(), np.split(by_window, begins[1:]), strict=True):
            first = self.edges[number]
            seed = xxhash.xxh3_64_intdigest(f"{self.seed}.{number}".encode())
            order = Order(int(self.edges[number + 1] - first), seed, self.epoch)
            moved[here] = first + order._map(positions[here] - first, inverse)
        return moved

    def span(self) -> tuple[_I64, _I64]:
        """Return the positions (first, end) between which each block's samples are used; both of
        shape (blocks,)."""
        window = np.arange(len(self.blocks)) // self.window
        first, last = np.empty_like(self.blocks), np.empty_like(self.blocks)
        first[self.blocks], last[self.blocks] = self.edges[window], self.edges[window + 1]
        return first, last

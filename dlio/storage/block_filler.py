"""Filling tiers from the source in the background, in the order in which blocks are needed."""

import threading
from collections.abc import Callable, Iterator
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.storage.hierarchy import Hierarchy
from dlio.util.threads import Workers

IN_FLIGHT_BYTES: Final = 64 << 20
"""Approximate bytes of the blocks that are read at a time."""
_CHUNK: Final = 1 << 14
_WAIT_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 10.0


def blocks_in_order(layout: Layout, order: Order, wanted: npt.NDArray[np.bool_]) -> Iterator[int]:
    """Yield the wanted blocks in the order of their first use in an epoch, then the unused ones.

    The order is evaluated only as far as blocks are consumed.

    Args:
        wanted: mask; shape (blocks,).
    """
    left = wanted.copy()
    for start in range(0, len(order), _CHUNK):
        if not left.any():
            return
        positions = np.arange(start, min(start + _CHUNK, len(order)), dtype=np.int64)
        blocks = layout.block_of(order.samples(positions))
        different, first = np.unique(blocks, return_index=True)
        for block in different[np.argsort(first)]:
            if left[block]:
                left[block] = False
                yield int(block)
    yield from np.flatnonzero(left).tolist()


def filler_threads(block_bytes: npt.NDArray[np.int64], requests: int) -> int:
    """Return the number of blocks to bring at a time.

    There are as many as requests, unless their bytes exceed those that may be in flight; 2 at
    least.

    Args:
        block_bytes: file bytes of each block; shape (blocks,).
    """
    largest = int(block_bytes.max(initial=1))
    return max(2, min(requests, IN_FLIGHT_BYTES // largest))


class BlockFiller:
    """Threads that bring blocks into a hierarchy until all are there, or it is closed.

    Each rank of a node has one, and all go through the same list. A block that another rank is
    filling is skipped and looked at again at the end, so that nobody waits while there is work.

    Args:
        blocks: makes the iterator of blocks to bring; called by the first thread.
        threads: number of blocks that are brought at a time.
    """

    def __init__(
        self, hierarchy: Hierarchy, blocks: Callable[[], Iterator[int]], threads: int = 2
    ) -> None:
        self._hierarchy = hierarchy
        self._blocks = blocks
        self._lock = threading.Lock()
        self._work: Iterator[int] | None = None
        self._workers = Workers("dlio-fill", self._run, threads, stop_timeout_s=_CLOSE_TIMEOUT_S)
        self._closing = self._workers.stopping
        self._workers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks that can be brought are there; False after `timeout_s`."""
        return self._workers.wait(timeout_s)

    def close(self) -> None:
        """Stop after the blocks that are being filled. A source that hangs is not waited for."""
        self._workers.close()

    def _next(self) -> int | None:
        with self._lock:
            if self._work is None:
                self._work = self._blocks()
            return next(self._work, None)

    def _run(self, _: int) -> None:
        try:
            self._fill()
        except Exception:
            # A source that hung and answers at last finds its tier closed.
            if not self._closing.is_set():
                raise

    def _fill(self) -> None:
        fill = self._hierarchy.fill
        busy: list[int] = []
        while not self._closing.is_set() and (block := self._next()) is not None:
            if not fill(block, timeout_s=0):
                busy.append(block)
        while busy and not self._closing.wait(_WAIT_S):
            busy = [
                block
                for block in busy
                if not fill(block, timeout_s=0) and self._hierarchy.can_fill(block)
            ]

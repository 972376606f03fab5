"""Streamed blocks: in shared memory only for as long as their samples are used.

They serve orders that go through the source block by block. Each node has a folder for them that
its ranks share. A block is read once, whole, by whichever rank needs it first, a little ahead of
its use. It is removed when all ranks of the node are done with it; each rank writes its position
to a file next to the blocks.
"""

import os
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.plan.block_order import BlockOrder
from dlio.storage.block_fetcher import Filler
from dlio.storage.hierarchy import Hierarchy
from dlio.util.trusted_files import open_file

_WAIT_S: Final = 0.5


class StreamProgress:
    """The position of each rank of a node in its pass, in memory that they share. `folder` is a
    descriptor, and `rank` is the number of this one among the `ranks` on this node."""

    def __init__(self, folder: int, ranks: int, rank: int) -> None:
        # A file of the tier, not a message: ranks of a node are at different steps, and none may
        # wait for another to learn how far it is. Discarding at a fixed distance behind the own
        # position made ranks read blocks again, 2.4 times on average.
        descriptor = open_file(folder, "progress", os.O_RDWR | os.O_CREAT)
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(16 * ranks)
            self._all = np.memmap(file, np.int64, "r+", shape=(ranks, 2))
        self._mine = self._all[rank]
        self._living = np.arange(ranks)

    def keep(self, living: Sequence[int]) -> None:
        """Wait for some of the ranks only: the others are lost. `living` are numbers among the
        ranks on this node."""
        self._living = np.asarray(living, np.int64)

    def tell(self, generation: int, position: int) -> None:
        """Say that this rank is done with the positions below `position`. `generation` is the
        number of the pass, from 1."""
        self._mine[:] = generation, position

    def span(self, generation: int) -> tuple[int, int] | None:
        """Return (least, greatest) position of the ranks, None if they are in different passes."""
        everyone = self._all[self._living]
        # Positions of different passes cannot be compared: nothing is removed meanwhile.
        if (everyone[:, 0] != generation).any():
            return None
        return int(everyone[:, 1].min()), int(everyone[:, 1].max())


class BlockStream(Filler):
    """Brings the streamed blocks of a pass and removes them. Owner: the pass, which closes it.

    `here` is a mask of the blocks whose home is this node in this pass, which begins at `position`;
    the blocks of the positions up to `ahead` after those that are done are brought, `threads` of
    them at a time.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        order: BlockOrder,
        here: npt.NDArray[np.bool_],
        position: int,
        ahead: int,
        progress: StreamProgress,
        generation: int,
        threads: int,
    ) -> None:
        self._hierarchy = hierarchy
        self._first, self._last = order.span()
        used = np.diff(order.starts) > 0  # All of a block's samples may be left out.
        self._blocks = order.blocks[here[order.blocks] & used]
        self._ahead = ahead
        self._progress, self._generation = progress, generation
        progress.tell(generation, position)
        self._position = position
        self._next = 0
        self._swept: tuple[int, int] | None = None
        self._condition = threading.Condition()
        hierarchy.targets.stream(here, self._is_over)
        super().__init__(threads if len(self._blocks) else 0, "dlio-stream", self._wake)

    def done(self, position: int) -> None:
        """Say that this rank has used and sent the samples below `position`."""
        self._progress.tell(self._generation, position)
        with self._condition:
            self._position = position
            self._condition.notify_all()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _fill(self) -> None:
        while not self._closing.is_set():
            self._sweep()
            block = self._turn()
            if block is not None:
                # If another rank is filling it, nobody needs to wait here.
                self._hierarchy.block_fetcher.fill(block, timeout_s=0)

    def _turn(self) -> int | None:
        """Return the next block to bring, None after a while without one and at the end."""
        with self._condition:
            while self._next < len(self._blocks):
                block = int(self._blocks[self._next])
                if self._last[block] <= self._position:
                    self._next += 1
                elif self._first[block] <= self._position + self._ahead:
                    self._next += 1
                    return block
                else:
                    break
            if not self._closing.is_set():
                self._condition.wait(_WAIT_S)
            return None

    def _is_over(self, block: int) -> bool:
        span = self._progress.span(self._generation)
        return span is not None and bool(self._last[block] <= span[0])

    def _sweep(self) -> None:
        """Remove the blocks that no rank of the node uses soon, also those of earlier passes."""
        span = self._progress.span(self._generation)
        with self._condition:
            if span is None or span == self._swept:
                return
            self._swept = span
        streamed = self._hierarchy.targets.streamed_blocks()
        # Asked for after the list: by an older position, a block that has come since would seem
        # to be too far ahead, and would be read again.
        span = self._progress.span(self._generation)
        if span is None:
            return
        least, greatest = span
        for block in streamed:
            if self._last[block] <= least or self._first[block] > greatest + self._ahead:
                self._hierarchy.drop_streamed(block)

"""Blocks that pass through: of a source whose order is block by block, in shared memory for as long
as their samples are used.

Each node has a folder of its own for them, which its ranks share: a block is read once, whole, by
whichever rank comes first, a little ahead of its use; and is removed when all ranks of the node
are done with it, which they tell each other in a file beside the blocks.
"""

import os
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.plan.block_order import BlockOrder
from dlio.storage.hierarchy import Hierarchy
from dlio.util.threads import Workers

_WAIT_S: Final = 0.5
_CLOSE_TIMEOUT_S: Final = 10.0


class Progress:
    """How far each rank of a node is, in memory that they share.

    Args:
        folder: of the blocks that pass through.
        ranks: of this node.
        rank: this one's number among them.
    """

    def __init__(self, folder: str, ranks: int, rank: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(os.path.join(folder, "progress"), flags, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(16 * ranks)
            self._all = np.memmap(file, np.int64, "r+", shape=(ranks, 2))
        self._mine = self._all[rank]

    def tell(self, generation: int, position: int) -> None:
        """Done with what is below `position` of pass number `generation`, from 1."""
        self._mine[:] = generation, position

    def span(self, generation: int) -> tuple[int, int] | None:
        """(least, greatest) position of all ranks; None where they are not in one pass."""
        everyone = self._all.copy()
        if (everyone[:, 0] != generation).any():
            return None
        return int(everyone[:, 1].min()), int(everyone[:, 1].max())


class Passing:
    """Brings a pass's blocks and takes them away. Owner: the pass, which closes it.

    Args:
        hierarchy: one that blocks may pass through.
        here: those whose home this node is for this pass; shape (blocks,).
        position: where the pass begins.
        ahead: positions beyond those that are done with whose blocks are brought.
        progress: of this node's ranks.
        generation: number of the pass.
        threads: that bring them.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        order: BlockOrder,
        here: npt.NDArray[np.bool_],
        position: int,
        ahead: int,
        progress: Progress,
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
        hierarchy.let_pass(here, self._is_over)
        self._workers = Workers(
            "dlio-stream",
            self._bring,
            threads if len(self._blocks) else 0,
            wake=self._wake,
            stop_timeout_s=_CLOSE_TIMEOUT_S,
        )
        self._closing = self._workers.stopping
        self._workers.start()

    def done(self, position: int) -> None:
        """This rank has used, and sent, what is below `position`."""
        self._progress.tell(self._generation, position)
        with self._condition:
            self._position = position
            self._condition.notify_all()

    def close(self) -> None:
        """Stop after the blocks that are being brought."""
        self._workers.close()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _bring(self, _: int) -> None:
        try:
            while not self._closing.is_set():
                self._sweep()
                block = self._turn()
                if block is not None:
                    # Another rank may be at it: then it need not be waited for.
                    self._hierarchy.fill(block, timeout_s=0)
        except Exception:
            # What a source that hung gives at last finds the folder closed.
            if not self._closing.is_set():
                raise

    def _turn(self) -> int | None:
        """The next block to bring; None after a while without one, and at the end."""
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
        """Take away what no rank of the node is to use soon; of an earlier pass, too."""
        span = self._progress.span(self._generation)
        with self._condition:
            if span is None or span == self._swept:
                return
            self._swept = span
        least, greatest = span
        for block in self._hierarchy.passing_blocks():
            if self._last[block] <= least or self._first[block] > greatest + self._ahead:
                self._hierarchy.let_go(block)

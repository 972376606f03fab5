"""The tier that each block of a data set is to be in on this node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.storage.tier import Tier


@dataclass(frozen=True, slots=True)
class PinnedTiers:
    """The tier of this node that keeps each block for the whole job."""

    tier: npt.NDArray[np.int8]
    """Number of the tier, -1 for blocks that this node does not keep; shape (blocks,)."""


def _never(_: int) -> bool:
    return False


class TierTargets:
    """A node's tiers, and which of them each block belongs in.

    A block is *pinned* to one tier for the whole job, or it is *streamed*: it is in the last tier
    for as long as a pass uses its samples, or it belongs in no tier. Owns the tiers.

    Thread-safe: the mask of streamed blocks only ever grows.

    Args:
        tiers: fastest first.
    """

    def __init__(self, tiers: Sequence[Tier], pins: PinnedTiers) -> None:
        self.tiers = list(tiers)
        self.pins = pins
        self._streamed: npt.NDArray[np.bool_] | None = None
        self._is_over: Callable[[int], bool] = _never

    @property
    def can_stream(self) -> bool:
        """True if there is a tier for streamed blocks."""
        return self._streamed is not None

    def add_stream_tier(self, tier: Tier) -> None:
        """Append the tier that streamed blocks go through."""
        self.tiers.append(tier)
        self._streamed = np.zeros(len(self.pins.tier), np.bool_)

    def stream(self, blocks: npt.NDArray[np.bool_], is_over: Callable[[int], bool]) -> None:
        """Stream these blocks too, except for those that are pinned.

        Args:
            blocks: mask; shape (blocks,).
            is_over: True for a block that every rank of the node is done with, so that it is not
                read again.
        """
        assert self._streamed is not None
        self._streamed |= blocks & (self.pins.tier < 0)
        self._is_over = is_over

    def number(self, block: int) -> int:
        """Return the number of the tier that a block belongs in, -1 for none."""
        number = int(self.pins.tier[block])
        if number < 0 and self._streamed is not None and self._streamed[block]:
            return len(self.tiers) - 1
        return number

    def is_pinned(self, block: int) -> bool:
        """True for a block that a tier keeps, False for one that is streamed or in no tier."""
        return bool(self.pins.tier[block] >= 0)

    def is_over(self, block: int) -> bool:
        """True for a streamed block that is not needed any more in this pass."""
        return not self.is_pinned(block) and self._is_over(block)

    @property
    def by_speed(self) -> list[int]:
        """Numbers of the tiers, fastest first: streamed blocks are in memory."""
        numbers = list(range(len(self.tiers)))
        return [numbers[-1], *numbers[:-1]] if self.can_stream else numbers

    def streamed_blocks(self) -> set[int]:
        """Return the streamed blocks that are in their tier now."""
        return self.tiers[-1].blocks() if self.can_stream else set()

    def close(self) -> None:
        """Close the tiers."""
        for tier in self.tiers:
            tier.close()

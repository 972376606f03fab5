"""Checks of the room in tiers, before hours are spent on filling them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlio.errors import TierFull, UsageError
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.util.units import format_bytes


def check_size(specs: Sequence[TierSpec], block_bytes: npt.NDArray[np.int64]) -> None:
    """Raise UsageError for a tier that has no room for a single block."""
    smallest = int(block_bytes.min(initial=1 << 62))
    for spec in specs:
        if spec.capacity < smallest:
            raise UsageError(
                f"tier {spec} is too small for a single block of {format_bytes(smallest)}: give "
                "it more capacity, or leave it out"
            )


def check_room(
    tiers: Sequence[Tier], pinned_in: npt.NDArray[np.int8], block_bytes: npt.NDArray[np.int64]
) -> None:
    """Raise TierFull now, not after an hour of filling, if a tier has too little room."""
    for number, tier in enumerate(tiers):
        if not tier.writable:
            continue
        pinned = np.flatnonzero(pinned_in == number)
        here = np.fromiter(tier.blocks(), np.int64)
        wanted = int(block_bytes[np.setdiff1d(pinned, here)].sum())
        if wanted > tier.free_bytes():
            place = "shared memory" if tier.kind == "ram" else tier.spec.root
            raise TierFull(
                f"tier {tier.spec} needs {format_bytes(wanted)} more, but {place} has only "
                f"{format_bytes(tier.free_bytes())} free: lower its capacity in --tiers, or "
                "free space"
            )

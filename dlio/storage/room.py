"""The room that is left in a tier, where the sizes of samples become known as they come."""

import os

from dlio.errors import TierFull
from dlio.storage.tier import Tier
from dlio.util.forks import new_lock
from dlio.util.units import format_bytes


class TierRoom:
    """Keeps a tier within its capacity. Thread-safe.

    The folder is looked at again when half of the room that was left may be used up, so that
    processes that share it exceed the capacity by little.

    Args:
        tier: not owned.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = new_lock()
        self._left = 0
        """Bytes that may be added before the folder is looked at again."""

    def take(self, count: int) -> None:
        """Say that `count` bytes are added. Raises TierFull where the capacity is used up."""
        with self._lock:
            if self._left < count:
                room = self._tier.spec.capacity - _occupied(self._tier.folder)
                if room < count:
                    raise TierFull(
                        f"tier {self._tier.path} has no room for more: samples are larger than the "
                        f"first ones, and its {format_bytes(self._tier.spec.capacity)} are used up"
                    )
                self._left = max(count, room // 2)
            self._left -= count


def _occupied(folder: int) -> int:
    total = 0
    for name in os.listdir(folder):
        if name.endswith((".blk", ".part")):
            try:
                total += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return total

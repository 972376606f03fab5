"""The processor cores that this process may use."""

import os

__all__ = ["available_cores"]


def available_cores() -> int:
    """Return the number of cores that this process may use: its affinity, not the machine's."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1

"""The processor cores that this process may use."""

import os


def available_cores() -> int:
    """Return the number of cores in this process's affinity mask, not that of the machine."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1

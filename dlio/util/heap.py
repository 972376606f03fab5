"""The C library's heap, for programs that allocate the same large pieces again and again.

A training step on a CPU frees tens of MiB and allocates them again. glibc returns the free end of
its heap to the system whenever it exceeds 64 MiB, and at the next step the system clears each page
at its first use: with a LeNet and batches of 256 these page faults took a third of a step, in some
processes and not in others, by the order of the heap.
"""

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""
_SETTINGS: Final = {
    _TRIM_THRESHOLD: 2**31 - 1,
    _TOP_PAD: 64 << 20,
    _MMAP_THRESHOLD: 32 << 20,  # The largest that glibc takes.
}


def keep_freed_memory() -> bool:
    """Make this process keep memory that it frees, in pieces of up to 32 MiB, for later use.

    Environment variables such as MALLOC_TRIM_THRESHOLD_ are overridden; another allocator, such as
    jemalloc by LD_PRELOAD, is not concerned.

    Returns False, and nothing changes, if the C library has no mallopt.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    taken = [mallopt(name, value) for name, value in _SETTINGS.items()]
    return all(taken)

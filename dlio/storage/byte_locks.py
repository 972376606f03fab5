"""Locks on single bytes of a file: the kernel ends them with their process."""

import fcntl
import os
import struct


def lock_byte(descriptor: int, at: int, kind: int = fcntl.F_WRLCK, count: int = 1) -> bool:
    """Lock or unlock a byte of an open file, or `count` of them from there on.

    False, and nothing is locked, when another process holds the lock of one.
    """
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, at, count, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True

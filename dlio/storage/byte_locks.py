"""Locks on single bytes of a file: the kernel ends them with their process."""

import fcntl
import os
import struct

__all__ = ["lock_byte"]


def lock_byte(descriptor: int, at: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Lock or unlock one byte of an open file. False when another process holds the lock."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True

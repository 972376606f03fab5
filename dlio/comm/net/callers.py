"""The callers of a port of this machine, by the kernel's table of sockets."""

import os
from typing import Final

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LOOPBACK: Final = ("0100007F", "0000000000000000FFFF00000100007F")
"""The second is how a socket of IPv6 calls it."""
_CALLING: Final = ("01", "02")
"""States of a socket that has connected, or that tries to."""
_REMOTE, _STATE, _USER = 2, 3, 7
"""Columns."""


def is_called_by_own_user(port: int) -> bool:
    """True if a process of this user has called a port at loopback, whether or not it was accepted.

    True also where the kernel does not tell.
    """
    wanted = [f"{address}:{port:04X}" for address in _LOOPBACK]
    rows: list[str] = []
    try:
        for table in _TABLES:
            with open(table, encoding="ascii") as file:
                rows += file.read().splitlines()[1:]
    except OSError:
        return True
    own = str(os.geteuid())
    calls = (row.split() for row in rows)
    return any(
        call[_REMOTE] in wanted and call[_STATE] in _CALLING and call[_USER] == own
        for call in calls
    )

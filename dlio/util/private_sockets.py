"""Sockets in private folders: only processes of this user can connect to them."""

import os
import socket
import stat
import struct
from typing import Final

from dlio.errors import TierError
from dlio.util.trusted_files import closing_descriptor

_BACKLOG: Final = 1024
_CREDENTIALS: Final = struct.Struct("3i")


def listen(folder: int, name: str) -> socket.socket:
    """Return a socket that listens at a name in a private folder (a descriptor), for this user
    alone.

    Paths of sockets are limited to 107 characters.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def connect(folder: str, name: str, timeout_s: float | None) -> socket.socket:
    """Connect to a socket in a private folder.

    Raises OSError if nobody listens, TierError if the folder belongs to another user.
    """
    how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_descriptor(os.open(folder, how)) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise TierError(f"{folder} is not yours alone (0700): remove it and start again")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"/proc/self/fd/{descriptor}/{name}")
        except BaseException:
            connection.close()
            raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """True if a process of this user has connected."""
    return user_of(connection) == os.geteuid()


def user_of(connection: socket.socket) -> int:
    """Return the number of the user whose process is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])

"""A listener that lets few strangers in at a time, and those for seconds.

A connection is a stranger's until its greeting is over. Beyond a fixed number of them, the oldest
is closed for a new one if it had time to begin a greeting, and if its owner, which may be slow on a
busy machine, has looked at it since; otherwise the new one is. One that has proved by its first
message to know the secret has more time. A rank whose connection was closed connects again. If this
process has no descriptor left, a reserve serves to accept a connection and close it, so that the
listener does not stay readable for ever.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Final

_MOST: Final = 64
"""Connections of strangers at a time."""
_PATIENCE_S: Final = 5.0
"""Time for a greeting."""
_TURN_S: Final = 0.1
"""Time for the first message of a greeting while others wait for the place."""
_TURNS: Final = 2
"""Calls of `accept` after which the owner has looked at a connection."""
_PROVED_S: Final = 2.0
"""Time for the rest of it while others wait."""
_AT_ONCE: Final = 256
"""Connections taken in one turn, so that others of the same thread get theirs."""
_REST_S: Final = 0.01
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """Connections of strangers at a listener that does not block. Owner of the listener; not
    thread-safe.

    `close` is called with a connection that has to go; it closes it, and calls `left`.
    """

    def __init__(
        self,
        listener: socket.socket,
        close: Callable[[socket.socket], object],
        *,
        most: int = _MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener = listener
        self._close, self._most, self._clock = close, most, clock
        self._strangers: dict[socket.socket, tuple[float, int]] = {}
        """When each was accepted, in seconds and in turns, the oldest first."""
        self._proved: dict[socket.socket, float] = {}
        """When those were accepted that have proved to know the secret."""
        self._turn = 0
        self._reserve: int | None = _spare()
        self.turned_away = 0
        """Connections that were closed for others, for lack of descriptors, or after a while."""

    def accept(self) -> list[socket.socket]:
        """Return new connections, which do not block."""
        accepted: list[socket.socket] = []
        self._turn += 1
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self.listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_room()
                    break
                if isinstance(error, ConnectionAbortedError):
                    continue
                break
            if not self._has_place():
                self.turned_away += 1
                connection.close()
                continue
            connection.setblocking(False)
            self._strangers[connection] = self._clock(), self._turn
            accepted.append(connection)
        return [each for each in accepted if each in self._strangers]

    def proved(self, connection: socket.socket) -> None:
        """Note that a connection has proved to know the secret; others may have repeated this."""
        since = self._strangers.pop(connection, None)
        if since is not None:
            self._proved[connection] = since[0]

    def left(self, connection: socket.socket) -> None:
        """Note that a connection has ended, or is a stranger's no more."""
        self._strangers.pop(connection, None)
        self._proved.pop(connection, None)

    def tidy(self) -> None:
        """Close the connections of strangers that took too long."""
        due = self._clock() - _PATIENCE_S
        held = [(connection, since) for connection, (since, _) in self._strangers.items()]
        for connection, since in [*held, *self._proved.items()]:
            if since <= due:
                self._turn_away(connection)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._proved)

    def close(self) -> None:
        """Close the listener; connections belong to others."""
        self.listener.close()
        self._release()

    def _has_place(self) -> bool:
        if len(self) < self._most:
            return True
        now = self._clock()
        # Otherwise a flood of strangers would push out each rank before its greeting is over.
        for connection, (since, turn) in self._strangers.items():
            if now - since >= _TURN_S and self._turn - turn >= _TURNS:
                self._turn_away(connection)
                return True
            break
        for connection, since in self._proved.items():
            if now - since >= _PROVED_S:
                self._turn_away(connection)
                return True
        return False

    def _turn_away(self, connection: socket.socket) -> None:
        self.turned_away += 1
        self._close(connection)
        self.left(connection)

    def _make_room(self) -> None:
        """Give the descriptors of strangers back; close a connection in place of the reserve."""
        for connection in [*self._strangers, *self._proved]:
            self._turn_away(connection)
        self._release()
        with contextlib.suppress(OSError):
            self.listener.accept()[0].close()
            self.turned_away += 1
        try:
            self._reserve = _spare()
        except OSError:
            time.sleep(_REST_S)  # The listener stays readable, and would keep this thread busy.

    def _release(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None


def _spare() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

"""Figures of running processes, for `dlio top`.

A process that publishes figures listens at an abstract socket, `@dlio-live-<uid>-<pid>-<token>`,
without a file: it is gone with the process. Whoever connects as the same user, or as root, gets
one JSON object, and the connection ends. Nothing is counted or copied unless someone asks.
"""

import json
import logging
import os
import secrets
import shlex
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from dlio.util.closable import Closable
from dlio.util.printable import log_line
from dlio.util.private_sockets import is_own, user_of
from dlio.util.threads import Workers

Figures = Mapping[str, Any]
"""Figures of one part of a process, as JSON takes them; `kind` says which these are."""

VERSION: Final = 1
"""Of the answers; others are not shown."""
_PREFIX: Final = "dlio-live-"
_SOCKETS: Final = "/proc/net/unix"
_BACKLOG: Final = 16
_SEND_TIMEOUT_S: Final = 1.0
_AGAIN_S: Final = 0.5
_MOST_BYTES: Final = 1 << 20
_MOST_COMMAND: Final = 200


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Figures of one process, of one moment."""

    pid: int
    command: str
    """Its command line."""
    time: float
    """The moment, in seconds of the machine's monotonic clock."""
    parts: Sequence[Figures]


class PublishedFigures(Closable):
    """Figures that are published until `close`; a context manager."""

    def __init__(self, kind: str, figures: Callable[[], Figures]) -> None:
        self._kind, self.method = kind, weakref.WeakMethod(figures)
        """`method` gives None once the owner of the figures has ended without closing them."""

    def close(self) -> None:
        """Publish these no longer; with the last ones of the process its socket is closed."""
        _board.remove(self)

    def read(self) -> Figures | None:
        """Return the figures of now; None if their owner is gone."""
        method = self.method()
        if method is None:
            return None
        try:
            return {"kind": self._kind, **method()}
        except Exception as error:  # An owner that is being closed; the thread answers on.
            return {"kind": self._kind, "problem": str(error)}


def publish(kind: str, figures: Callable[[], Figures]) -> PublishedFigures:
    """Answer `dlio top` with figures of this process, of the kind `data`, `training`, `search` or
    `work`.

    `figures` is a method, called in a thread of its own when someone asks. Its object is not kept
    alive by this.
    """
    made = PublishedFigures(kind, figures)
    _board.add(made)
    return made


def ask_all(timeout_s: float) -> list[ProcessFigures]:
    """Return the answers of this user's processes on this machine, in the order of their numbers.

    Processes that do not answer in time are left out.
    """
    answers = [_ask(name, timeout_s) for name in _listening()]
    return sorted((each for each in answers if each is not None), key=lambda each: each.pid)


def _listening() -> list[str]:
    prefix = f"@{_PREFIX}{os.geteuid()}-"
    with suppress(OSError), open(_SOCKETS, encoding="utf-8", errors="replace") as table:
        names = {line.rsplit(" ", 1)[-1].strip() for line in table}
        return sorted(name for name in names if name.startswith(prefix))
    return []


def _ask(name: str, timeout_s: float) -> ProcessFigures | None:
    """Return a process's answer; None if it does not give one that can be read."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.connect("\0" + name[1:])
            if not is_own(connection):
                return None  # Another user listens at a name like ours.
            text = bytearray()
            while piece := connection.recv(1 << 16):
                text += piece
                left = deadline - time.monotonic()
                if left <= 0 or len(text) > _MOST_BYTES:
                    return None
                connection.settimeout(left)
            answer = json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None
    return _checked(answer)


def _checked(answer: object) -> ProcessFigures | None:
    """Return an answer of this version; None for others."""
    if not isinstance(answer, dict) or answer.pop("version", None) != VERSION:
        return None
    parts = answer.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return None
    kinds = {"pid": int, "command": str, "time": float, "parts": list}
    if answer.keys() != kinds.keys():
        return None
    if not all(isinstance(answer[name], kind) for name, kind in kinds.items()):
        return None
    return ProcessFigures(**answer)


class _FigureServer:
    """The socket of this process, and the thread that answers."""

    def __init__(self, answer: Callable[[], Figures]) -> None:
        self._answer = answer
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._workers = Workers("dlio-live", self._serve, wake=self._wake)
        try:
            name = f"{_PREFIX}{os.geteuid()}-{os.getpid()}-{secrets.token_hex(4)}"
            self.listener.bind(f"\0{name}")
            self.listener.listen(_BACKLOG)
            self._workers.start()
        except BaseException:
            self.listener.close()
            raise

    def close(self) -> None:
        self._workers.close()
        self.listener.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)

    def _serve(self, _: int) -> None:
        while not self._workers.stopping.is_set():
            try:
                connection, _address = self.listener.accept()
            except OSError:  # The end, or too many open files.
                self._workers.stopping.wait(_AGAIN_S)
                continue
            with connection, suppress(OSError):
                if user_of(connection) in {0, os.geteuid()}:
                    connection.settimeout(_SEND_TIMEOUT_S)
                    connection.sendall(json.dumps(self._answer()).encode())


class _FigureBoard:
    """All figures that this process publishes. There is a server while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: list[PublishedFigures] = []
        self._server: _FigureServer | None = None

    def add(self, published: PublishedFigures) -> None:
        with self._lock:
            living = [each for each in self._published if each.method() is not None]
            self._published = [*living, published]
            if self._server is None:
                try:
                    self._server = _FigureServer(self._answer)
                except (OSError, RuntimeError) as error:
                    log_line(logging.INFO, "dlio: `dlio top` will not show this process: %s", error)

    def remove(self, published: PublishedFigures) -> None:
        server = None
        with self._lock:
            if published in self._published:
                self._published.remove(published)
            if not self._published:
                server, self._server = self._server, None
        if server is not None:
            server.close()

    def forget(self) -> None:
        """Start afresh in a forked child, which has none of its parent's threads."""
        server, self._server = self._server, None
        self._lock, self._published = threading.Lock(), []
        if server is not None:
            server.listener.close()  # This copy would keep it open after the parent's end.

    def _answer(self) -> Figures:
        with self._lock:
            published = list(self._published)
        parts = [part for each in published if (part := each.read()) is not None]
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "command": shlex.join(sys.argv)[:_MOST_COMMAND],
            "time": time.monotonic(),
            "parts": parts,
        }


_board = _FigureBoard()
os.register_at_fork(after_in_child=_board.forget)

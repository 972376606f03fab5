"""Mailboxes of ranks in one process, a wire between two of them, and strangers."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import xxhash

from dlio.comm.net.address import LOOPBACK
from dlio.comm.net.keys import Caller, Keys
from dlio.comm.net.peer_link import FrameHead, Seal
from dlio.comm.torch_mail import Mail, Message
from tests.conftest import in_time

__all__ = [
    "Place",
    "Traitor",
    "Wire",
    "failure",
    "is_closed",
    "mailboxes",
    "received",
]

Place = tuple[str, int]


def mailboxes(
    ranks: int = 2, through: Callable[[int, Place], Place] = lambda _, place: place
) -> list[Mail]:
    """Return the mailboxes of all ranks.

    Args:
        through: returns the place at which others call a rank, from the rank and its own place.
    """
    values: list[Any] = [None] * ranks
    everyone = threading.Barrier(ranks)
    made: list[Mail | None] = [None] * ranks

    def make(rank: int) -> None:
        def gather(value: tuple[str, int, str]) -> list[tuple[str, int, str]]:
            host, port = through(rank, value[:2])
            values[rank] = json.loads(json.dumps((host, port, value[2])))
            everyone.wait(60)
            return list(values)

        made[rank] = Mail(rank, gather, LOOPBACK)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [mail for mail in made if mail is not None]


def received(sender: Mail, receiver: Mail, size: int, *, source: int = 0, dest: int = 1) -> bool:
    """True if a message of a size gets through, unchanged, in time."""
    sent = bytearray(k * 7 % 251 for k in range(size))
    inbox = bytearray(size)
    messages = [
        receiver.receive(memoryview(inbox), source, 5),
        sender.send(memoryview(sent), dest, 5),
    ]
    return in_time(lambda: all(each.done() for each in messages)) and inbox == sent


def failure(message: Message, seconds: float = 20) -> str:
    """Return the error of a message, empty if it has none in time."""
    in_time(lambda: message.over or message.error is not None, seconds)
    return str(message.error or "")


def is_closed(connection: socket.socket, seconds: float = 20) -> bool:
    """True if the other side closes a connection in time; all that it sends is skipped."""
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionResetError):
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            return False
    return True


class Wire:
    """Somebody on the way to a rank who can read and change all bytes.

    Args:
        place: of the rank.
        change: called with the number of the connection, the bytes that its caller has sent so
            far, and a piece that follows; returns the piece to pass on, or None to cut it off.
    """

    def __init__(
        self,
        place: Place,
        change: Callable[[int, int, bytes], bytes | None] = lambda _, __, piece: piece,
    ) -> None:
        self._to, self._change = place, change
        self._listener = socket.create_server((LOOPBACK, 0))
        self.place: Place = self._listener.getsockname()[:2]
        self.heard: list[tuple[bytearray, bytearray]] = []
        """Bytes of each connection: its caller's, its answerer's."""
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Cut all connections."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                answerer = socket.create_connection(self._to, 10)
                self._open += [caller, answerer]
                number = len(self.heard)
                self.heard.append((bytearray(), bytearray()))
                for side in (0, 1):
                    ends = (caller, answerer) if side == 0 else (answerer, caller)
                    threading.Thread(
                        target=self._pass, args=(number, side, *ends), daemon=True
                    ).start()

    def _pass(self, number: int, side: int, source: socket.socket, dest: socket.socket) -> None:
        heard = self.heard[number][side]
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                at = len(heard)
                heard += piece
                changed = self._change(number, at, piece) if side == 0 else piece
                if changed is None:
                    break
                dest.sendall(changed)
        for each in (source, dest):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Traitor:
    """Rank 0 of two, which has the job's keys and does with them as it likes."""

    def __init__(self) -> None:
        keys, self._listener = Keys(0), socket.create_server((LOOPBACK, 0))
        values: list[Any] = []

        def gather(value: tuple[str, int, str]) -> list[tuple[str, int, str]]:
            values.extend([(*self._listener.getsockname()[:2], keys.public()), value])
            return values

        self.mail = Mail(1, gather, LOOPBACK)
        keys.meet([value[2] for value in values])
        self.connection = socket.create_connection(values[1][:2], 10)
        greeting = Caller(keys, 1)
        self.connection.sendall(greeting.begin())
        answer = self.connection.recv(greeting.wants, socket.MSG_WAITALL)
        self.connection.sendall(greeting.feed(answer))
        mine, theirs = greeting.session()
        self._seal, self._opener = Seal(mine), Seal(theirs)

    def send(self, kind: int, size: int, body: bytes = b"", *, number: int = 0) -> None:
        """Send a frame with tag 5, and a body that need not have its size."""
        digest = xxhash.xxh3_64_intdigest(body, self._seal.seed) if body else 0
        frame = FrameHead(kind, 0, 0, 5, number, size, digest)
        self.connection.sendall(self._seal.close(frame) + body)

    def answer(self) -> FrameHead:
        """Return the next frame of the other side."""
        self.connection.settimeout(20)
        return self._opener.open(self.connection.recv(Seal.SIZE, socket.MSG_WAITALL))

    def close(self) -> None:
        """Leave."""
        self.connection.close()
        self._listener.close()
        self.mail.close()

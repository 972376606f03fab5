"""A connection of two ranks that have greeted each other: frames, each perhaps with a body.

    frame   u8 kind, u32 generation, u32 channel, i32 tag, u64 number, u64 bytes of the body,
            u64 xxh3_64 of the body, seeded by the connection's key          (little-endian)
    mac     16 bytes: BLAKE2b, keyed for this connection and direction, of the frame's place in the
            stream and of the frame
    body

A frame that was changed, left out, repeated or put elsewhere has a wrong MAC and ends the
connection, and so does a body that was changed. Bodies have no MAC of their own: xxh3 is no
cryptographic hash, but costs a thirtieth of one.
"""

import hashlib
import hmac
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import xxhash

from dlio.comm.net.keys import Answerer, Caller, RefusedConnection

_HEAD: Final = struct.Struct("<B3xIIiQQQ")
_PLACE: Final = struct.Struct("<Q")
_MAC_BYTES: Final = 16
_SINK_BYTES: Final = 1 << 16
_TURN: Final = 512
"""Reads in one turn, so that other connections of the same thread get theirs."""
_T = TypeVar("_T")


class FrameHead(NamedTuple):
    """The head of a message."""

    kind: int
    generation: int
    channel: int
    tag: int
    number: int
    size: int
    """Bytes of the message."""
    digest: int = 0


class Seal:
    """Frames of one direction of a connection, with a key of their own."""

    SIZE: Final = _HEAD.size + _MAC_BYTES

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0
        self.seed: Final = int.from_bytes(hashlib.sha256(b"bodies" + key).digest()[:8], "little")

    def close(self, frame: FrameHead) -> bytes:
        """Return a frame's bytes, as the next of the stream."""
        head = _HEAD.pack(*frame)
        return head + self._mac(head)

    def open(self, sealed: bytes) -> FrameHead:
        """Return the next frame of the stream. Raises RefusedConnection."""
        head = sealed[: _HEAD.size]
        if not hmac.compare_digest(self._mac(head), sealed[_HEAD.size :]):
            raise RefusedConnection("a frame was changed, repeated or left out on its way")
        return FrameHead._make(_HEAD.unpack(head))

    def _mac(self, head: bytes) -> bytes:
        text = _PLACE.pack(self._place) + head
        # The place is part of the MAC, and is not sent: a frame that was repeated, left out or
        # moved does not verify.
        self._place += 1
        return hashlib.blake2b(text, key=self._key, digest_size=_MAC_BYTES).digest()


@dataclass(slots=True, eq=False)
class _Piece(Generic[_T]):
    """A frame to send, with its body."""

    frame: FrameHead
    body: memoryview
    owner: _T | None
    head: bytes = b""
    """The sealed frame, once it has been begun."""
    at: int = 0
    """Bytes sent of head and body together."""


class PeerLink(Generic[_T]):
    """One connection. Owner of the socket, which does not block; not thread-safe.

    `take` is called with each frame that arrives; it returns the memory for its body, of the
    frame's size, or None to skip it. Frames whose kind is not in `with_body` have none. `taken` is
    called once both are complete, `sent` with the owner of each frame that has left.
    """

    def __init__(
        self,
        connection: socket.socket,
        greeting: Caller | Answerer,
        with_body: frozenset[int],
        take: Callable[["PeerLink[_T]", FrameHead], memoryview | None],
        taken: Callable[["PeerLink[_T]", FrameHead], object],
        sent: Callable[[_T], object],
    ) -> None:
        self.connection = connection
        self.ready = False
        """True once both sides have proved who they are."""
        self.closed = False
        self.calls = isinstance(greeting, Caller)
        """True on the side that has connected."""
        self._greeting = greeting
        self._with_body = with_body
        self._take, self._taken, self._sent = take, taken, sent
        self._raw = bytearray(greeting.begin() if isinstance(greeting, Caller) else b"")
        self._out: deque[_Piece[_T]] = deque()
        self._small = bytearray(greeting.wants)
        self._at = 0
        self._frame: FrameHead | None = None
        self._body: memoryview | None = None
        """Memory of the body under way; None for one that is skipped."""
        self._seal: Seal
        self._opener: Seal

    @property
    def peer(self) -> int:
        """The other side's rank, -1 before it is known."""
        return self._greeting.peer

    @property
    def wants_write(self) -> bool:
        """True if there is something to send now."""
        return bool(self._raw) or (self.ready and bool(self._out))

    @property
    def idle(self) -> bool:
        """True if everything is sent."""
        return not self._raw and not self._out

    def send(
        self, frame: FrameHead, body: memoryview | None = None, owner: _T | None = None
    ) -> None:
        """Put a frame at the end of the queue."""
        self._out.append(_Piece(frame, memoryview(b"") if body is None else body, owner))

    def owners(self) -> list[_T]:
        """Owners of frames that are not sent yet."""
        return [piece.owner for piece in self._out if piece.owner is not None]

    def disown(self, chosen: Callable[[_T], bool]) -> None:
        """Forget frames by their owner; of one that has begun, the rest is sent from a copy."""
        kept: deque[_Piece[_T]] = deque()
        for piece in self._out:
            if piece.owner is not None and chosen(piece.owner):
                if not piece.head:
                    continue
                piece.body, piece.owner = memoryview(bytearray(piece.body)), None
            kept.append(piece)
        self._out = kept

    def skip(self) -> None:
        """Skip the rest of the body that is arriving."""
        self._body = None

    def write(self) -> None:
        """Send until the socket is full. Raises OSError."""
        try:
            while self._raw:
                del self._raw[: self.connection.send(self._raw)]
            while self.ready and self._out:
                piece = self._out[0]
                if not piece.head:
                    self._begin(piece)
                head = len(piece.head)
                while piece.at < head:
                    piece.at += self.connection.send(piece.head[piece.at :])
                while piece.at < head + len(piece.body):
                    piece.at += self.connection.send(piece.body[piece.at - head :])
                self._out.popleft()
                if piece.owner is not None:
                    self._sent(piece.owner)
        except BlockingIOError:
            return

    def read(self) -> None:
        """Receive until nothing is left. Raises OSError when the peer has gone, and Refused."""
        try:
            for _ in range(_TURN):
                self._read_some()
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self.connection.close()

    def _begin(self, piece: _Piece[_T]) -> None:
        digest = 0
        if len(piece.body):
            # Not a MAC of the whole body, which would cost more than the copy: the digest stands in
            # the head, which has one, and its seed is secret.
            digest = xxhash.xxh3_64_intdigest(piece.body, self._seal.seed)
        piece.head = self._seal.close(piece.frame._replace(digest=digest))

    def _read_some(self) -> None:
        if self._frame is not None:
            self._read_body(self._frame)
            return
        self._at += self._received(memoryview(self._small)[self._at :])
        if self._at < len(self._small):
            return
        self._at = 0
        if not self.ready:
            self._greet(bytes(self._small))
            return
        frame = self._opener.open(bytes(self._small))
        self._body = self._take(self, frame)
        if frame.kind in self._with_body and frame.size:
            self._frame = frame
        else:
            self._taken(self, frame)

    def _read_body(self, frame: FrameHead) -> None:
        body = self._body
        if body is None:
            # A body that nobody wants any more is read all the same: the next frame comes after it.
            body = memoryview(bytearray(min(_SINK_BYTES, frame.size - self._at)))
            self._at += self._received(body)
        else:
            self._at += self._received(body[self._at :])
        if self._at < frame.size:
            return
        self._at, self._frame = 0, None
        if self._body is not None:
            if xxhash.xxh3_64_intdigest(self._body, self._opener.seed) != frame.digest:
                raise RefusedConnection("the bytes of a message were changed on their way")
            self._body = None
        self._taken(self, frame)

    def _greet(self, message: bytes) -> None:
        self._raw += self._greeting.feed(message)
        if self._greeting.wants:
            self._small = bytearray(self._greeting.wants)
            return
        keys = self._greeting.session()
        mine, theirs = keys if self.calls else keys[::-1]
        self._seal, self._opener = Seal(mine), Seal(theirs)
        self._small = bytearray(Seal.SIZE)
        self.ready = True

    def _received(self, into: memoryview) -> int:
        count = self.connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the peer has gone")
        return count

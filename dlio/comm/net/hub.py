"""The links of one rank with all others, and the thread that moves their bytes.

A rank calls another when it first has something to send; so two ranks may have two links. Whoever
connects is a stranger until it has proved which rank it is (`dlio.comm.net.keys`), and strangers
are few (`dlio.comm.net.door`).
"""

import contextlib
import random
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from dlio.comm.net.door import Door
from dlio.comm.net.keys import Answerer, Caller, Keys, RefusedConnection
from dlio.comm.net.peer_link import FrameHead, PeerLink
from dlio.errors import CommError
from dlio.util.printable import log_warning
from dlio.util.threads import Workers

CLOSE_TIMEOUT_S: Final = 5.0
_LONGEST_TURN_S: Final = 0.2
_CALL_TIMEOUT_S: Final = 20.0
"""Time for which calls are repeated that end before they are answered."""
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_T = TypeVar("_T")


class Handler(Protocol[_T]):
    """The owner of a hub. All is called in the hub's thread, while it moves bytes."""

    with_body: frozenset[int]
    """Kinds of frames that have a body."""

    def take(self, link: PeerLink[_T], frame: FrameHead) -> memoryview | None:
        """Return the memory for a frame's body, None to skip it. Raises RefusedConnection."""

    def taken(self, link: PeerLink[_T], frame: FrameHead) -> object:
        """Note that a frame and its body are complete."""

    def sent(self, owner: _T) -> object:
        """Note that all of `PeerLink.send`'s data have left."""

    def waiting(self) -> Sequence[int]:
        """Return the ranks to which there is something to send that no link has yet."""

    def push(self, peer: int, link: PeerLink[_T]) -> object:
        """Hand over the data to send to a rank."""

    def reply(self) -> Sequence[PeerLink[_T]]:
        """Hand answers over to links; return these."""

    def lost(self, peer: int, link: PeerLink[_T], error: CommError) -> object:
        """Note that a rank that was called cannot be reached."""

    def ended(self, link: PeerLink[_T]) -> object:
        """Note that a link has ended, after `lost` if it was called."""

    def over(self, stopping: bool) -> bool:
        """True if the thread may end: it is to stop, and all is sent."""


@dataclass(slots=True)
class _EndedCalls:
    """Calls of one rank that have ended before it answered."""

    since: float
    pause_s: float
    again: float
    """Time of the next."""


class Hub(Generic[_T]):
    """Links, and the thread and listener of this rank, which it owns; close it."""

    def __init__(
        self,
        keys: Keys,
        listener: socket.socket,
        addresses: Sequence[tuple[str, int]],
        handler: Handler[_T],
    ) -> None:
        self._keys, self._addresses, self._handler = keys, list(addresses), handler
        self.moving = threading.Lock()
        """Held while bytes are moved."""
        self.links: set[PeerLink[_T]] = set()
        self._called: dict[int, PeerLink[_T]] = {}
        self._calls: dict[int, _EndedCalls] = {}
        self._by_socket: dict[socket.socket, PeerLink[_T]] = {}
        self._door = Door(listener, self._turn_away)
        self._told = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = Workers(
            "dlio-mail",
            self._run,
            wake=self.wake,
            stop_timeout_s=2 * CLOSE_TIMEOUT_S,
            serves_others=True,
        )

    def start(self) -> None:
        """Start the thread, once the handler is complete."""
        self._thread.start()

    def close(self) -> None:
        """End the thread once the handler is over."""
        self._thread.close()

    def wake(self) -> None:
        """Have the thread look for something to send. Thread-safe."""
        # A full buffer means that the thread is to wake already.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"x")

    def _run(self, _: int) -> None:
        try:
            while not self._handler.over(self._thread.stopping.is_set()):
                ready = self._selector.select(self._turn_s())
                with self.moving:
                    for key, events in ready:
                        self._serve(key, events)
                    self._push()
                    self._door.tidy()
        finally:
            for link in self.links:
                link.close()
            self._door.close()
            self._wake_in.close()
            self._wake_out.close()
            self._selector.close()

    def _turn_s(self) -> float:
        if not self._calls:
            return _LONGEST_TURN_S
        soonest = min(call.again for call in self._calls.values()) - time.monotonic()
        return min(_LONGEST_TURN_S, max(0.0, soonest))

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._door.listener:
            for connection in self._door.accept():
                self._open(connection, Answerer(self._keys))
        elif key.fileobj is self._wake_out:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        else:
            link: PeerLink[_T] = key.data
            if not link.closed:
                self._move(link, bool(events & selectors.EVENT_READ))

    def _push(self) -> None:
        """Hand over to links the data to send, and call ranks that have none."""
        for link in self._handler.reply():
            if not link.closed:
                self._move(link, False)
        for peer in self._handler.waiting():
            called = self._called.get(peer)
            if called is None:
                self._call(peer)
            elif called.ready:
                self._handler.push(peer, called)
                self._move(called, False)

    def _call(self, peer: int) -> None:
        call = self._calls.get(peer)
        if call is not None and time.monotonic() < call.again:
            return
        greeting = Caller(self._keys, peer)
        host = self._addresses[peer][0]
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setblocking(False)
        # Not `create_connection`: the thread moves the bytes of all ranks and must not wait for
        # one.
        connection.connect_ex(self._addresses[peer])
        self._called[peer] = self._open(connection, greeting)

    def _open(self, connection: socket.socket, greeting: Caller | Answerer) -> PeerLink[_T]:
        # Heads of frames are small, and Nagle's algorithm would hold them back until an
        # acknowledgement that the other side may delay by 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handler = self._handler
        link = PeerLink(
            connection, greeting, handler.with_body, handler.take, handler.taken, handler.sent
        )
        self.links.add(link)
        self._by_socket[connection] = link
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
        self._selector.register(connection, events, link)
        return link

    def _move(self, link: PeerLink[_T], readable: bool) -> None:
        """Move the bytes that can be moved now, and watch for the rest."""
        ready = link.ready
        try:
            if link.wants_write:
                link.write()
            if readable:
                link.read()
            if link.ready and not ready:
                self._greeted(link)
            elif not link.ready and link.peer >= 0:
                self._door.proved(link.connection)
            if link.wants_write:
                link.write()
        except (OSError, RefusedConnection) as error:
            self._end(link, error)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
        if self._selector.get_key(link.connection).events != events:
            self._selector.modify(link.connection, events, link)

    def _greeted(self, link: PeerLink[_T]) -> None:
        self._door.left(link.connection)
        if link.calls:
            self._calls.pop(link.peer, None)
            self._handler.push(link.peer, link)

    def _end(self, link: PeerLink[_T], error: OSError | RefusedConnection) -> None:
        host, port = self._name(link)
        # Strangers may come in thousands.
        if (
            isinstance(error, RefusedConnection)
            and not link.calls
            and (link.ready or not self._told)
        ):
            who = f"rank {link.peer}" if link.ready else "a stranger"
            log_warning("the connection of %s at %s:%s is closed: %s", who, host, port, error)
            self._told |= not link.ready
        self._forget(link)
        if link.calls:
            self._call_ended(link, error, f"{host}:{port}")
        self._handler.ended(link)

    def _call_ended(
        self, link: PeerLink[_T], error: OSError | RefusedConnection, place: str
    ) -> None:
        peer, now = link.peer, time.monotonic()
        call = self._calls.get(peer) or _EndedCalls(now, _FIRST_PAUSE_S, now)
        # A listener with a full queue resets connections: a thousand ranks that start at once see
        # it, and succeed a moment later. Random pauses keep them from coming back together.
        if not link.ready and isinstance(error, ConnectionResetError):
            if now - call.since < _CALL_TIMEOUT_S:
                # The listener had no place, or this rank was too slow.
                call.again = now + call.pause_s * (0.5 + random.random())  # noqa: S311
                call.pause_s = min(2 * call.pause_s, _LONGEST_PAUSE_S)
                self._calls[peer] = call
                return
            error = RefusedConnection(
                "it closes each connection before it answers: have all ranks the same DLIO_SECRET?"
            )
        self._calls.pop(peer, None)
        what = f"rank {peer} at {place} cannot be reached: {error}"
        self._handler.lost(peer, link, CommError(what))

    def _turn_away(self, connection: socket.socket) -> None:
        link = self._by_socket.get(connection)
        if link is None:  # It has come in this very turn.
            connection.close()
            return
        self._forget(link)
        self._handler.ended(link)

    def _forget(self, link: PeerLink[_T]) -> None:
        self._door.left(link.connection)
        self._selector.unregister(link.connection)
        self._by_socket.pop(link.connection, None)
        self.links.discard(link)
        if link.calls:
            self._called.pop(link.peer, None)
        link.close()

    def _name(self, link: PeerLink[_T]) -> tuple[str, int]:
        if link.calls:
            return self._addresses[link.peer]
        try:
            host, port, *_ = link.connection.getpeername()
        except OSError:
            return "?", 0
        return str(host), int(port)

"""Messages over TCP, for ranks of torch.distributed.

Gloo cannot test for a message without blocking. A rank connects to a peer when it first sends to it
and presents a secret on which the group agreed. One thread per mailbox moves all its bytes.
"""

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from dlio.comm.waiting import LONGEST_SLEEP_S
from dlio.errors import CommError
from dlio.util.threads import Workers

__all__ = ["Channel", "Mail", "Message"]

Channel: TypeAlias = tuple[int, int]
"""Numbers of a generation of ranks and of a communicator: messages of two channels never mix."""

_CLOSE_TIMEOUT_S: Final = 5.0
_CANCEL_TIMEOUT_S: Final = 1.0
_HELLO: Final = struct.Struct("<16sI")
"""The group's secret, the sender's rank."""
_HEAD: Final = struct.Struct("<IIiQ")
"""Channel, tag, bytes."""
_MOST_BYTES: Final = 1 << 40
"""Length of the longest message that a peer may announce."""


class Message:
    """A send or receive under way."""

    def __init__(
        self, view: memoryview, withdraw: Callable[["Message"], bool], generation: int = 0
    ) -> None:
        self.view = view
        self.generation = generation
        self.at = 0
        self.over = False
        self.error: CommError | None = None
        self.unreachable = False
        """True if the error is a lost connection."""
        self._withdraw = withdraw

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over

    def cancel(self) -> bool:
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while not (given_up := self.over or self._withdraw(self)) and time.monotonic() < deadline:
            time.sleep(LONGEST_SLEEP_S)
        return given_up


_Key: TypeAlias = tuple[int, Channel, int]
"""Source, channel, tag."""
_NO_KEY: Final[_Key] = (-1, (0, 0), 0)
_ALWAYS: Final = 1 << 32
"""Generation of greetings, which no other follows."""


class _Incoming:
    """The stream from one peer: a greeting, then messages, each a head and a body."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.peer = -1
        self.small = bytearray(_HELLO.size)
        self.at = 0
        self.key = _NO_KEY
        self.message: Message | None = None


class Mail:
    """Messages by (source, channel, tag), in the order in which they were sent.

    Owns a listening socket, the connections and the thread that moves bytes.
    """

    def __init__(
        self, rank: int, allgather: Callable[[tuple[str, int, str]], list[tuple[str, int, str]]]
    ) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        """Held while bytes are moved; taken before `_lock`."""
        self._posted: dict[_Key, deque[Message]] = {}
        self._early: dict[_Key, deque[Message]] = {}
        self._oldest = 0
        """Number of the oldest generation whose messages are taken."""
        self._outgoing: dict[int, socket.socket] = {}
        self._queues: dict[int, deque[tuple[bytes, Message]]] = {}
        self._streams: set[_Incoming] = set()
        self._listener = _listening()
        port = int(self._listener.getsockname()[1])
        everyone = allgather((_own_address(), port, secrets.token_hex(16)))
        self._addresses = [(host, port) for host, port, _ in everyone]
        self._secret = bytes.fromhex(everyone[0][2])
        self._selector = selectors.DefaultSelector()
        self._ends_at: float | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._wake_out, selectors.EVENT_READ, "wake")
        self._thread = Workers(
            "dlio-mail",
            self._run,
            wake=self._wake,
            stop_timeout_s=2 * _CLOSE_TIMEOUT_S,
            serves_others=True,
        )
        self._thread.start()

    def send(self, view: memoryview, dest: int, tag: int, channel: Channel = (0, 0)) -> Message:
        message = Message(view, lambda _: False, channel[0])
        with self._lock:
            head = _HEAD.pack(*channel, tag, len(view))
            self._queues.setdefault(dest, deque()).append((head, message))
        self._wake()
        return message

    def receive(
        self, view: memoryview, source: int, tag: int, channel: Channel = (0, 0)
    ) -> Message:
        key = (source, channel, tag)
        message = Message(view, lambda m: self._withdraw(key, m), channel[0])
        with self._lock:
            early = self._early.get(key)
            if not early:
                self._posted.setdefault(key, deque()).append(message)
                return message
            first = early[0]
            if first.over:
                early.popleft()
                _copy(first, message)
                return message
            # Half received: its body is copied once it is complete.
            self._posted.setdefault(key, deque()).append(message)
        return message

    def close(self) -> None:
        """Stop after all sends have left, within a deadline."""
        self._thread.close()

    def give_up(self, message: Message) -> None:
        """Never touch a message's memory again; its generation is over."""
        self._drop(lambda each: each is message)

    def retire(self, oldest: int) -> None:
        """Drop all messages of generations before `oldest`, also those that arrive later."""
        self._oldest = oldest
        self._drop(lambda each: each.generation < oldest)

    def _drop(self, chosen: Callable[[Message], bool]) -> None:
        with self._moving, self._lock:
            for table in (self._posted, self._early):
                for key, messages in list(table.items()):
                    table[key] = deque(each for each in messages if not chosen(each))
                    if not table[key]:
                        del table[key]
            for incoming in self._streams:
                if incoming.message is not None and chosen(incoming.message):
                    incoming.message = _stand_in(incoming.message)
            for dest, queued in self._queues.items():
                # The peer still expects the rest of a message that has begun.
                self._queues[dest] = deque(
                    (head, _stand_in(each) if chosen(each) else each)
                    for head, each in queued
                    if not chosen(each) or each.at
                )

    def _withdraw(self, key: _Key, message: Message) -> bool:
        with self._lock:
            posted = self._posted.get(key)
            if posted and message in posted:
                posted.remove(message)
                return True
            return message.over

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"x")

    def _run(self, _: int) -> None:
        try:
            while not self._is_over():
                ready = self._selector.select(0.2)
                with self._moving:
                    for key, events in ready:
                        self._serve(key, events)
                    self._connect_all()
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            for connection in self._outgoing.values():
                connection.close()  # An idle connection is not registered with the selector.
            self._wake_in.close()
            self._selector.close()

    def _is_over(self) -> bool:
        """True when the thread is to stop and everything is sent, or cannot be in time."""
        if not self._thread.stopping.is_set():
            return False
        self._ends_at = self._ends_at or time.monotonic() + _CLOSE_TIMEOUT_S
        with self._lock:
            sent = not any(self._queues.values())
        return sent or time.monotonic() > self._ends_at

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data == "listener":
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                incoming = _Incoming(connection)
                self._streams.add(incoming)
                self._selector.register(connection, selectors.EVENT_READ, incoming)
        elif key.data == "wake":
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        elif isinstance(key.data, _Incoming):
            self._read(key.data)
        else:
            self._write(key.data)

    def _connect_all(self) -> None:
        """Connect to each peer with queued messages and watch its socket."""
        with self._lock:
            wanted = [dest for dest, queued in self._queues.items() if queued]
        for dest in wanted:
            connection = self._outgoing.get(dest)
            if connection is None:
                connection = socket.socket(_family(self._addresses[dest][0]))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)
                connection.connect_ex(self._addresses[dest])
                self._outgoing[dest] = connection
                greeting = Message(
                    memoryview(_HELLO.pack(self._secret, self._rank)), lambda _: False, _ALWAYS
                )
                with self._lock:
                    self._queues[dest].appendleft((b"", greeting))
            try:
                self._selector.get_key(connection)
            except KeyError:
                self._selector.register(connection, selectors.EVENT_WRITE, dest)

    def _write(self, dest: int) -> None:
        connection = self._outgoing[dest]
        while True:
            with self._lock:
                queued = self._queues[dest]
                if not queued:
                    self._selector.unregister(connection)
                    return
                head, message = queued[0]
            try:
                # `at` counts head and body together.
                while message.at < len(head):
                    message.at += connection.send(head[message.at :])
                while message.at < len(head) + len(message.view):
                    message.at += connection.send(message.view[message.at - len(head) :])
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(dest, error)
                return
            message.over = True
            with self._lock:
                queued.popleft()

    def _lost(self, dest: int, error: OSError) -> None:
        self._selector.unregister(self._outgoing[dest])
        self._outgoing[dest].close()
        del self._outgoing[dest]
        host, port = self._addresses[dest]
        lost = CommError(f"rank {dest} at {host}:{port} cannot be reached: {error}")
        with self._lock:
            for _, message in self._queues[dest]:
                message.error, message.unreachable = lost, True
            self._queues[dest].clear()

    def _read(self, incoming: _Incoming) -> None:
        try:
            while self._read_some(incoming):
                pass
        except BlockingIOError:
            return
        except (OSError, ValueError):
            # The peer has ended or is a stranger: waits for its messages end at their deadline.
            self._selector.unregister(incoming.connection)
            incoming.connection.close()
            self._streams.discard(incoming)
            self._cut_off(incoming)

    def _cut_off(self, incoming: _Incoming) -> None:
        """Put a half-received message back: nothing writes to its memory any more."""
        message, key = incoming.message, incoming.key
        if message is None or message.generation < self._oldest:
            return
        with self._lock:
            early = self._early.get(key)
            if early and message in early:
                early.remove(message)
            else:
                self._posted.setdefault(key, deque()).append(message)

    def _read_some(self, incoming: _Incoming) -> bool:
        message = incoming.message
        if message is not None:
            count = 0
            if len(message.view) > message.at:
                count = incoming.connection.recv_into(message.view[message.at :])
                if not count:
                    raise OSError("the peer has gone")
            message.at += count
            if message.at == len(message.view):
                incoming.message, incoming.at = None, 0
                incoming.small = bytearray(_HEAD.size)
                self._arrived(incoming.key, message)
            return True
        count = incoming.connection.recv_into(memoryview(incoming.small)[incoming.at :])
        if not count:
            raise OSError("the peer has gone")
        incoming.at += count
        if incoming.at < len(incoming.small):
            return True
        if incoming.peer < 0:
            secret, peer = _HELLO.unpack(incoming.small)
            if not secrets.compare_digest(secret, self._secret):
                raise ValueError("a stranger")
            incoming.peer, incoming.at = peer, 0
            incoming.small = bytearray(_HEAD.size)
            return True
        generation, number, tag, size = _HEAD.unpack(incoming.small)
        incoming.key = (incoming.peer, (generation, number), tag)
        incoming.message = self._begun(incoming.key, size)
        return True

    def _begun(self, key: _Key, size: int) -> Message:
        """Return the receive that a message's body goes into: a posted one, or new memory."""
        with self._lock:
            posted, early = self._posted.get(key), self._early.get(key)
            if posted and not early and size <= len(posted[0].view):
                message = posted.popleft()
                message.view = message.view[:size]
                return message
            if size > _MOST_BYTES:
                raise ValueError(f"a message of {size} bytes")
            message = Message(memoryview(bytearray(size)), lambda _: False, key[1][0])
            if message.generation >= self._oldest:
                self._early.setdefault(key, deque()).append(message)
            return message

    def _arrived(self, key: _Key, message: Message) -> None:
        with self._lock:
            message.over = True
            early, posted = self._early.get(key), self._posted.get(key)
            while early and early[0].over and posted:
                _copy(early.popleft(), posted.popleft())
            for table in (self._early, self._posted):
                if key in table and not table[key]:
                    del table[key]


def _stand_in(message: Message) -> Message:
    """Return a message of the same bytes in memory of its own, moved as far."""
    instead = Message(memoryview(bytearray(message.view)), lambda _: False, message.generation)
    instead.at = message.at
    return instead


def _copy(arrived: Message, into: Message) -> None:
    if len(arrived.view) > len(into.view):
        into.error = CommError(
            f"a message of {len(arrived.view)} bytes came where {len(into.view)} were expected"
        )
        return
    into.view[: len(arrived.view)] = arrived.view
    into.over = True


def _listening() -> socket.socket:
    listener = socket.create_server(("", 0), backlog=1024)
    listener.setblocking(False)
    return listener


def _own_address() -> str:
    """Return the address at which other ranks reach this one: the one that reaches the master."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((socket.gethostbyname(master), 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

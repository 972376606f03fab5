"""A communicator over torch.distributed, for ranks without MPI (`torchrun`).

Collectives use gloo with the group's store, under key names of their own: they never mix with the
user's collectives, whichever groups the user creates or destroys. Messages use TCP, because gloo
cannot test for a message without blocking. A rank connects to a peer when it first sends to it and
presents a secret on which the group agreed. One thread per communicator moves all its bytes.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, Store

from dlio.comm.protocol import Array, Buffer, Communicator, Op, Request
from dlio.comm.single import SingleCommunicator
from dlio.comm.waiting import LONGEST_SLEEP_S, default_timeout_s, wait_all
from dlio.errors import CommError, CommTimeout
from dlio.util.threads import Workers

__all__ = ["TorchCommunicator", "torch_world"]

_T = TypeVar("_T")
_CLOSE_TIMEOUT_S: Final = 5.0
_CANCEL_TIMEOUT_S: Final = 1.0
_HELLO: Final = struct.Struct("<16sI")
"""The group's secret, the sender's rank."""
_HEAD: Final = struct.Struct("<iQ")
"""Tag, bytes."""
_MOST_BYTES: Final = 1 << 40
"""Length of the longest message that a peer may announce."""
_OPS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def torch_world(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return a communicator of the ranks of a process group. Collective over them.

    Args:
        group: the default group for None.
    """
    if dist.get_world_size(group) == 1:
        return SingleCommunicator()
    whole: Any = group if group is not None else dist.group.WORLD
    store, rank = whole.get_group_store(), dist.get_rank(group)
    # All ranks call this equally often, so that the count is a name on which they agree.
    name = f"dlio/{store.add(f'dlio/calls/{rank}', 1)}"
    return TorchCommunicator(store, name, rank, dist.get_world_size(group))


class _Message:
    """A send or receive under way."""

    def __init__(self, view: memoryview, withdraw: Callable[["_Message"], bool]) -> None:
        self.view = view
        self.at = 0
        self.over = False
        self.error: CommError | None = None
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


class _Reduction:
    """A reduction of gloo.

    Args:
        errors: a context manager that turns gloo's errors into CommTimeout.
    """

    def __init__(
        self, work: dist.Work, errors: Callable[[str], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._work = work
        self._errors = errors

    def done(self) -> bool:
        if not self._work.is_completed():
            return False
        with self._errors("reduction"):
            self._work.wait()
        return True

    def cancel(self) -> bool:
        return self.done()


class TorchCommunicator:
    """Ranks of torch.distributed. Owns its group, sockets and thread.

    Args:
        store: the store that all ranks share.
        name: prefix of this communicator's keys in the store; the same on all ranks, used once.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store: Store | None = store
        self._name = name
        self._duplicates = 0
        self.rank = rank
        self.size = size
        self._timeout_s = default_timeout_s()
        with self._errors("meeting the other ranks"):
            self._group: Any = dist.ProcessGroupGloo(
                PrefixStore(name, store),
                rank,
                size,
                timedelta(seconds=self._timeout_s),
            )
        self._mail = _Mail(self.rank, self.allgather)

    def allgather(self, value: _T) -> list[_T]:
        mine = bytearray(json.dumps(value).encode())
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._errors("allgather"):
            self._group.allgather([lengths], [torch.tensor([len(mine)])]).wait()
            longest = max(int(length) for length in lengths)
            padded = torch.frombuffer(mine + bytearray(longest - len(mine)), dtype=torch.uint8)
            everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            self._group.allgather([everyone], [padded]).wait()
        return [
            json.loads(text[: int(length)].numpy().tobytes())
            for text, length in zip(everyone, lengths, strict=True)
        ]

    def tell(self, value: _T, root: int = 0) -> _T:
        text = np.empty(0, np.uint8)
        if self.rank == root:
            text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
        length = np.array([len(text)])
        self.bcast(length, root)
        if self.rank != root:
            text = np.empty(int(length[0]), np.uint8)
        self.bcast(text, root)
        received: _T = json.loads(text.tobytes())
        return received

    def barrier(self) -> None:
        with self._errors("barrier"):
            self._group.barrier().wait()

    def bcast(self, array: Array, root: int = 0) -> None:
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        with self._errors("broadcast"):
            self._group.broadcast(flat, root).wait()

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return self._mail.send(_bytes_of(data), self._peer(dest), tag)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return self._mail.receive(_bytes_of(into), self._peer(source), tag)

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        if array.dtype not in (np.float32, np.float64, np.int64):
            raise CommError(f"cannot reduce {array.dtype}: convert it to float32 first")
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPS[op])
        with self._errors("reduction"):
            work = self._group.allreduce([torch.from_numpy(array)], options)
        return _Reduction(work, self._errors)

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        wait_all(requests, what, limit_s, f"rank {self.rank} of {self.size}")

    def poke(self) -> bool:
        return False

    def dup(self) -> "TorchCommunicator":
        self._duplicates += 1
        name = f"{self._name}/{self._duplicates}"
        return TorchCommunicator(self._open_store(), name, self.rank, self.size)

    def split(self, group: int) -> Communicator:
        self._duplicates += 1
        members = [k for k, theirs in enumerate(self.allgather(group)) if theirs == group]
        if len(members) == 1:
            return SingleCommunicator()
        name = f"{self._name}/{self._duplicates}.{group}"
        return TorchCommunicator(self._open_store(), name, members.index(self.rank), len(members))

    def close(self) -> None:
        self._mail.close()
        self._group = self._store = None

    def _open_store(self) -> Store:
        if self._store is None:
            raise CommError(f"the communicator {self._name} is closed")
        return self._store

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise CommError(f"no rank {rank} among {self.size}")
        return rank

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn gloo's errors into CommTimeout."""
        try:
            yield
        except RuntimeError as error:
            raise CommTimeout(
                f"rank {self.rank} of {self.size}: {what} failed: another rank is stopped, far "
                f"behind, or left the run (DLIO_TIMEOUT sets the deadline): {error}"
            ) from error


class _Incoming:
    """The stream from one peer: a greeting, then messages, each a head and a body."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.peer = -1
        self.small = bytearray(_HELLO.size)
        self.at = 0
        self.tag = 0
        self.message: _Message | None = None


class _Mail:
    """Messages by (source, tag), in the order in which they were sent.

    Owns a listening socket, the connections and the thread that moves bytes.
    """

    def __init__(
        self, rank: int, allgather: Callable[[tuple[str, int, str]], list[tuple[str, int, str]]]
    ) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._posted: dict[tuple[int, int], deque[_Message]] = {}
        self._early: dict[tuple[int, int], deque[_Message]] = {}
        self._outgoing: dict[int, socket.socket] = {}
        self._queues: dict[int, deque[tuple[bytes, _Message]]] = {}
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

    def send(self, view: memoryview, dest: int, tag: int) -> _Message:
        message = _Message(view, lambda _: False)
        with self._lock:
            self._queues.setdefault(dest, deque()).append((_HEAD.pack(tag, len(view)), message))
        self._wake()
        return message

    def receive(self, view: memoryview, source: int, tag: int) -> _Message:
        key = (source, tag)
        message = _Message(view, lambda m: self._withdraw(key, m))
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

    def _withdraw(self, key: tuple[int, int], message: _Message) -> bool:
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
                for key, events in self._selector.select(0.2):
                    self._serve(key, events)
                self._connect_all()
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
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
                self._selector.register(connection, selectors.EVENT_READ, _Incoming(connection))
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
                greeting = _Message(
                    memoryview(_HELLO.pack(self._secret, self._rank)), lambda _: False
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
                message.error = lost
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
            self._cut_off(incoming)

    def _cut_off(self, incoming: _Incoming) -> None:
        """Put a half-received message back: nothing writes to its memory any more."""
        message, key = incoming.message, (incoming.peer, incoming.tag)
        if message is None:
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
                self._arrived((incoming.peer, incoming.tag), message)
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
        incoming.tag, size = _HEAD.unpack(incoming.small)
        incoming.message = self._begun((incoming.peer, incoming.tag), size)
        return True

    def _begun(self, key: tuple[int, int], size: int) -> _Message:
        """Return the receive that a message's body goes into: a posted one, or new memory."""
        with self._lock:
            posted, early = self._posted.get(key), self._early.get(key)
            if posted and not early and size <= len(posted[0].view):
                message = posted.popleft()
                message.view = message.view[:size]
                return message
            if size > _MOST_BYTES:
                raise ValueError(f"a message of {size} bytes")
            message = _Message(memoryview(bytearray(size)), lambda _: False)
            self._early.setdefault(key, deque()).append(message)
            return message

    def _arrived(self, key: tuple[int, int], message: _Message) -> None:
        with self._lock:
            message.over = True
            early, posted = self._early.get(key), self._posted.get(key)
            while early and early[0].over and posted:
                _copy(early.popleft(), posted.popleft())
            for table in (self._early, self._posted):
                if key in table and not table[key]:
                    del table[key]


def _copy(arrived: _Message, into: _Message) -> None:
    if len(arrived.view) > len(into.view):
        into.error = CommError(
            f"a message of {len(arrived.view)} bytes came where {len(into.view)} were expected"
        )
        return
    into.view[: len(arrived.view)] = arrived.view
    into.over = True


def _bytes_of(data: Buffer) -> memoryview:
    return memoryview(data).cast("B")  # type: ignore[arg-type]


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

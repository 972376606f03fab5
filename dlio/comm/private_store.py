"""A store of keys that only this user's processes can reach: the launcher's, without torch.

Over a socket in a private folder: torch's own store believes everybody who can connect to its port.
Ranks and launcher agree by values that are written once, by the first that comes (`put`), so all
read the same. gloo reads and writes bytes, as in a store of torch.

    request     u32 bytes, JSON: [name of the call, its arguments...]
    answer      u32 bytes, JSON: the result, once there is one; 0 bytes without a request where the
                server may open no more files, and ends the connection

Values are bytes, in JSON as the characters of the same numbers.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from dlio.comm.comm_protocol import Json
from dlio.errors import CommError
from dlio.util.closable import Closable
from dlio.util.private_sockets import connect, is_own, listen
from dlio.util.settings import settings
from dlio.util.threads import Workers
from dlio.util.trusted_files import closing_descriptor

STORE_NAME: Final = "store"
"""Name of the socket in its folder."""
_LENGTH: Final = struct.Struct("<I")
_LONGEST: Final = 1 << 26
_PIECE: Final = 1 << 16
_CONNECT_TIMEOUT_S: Final = 20.0
_TURN_S: Final = 0.5
_T = TypeVar("_T")


class PrivateStore:
    """A connection to the store whose socket is in `folder`. Thread-safe; a call that waits holds
    up the others. All raise CommError when the server is gone, and all but `wait` when it has not
    answered for DLIO_TIMEOUT: a launcher that is stopped (SIGSTOP) keeps its sockets.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._silent = ""
        """Why all calls fail after one that got no answer."""
        try:
            self._connection = connect(folder, STORE_NAME, _CONNECT_TIMEOUT_S)
        except OSError as error:
            raise CommError(
                f"the launcher's store in {folder} cannot be reached: {error}"
            ) from error

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        # latin-1 maps each byte to one character, so gloo's bytes go through JSON unchanged.
        self._call("set", key, value if isinstance(value, str) else value.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is written."""
        text: str = self._call("get", [key])[0]
        return text.encode("latin-1")

    def has(self, keys: Sequence[str]) -> bool:
        """True if all keys are written."""
        return bool(self._call("has", list(keys)))

    def put(self, key: str, value: _T) -> _T:
        """Write a JSON value that nobody has written yet; return the key's, perhaps another's."""
        written: _T = json.loads(self._call("put", key, json.dumps(value)))
        return written

    def count(self, key: str) -> int:
        """Add 1 to a counter and return it."""
        return int(self._call("count", key))

    def values(self, keys: Sequence[str]) -> list[Json]:
        """Return the JSON values of keys that are written."""
        return [json.loads(text) for text in self._call("get", list(keys))]

    def wait(self, key: str) -> Json:
        """Wait until a key is written, without a deadline, and return its JSON value."""
        self._call("wait", [key])
        return self.values([key])[0]

    def clone(self) -> "PrivateStore":
        """Return another connection, for a thread that waits."""
        return PrivateStore(self._folder)

    def interrupt(self) -> None:
        """End a call that waits in another thread, and the connection: it raises CommError."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _call(self, *words: object) -> Any:
        # JSON and not pickle: ranks of another user's making must not run code in the launcher.
        request = json.dumps(words).encode()
        limit_s = settings().timeout_s
        with self._lock:
            if self._silent:
                raise CommError(self._silent)
            try:
                self._connection.settimeout(None if words[0] == "wait" else limit_s)
                with contextlib.suppress(BrokenPipeError):  # There may be a last answer.
                    self._connection.sendall(_LENGTH.pack(len(request)) + request)
                (length,) = _LENGTH.unpack(self._received(_LENGTH.size))
                if not length:
                    raise CommError(
                        "the launcher may open no more files, one for each rank and more: raise "
                        "`ulimit -n` where it is started, or start fewer ranks"
                    )
                return json.loads(self._received(length))
            except TimeoutError as error:
                # The answer may still come: no later call must take it for its own.
                self._silent = (
                    f"the launcher has not answered for {limit_s:g} s: is it stopped? "
                    "(DLIO_TIMEOUT sets the deadline)"
                )
                raise CommError(self._silent) from error
            except OSError as error:
                raise CommError(f"the launcher's store is gone: {error}") from error

    def _received(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._connection.recv(min(_PIECE, count - len(data)))
            if not piece:
                raise ConnectionResetError("the launcher has ended")
            data += piece
        return bytes(data)


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard = bytearray()
        self.to_say = bytearray()
        self.awaits: list[str] = []
        """Keys that it waits for."""


class StoreServer(Closable):
    """The store's memory and its thread, which answers all connections, at a socket in a private
    folder.
    """

    def __init__(self, folder: str) -> None:
        self._values: dict[str, str] = {}
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._spare = socket.socket(socket.AF_UNIX)
        """Closed for a moment to answer where this process may open no more files."""
        how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing_descriptor(os.open(folder, how)) as inside:
            self._listener = listen(inside, STORE_NAME)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = Workers("dlio-store", self._run, wake=self._wake, serves_others=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and with it all connections."""
        self._thread.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def _run(self, _: int) -> None:
        try:
            while not self._thread.stopping.is_set():
                for key, events in self._selector.select(_TURN_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wake_out:
                        self._serve(key.data, events)
        finally:
            for client in self._clients:
                client.connection.close()
            ends = (self._listener, self._wake_in, self._wake_out, self._spare, self._selector)
            for each in ends:
                each.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        with contextlib.suppress(OSError):
            # A second check next to the private folder: the kernel knows whose process calls.
            if not is_own(connection):
                connection.close()
                return
            connection.setblocking(False)
            client = _Client(connection)
            self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _turn_away(self) -> None:
        """Answer a client that cannot be accepted: it would wait for ever."""
        self._spare.close()
        with contextlib.suppress(OSError):
            with self._listener.accept()[0] as connection:
                connection.setblocking(False)
                connection.send(_LENGTH.pack(0))
            self._spare = socket.socket(socket.AF_UNIX)

    def _serve(self, client: _Client, events: int) -> None:
        if client not in self._clients:
            return
        try:
            if events & selectors.EVENT_READ:
                piece = client.connection.recv(_PIECE)
                if not piece:
                    raise ConnectionResetError
                client.heard += piece
                self._hear(client)
            self._say(client)
        except BlockingIOError:
            return
        # A client that breaks the protocol loses its connection, and the store goes on for the
        # others.
        except (OSError, ValueError, TypeError, KeyError):
            self._selector.unregister(client.connection)
            self._clients.discard(client)
            client.connection.close()

    def _hear(self, client: _Client) -> None:
        """Answer complete requests. Raises ValueError, TypeError and KeyError for invalid ones."""
        while len(client.heard) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(client.heard)
            if length > _LONGEST:
                raise ValueError(f"a request of {length} bytes")
            if len(client.heard) < _LENGTH.size + length:
                return
            request = json.loads(client.heard[_LENGTH.size : _LENGTH.size + length])
            del client.heard[: _LENGTH.size + length]
            self._answer(client, *request)

    def _answer(self, client: _Client, name: str, *arguments: Any) -> None:
        values = self._values
        if name == "wait":
            client.awaits = arguments[0]
            self._release(client)
        elif name == "has":
            _reply(client, all(key in values for key in arguments[0]))
        elif name == "get":
            _reply(client, [values[key] for key in arguments[0]])
        elif name == "set":
            self._write(*arguments)
            _reply(client, None)
        elif name == "count":
            (key,) = arguments
            self._write(key, str(int(values.get(key, "0")) + 1))
            _reply(client, values[key])
        elif name == "put":
            key, value = arguments
            # In the server: between a read and a write of its own, another rank could write.
            if key not in values:
                self._write(key, value)
            _reply(client, values[key])
        else:
            raise ValueError(name)

    def _write(self, key: str, value: str) -> None:
        is_new = key not in self._values
        self._values[key] = value
        if is_new:
            for client in self._clients:
                if key in client.awaits:
                    self._release(client)

    def _release(self, client: _Client) -> None:
        """Answer a connection whose keys are all there."""
        if all(key in self._values for key in client.awaits):
            client.awaits = []
            _reply(client, None)
            self._watch(client)

    def _say(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            while client.to_say:
                del client.to_say[: client.connection.send(client.to_say)]
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_say else 0)
        self._selector.modify(client.connection, events, client)


def _reply(client: _Client, value: object) -> None:
    answer = json.dumps(value).encode()
    client.to_say += _LENGTH.pack(len(answer)) + answer

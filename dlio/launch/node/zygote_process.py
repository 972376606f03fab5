"""A zygote as its owner sees it: the process, and the socket to it."""

import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from dlio.launch.node.agent_protocol import Message, pack, receive_exactly
from dlio.util.child_processes import module_command

_END_TIMEOUT_S: Final = 10.0
_ERRORS: Final = 2


class ZygoteProcess:
    """A process that imports modules, and forks ranks: see `dlio.launch.node.zygote`.

    Shims connect to it at `listener`; None if all ranks are ordered by `fork`. `wrap` converts its
    command into the one to run, such as one in a network namespace.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        listener: socket.socket | None = None,
        wrap: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.control, its = socket.socketpair()
        self._keys = itertools.count()
        inherited = () if listener is None else (listener.fileno(),)
        numbers = map(str, inherited or (-1,))
        with its:
            self._process = subprocess.Popen(
                wrap(module_command("dlio.launch.node.zygote", *numbers, *modules)),
                # OpenBLAS starts threads when it is loaded.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                stdin=its.fileno(),
                stdout=_ERRORS,
                pass_fds=inherited,
                start_new_session=True,
            )

    def order(self, order: Mapping[str, object]) -> None:
        """Send an order. If the zygote is gone, its end is seen next."""
        with suppress(OSError):
            self.control.sendall(pack(order))

    def fork(self, rank: Mapping[str, object], streams: Sequence[int]) -> int:
        """Fork a rank, as a `_RankOrder` without its key; return the key by which it is reported.

        Raises OSError if the zygote is gone.
        """
        key = next(self._keys)
        # The message may be longer than one send takes.
        data = pack({"fork": {**rank, "key": key}})
        sent = socket.send_fds(self.control, [data], streams)
        self.control.sendall(data[sent:])
        return key

    def signal(self, key: int, number: int) -> None:
        """Send a signal to a rank; nothing if it, or the zygote, has ended."""
        self.order({"signal": key, "number": number})

    def receive(self) -> Message:
        """Return the next message. Raises EOFError or OSError if the zygote is gone."""
        message, _ = receive_exactly(self.control)
        return message

    def close(self, patience_s: float = _END_TIMEOUT_S) -> None:
        """End it, and with it all ranks."""
        self.control.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Its ranks die with it.
            self._process.wait()

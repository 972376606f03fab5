"""The zygote: a process that has imported what ranks need, and forks a rank for each shim.

    python -P -m dlio.launch.node.zygote LISTENER MODULES...

LISTENER is a socket at which shims connect, -1 for none; standard input is one to its owner: an
agent, or a searcher. It imports MODULES, but neither MPI nor CUDA, and has a single thread: a child
of a process with threads may inherit a lock that nobody releases. Ranks end when their shim does,
when the owner asks for it, and with this process.

| the owner sends | the zygote answers |
|---|---|
| | `ready` with its process id, once |
| `start`: number, `environment` of the ranks of shims | |
| `stop` | `stopped` when no rank is left |
| `fork`: a `_RankOrder` with a key, and its streams | `ended`: key, `code`, negative for a signal |
| `signal`: key, `number` | |
| `gpus` | `gpus`: the number of them |

The environment of a shim's rank is that of the job's launcher, with the variables of MPI that its
shim has.
"""

import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from dlio.launch.node.agent_protocol import pack, receive_exactly
from dlio.util.child_processes import STOPPED_S, end_with_parent, is_stopped

_STREAMS: Final = 3
_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.25
_GAP_S: Final = 1.0
"""Time between two looks after which this process was away itself."""
_OF_MPI: Final = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
"""Prefixes of variables that mpirun and its daemons set for each rank."""
_NUMBER: Final = struct.Struct("<q")


@dataclass(slots=True, eq=False)
class _RankOrder:
    argv: list[str]
    """Name of a module, and its arguments."""
    environment: dict[str, str]
    folder: str
    streams: list[int]
    shim: socket.socket | None = None
    """It waits for the rank; None if the owner has ordered it by its `key`."""
    start: int = -1
    key: int = -1
    cores: list[int] = field(default_factory=list)
    link: str = ""
    """Variable with the number of a fourth stream, which the rank keeps."""


@dataclass(slots=True)
class _ForkedRank:
    process: int
    watch: int
    """Its pidfd."""
    shim: socket.socket | None
    key: int
    reaped: bool = False

    def kill(self) -> None:
        """Kill it, and all that it has started if it was ordered by its key."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        if self.shim is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process, signal.SIGKILL)


def rank_environment(shim: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment, from those of its shim and of the launcher, `given`."""
    of_mpi = {name: value for name, value in shim.items() if name.startswith(_OF_MPI)}
    return {**shim, **given, **of_mpi}


class Zygote:
    """Forks ranks for the shims that connect to `listener`, and as the owner orders, until it
    closes its end of `control`.
    """

    def __init__(self, listener: socket.socket | None, control: socket.socket) -> None:
        self._listener, self._control = listener, control
        self._ranks: dict[int, _ForkedRank] = {}
        """By process."""
        self._asked: list[_RankOrder] = []
        self._start = -1
        self._environment: dict[str, str] = {}
        self._stopping = False
        self._stopped_since: float | None = None
        """Since when all of the node's ranks are stopped."""
        self._looked = 0.0
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> _RankOrder | None:
        """Fork for each shim: returns the request in the child, None in the zygote at its end."""
        while True:
            watches = self._listener is not None and self._ranks
            for key, _ in self._selector.select(_LOOK_S if watches else None):
                source = key.fileobj
                if source is self._control:
                    if not self._ordered():
                        self._kill()
                        return None
                elif source is self._listener:
                    self._connected(self._listener)
                elif isinstance(source, socket.socket):
                    if not key.data.reaped:
                        self._heard(source, key.data)
                elif not key.data.reaped:
                    self._ended(key.data)
            if self._listener is not None:
                self._look_for_stopped()
            # A shim may be here before the agent's order.
            due = [asked for asked in self._asked if asked.start <= self._start]
            self._asked = [asked for asked in self._asked if asked not in due]
            for asked in due:
                if self._fork(asked):
                    return asked

    def _ordered(self) -> bool:
        """Take an order of the owner; False if it is gone."""
        try:
            order, streams = receive_exactly(self._control, _STREAMS + 1)
        except (EOFError, OSError):
            return False
        if "start" in order:
            self._start, self._environment = order["start"], order["environment"]
        elif "fork" in order:
            self._asked.append(_RankOrder(**order["fork"], streams=streams))
        elif "signal" in order:
            for rank in self._ranks.values():
                if rank.key == order["signal"]:
                    os.kill(rank.process, order["number"])
        elif "gpus" in order:
            import torch

            self._tell({"gpus": torch.cuda.device_count()})
        else:
            self._stopping, self._start = True, -1
            self._kill()
            self._tell_stopped()
        return True

    def _connected(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(_TIMEOUT_S)
        try:
            asked, streams = receive_exactly(connection, _STREAMS)
        except (EOFError, OSError, ValueError):
            connection.close()
            return
        self._asked.append(_RankOrder(**asked, streams=streams, shim=connection))

    def _fork(self, request: _RankOrder) -> bool:
        """Fork a rank; True in the child."""
        connection, count = request.shim, _STREAMS + bool(request.link)
        if request.start != self._start or len(request.streams) != count:
            _close(request.streams)  # mpirun of an earlier start.
            if connection is not None:
                connection.close()
            return False
        request.environment = rank_environment(request.environment, self._environment)
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            self._leave(connection)
            end_with_parent(parent)
            return True
        _close(request.streams)
        watch = os.pidfd_open(process)
        rank = self._ranks[process] = _ForkedRank(process, watch, connection, request.key)
        self._selector.register(watch, selectors.EVENT_READ, rank)
        if connection is not None:
            self._selector.register(connection, selectors.EVENT_READ, rank)
            with suppress(OSError):
                connection.sendall(_NUMBER.pack(process))
        return False

    def _look_for_stopped(self) -> None:
        """Kill the node's ranks if all are stopped; otherwise, they watch each other."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        all_stopped = self._ranks and all(is_stopped(process) for process in self._ranks)
        if not all_stopped or now - before > _GAP_S:  # This process may have been stopped, too.
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since >= STOPPED_S:
            self._stopped_since = None
            self._kill()

    def _heard(self, shim: socket.socket, rank: _ForkedRank) -> None:
        """Kill the rank of a shim that is gone."""
        try:
            heard = shim.recv(64)
        except OSError:
            heard = b""
        if not heard:
            self._selector.unregister(shim)
            if not rank.reaped:
                rank.kill()

    def _ended(self, rank: _ForkedRank) -> None:
        """Tell a shim, or the owner, how a rank has ended."""
        self._selector.unregister(rank.watch)
        os.close(rank.watch)
        _, status = os.waitpid(rank.process, 0)
        rank.reaped = True
        del self._ranks[rank.process]
        code = os.waitstatus_to_exitcode(status)
        if rank.shim is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process, signal.SIGKILL)  # Processes that it has started.
            self._tell({"ended": rank.key, "code": code})
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(rank.shim)
        with suppress(OSError):
            rank.shim.sendall(_NUMBER.pack(code))
        rank.shim.close()
        self._tell_stopped()

    def _kill(self) -> None:
        for rank in self._ranks.values():
            rank.kill()

    def _tell_stopped(self) -> None:
        """Tell the owner, if it has asked, when no rank is left."""
        if self._stopping and not self._ranks:
            self._stopping = False
            self._tell({"stopped": True})

    def _tell(self, message: Mapping[str, object]) -> None:
        with suppress(OSError):  # The owner's end is seen next.
            self._control.sendall(pack(message))

    def _leave(self, connection: socket.socket | None) -> None:
        """In a child: close all that is the zygote's."""
        self._selector.close()
        shims = [asked.shim for asked in self._asked]
        shims += [rank.shim for rank in self._ranks.values()]
        for each in (self._listener, self._control, connection, *shims):
            if each is not None:
                each.close()
        for asked in self._asked:
            _close(asked.streams)
        for rank in self._ranks.values():
            os.close(rank.watch)


def main(listener: int, modules: list[str]) -> None:
    """Import modules and fork ranks. Returns in the zygote at its end, and in ranks at theirs."""
    owner = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # Modules must not read the owner's orders.
        os.dup2(nothing.fileno(), 0)
    for name in modules:
        # A rank that needs it tells the error.
        with suppress(ImportError):
            importlib.import_module(name)
    if "mpi4py.MPI" in sys.modules:
        raise RuntimeError(f"one of {', '.join(modules)} has started MPI: ranks cannot be forked")
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {', '.join(modules)} starts threads: ranks cannot be forked")
    gc.collect()
    gc.freeze()
    # Signals for the whole terminal are the launcher's or the searcher's: these end it themselves.
    handlers: dict[int, Any] = {
        number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)
    }
    with suppress(OSError):
        owner.sendall(pack({"ready": os.getpid()}))
    request = Zygote(None if listener < 0 else socket.socket(fileno=listener), owner).serve()
    if request is None:
        os._exit(0)  # Quickly: finalizing torch takes a while.
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _become(request)
    # To its end, as in an interpreter of its own.
    sys.argv = request.argv
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _ignore(_: int, __: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, children that are started do not inherit it."""


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


def _become(request: _RankOrder) -> None:
    """Take over environment, folder, streams and cores, as a process that mpirun starts."""
    os.setsid()
    for number, descriptor in enumerate(request.streams[:_STREAMS]):
        os.dup2(descriptor, number)
    _close(request.streams[:_STREAMS])
    os.environ.clear()
    os.environ.update(request.environment)
    for descriptor in request.streams[_STREAMS:]:
        os.environ[request.link] = str(descriptor)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    os.chdir(request.folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr] # text streams of an interpreter
            line_buffering=True, write_through=bool(os.environ.get("PYTHONUNBUFFERED"))
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

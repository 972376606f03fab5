"""The zygote: a process that has imported what ranks need, and forks a rank for each shim.

    python -P -m dlio.launch.node.zygote LISTENER CONTROL MODULES...

LISTENER is a socket at which shims connect, CONTROL one to the agent. It imports MODULES, but
neither MPI nor CUDA, and has a single thread: a child of a process with threads may inherit a lock
that nobody releases. Ranks end when their shim does, when the agent asks for it, and with this
process.

A rank's environment is that of the job's launcher, with the variables of MPI that its shim has.
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
from dataclasses import dataclass
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
    start: int
    shim: socket.socket
    """It waits for the rank."""


@dataclass(slots=True)
class _ForkedRank:
    process: int
    watch: int
    """Its pidfd."""
    shim: socket.socket
    reaped: bool = False


def rank_environment(shim: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment, from those of its shim and of the launcher, `given`."""
    of_mpi = {name: value for name, value in shim.items() if name.startswith(_OF_MPI)}
    return {**shim, **given, **of_mpi}


class Zygote:
    """Forks ranks for the shims that connect to `listener`, until the agent closes its end of
    `control`.
    """

    def __init__(self, listener: socket.socket, control: socket.socket) -> None:
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
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> _RankOrder | None:
        """Fork for each shim: returns the request in the child, None in the zygote at its end."""
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._ranks else None):
                source = key.fileobj
                if source is self._listener:
                    self._connected()
                elif source is self._control:
                    if not self._ordered():
                        self._kill()
                        return None
                elif isinstance(source, socket.socket):
                    if not key.data.reaped:
                        self._heard(source, key.data)
                elif not key.data.reaped:
                    self._ended(key.data)
            self._look_for_stopped()
            # A shim may be here before the agent's order.
            due = [asked for asked in self._asked if asked.start <= self._start]
            self._asked = [asked for asked in self._asked if asked not in due]
            for asked in due:
                if self._fork(asked):
                    return asked

    def _ordered(self) -> bool:
        """Take an order of the agent; False if it is gone."""
        try:
            order, _ = receive_exactly(self._control)
        except (EOFError, OSError):
            return False
        if "start" in order:
            self._start, self._environment = order["start"], order["environment"]
        else:
            self._stopping, self._start = True, -1
            self._kill()
            self._tell_stopped()
        return True

    def _connected(self) -> None:
        """Hear the request of a new shim."""
        connection, _ = self._listener.accept()
        connection.settimeout(_TIMEOUT_S)
        try:
            asked, streams = receive_exactly(connection, _STREAMS)
        except (EOFError, OSError, ValueError):
            connection.close()
            return
        self._asked.append(_RankOrder(**asked, streams=streams, shim=connection))

    def _fork(self, request: _RankOrder) -> bool:
        """Fork a rank for a shim; True in the child."""
        connection = request.shim
        if request.start != self._start or len(request.streams) != _STREAMS:
            _close(request.streams)  # mpirun of an earlier start.
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
        rank = self._ranks[process] = _ForkedRank(process, watch, connection)
        self._selector.register(connection, selectors.EVENT_READ, rank)
        self._selector.register(watch, selectors.EVENT_READ, rank)
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
                os.kill(rank.process, signal.SIGKILL)

    def _ended(self, rank: _ForkedRank) -> None:
        """Tell a shim how its rank has ended."""
        self._selector.unregister(rank.watch)
        os.close(rank.watch)
        _, status = os.waitpid(rank.process, 0)
        rank.reaped = True
        del self._ranks[rank.process]
        with suppress(KeyError, ValueError):
            self._selector.unregister(rank.shim)
        with suppress(OSError):
            rank.shim.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
        rank.shim.close()
        self._tell_stopped()

    def _kill(self) -> None:
        for process in self._ranks:
            os.kill(process, signal.SIGKILL)

    def _tell_stopped(self) -> None:
        """Tell the agent, if it has asked, when no rank is left."""
        if self._stopping and not self._ranks:
            self._stopping = False
            with suppress(OSError):
                self._control.sendall(pack({"stopped": True}))

    def _leave(self, connection: socket.socket) -> None:
        """In a child: close all that is the zygote's."""
        self._selector.close()
        for each in (self._listener, self._control, connection):
            each.close()
        for asked in self._asked:
            asked.shim.close()
            _close(asked.streams)
        for rank in self._ranks.values():
            rank.shim.close()
            os.close(rank.watch)


def main(listener: int, control: int, modules: list[str]) -> None:
    """Import modules and fork ranks. Returns in the zygote at its end, and in ranks at theirs."""
    agent = socket.socket(fileno=control)
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
    # Signals for the whole terminal are the launcher's: it ends its agents itself.
    handlers: dict[int, Any] = {
        number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)
    }
    with suppress(OSError):
        agent.sendall(pack({"ready": os.getpid()}))
    request = Zygote(socket.socket(fileno=listener), agent).serve()
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
    """Take over environment, folder and streams, as a process that mpirun starts."""
    os.setsid()
    for number, descriptor in enumerate(request.streams):
        os.dup2(descriptor, number)
    _close(request.streams)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr] # text streams of an interpreter
            line_buffering=True, write_through=bool(os.environ.get("PYTHONUNBUFFERED"))
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

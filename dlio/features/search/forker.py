"""The forker: a process that has imported torch, and forks the ranks of trials.

    python -P -m dlio.features.search.forker MODULES...

It has a single thread and neither MPI nor CUDA, so that its children may start either. Ranks end
with it, and it ends with the searcher. Standard input is a socket to it; messages are JSON:

| the searcher sends | the forker answers |
|---|---|
| | `ready` with the number of GPUs, once |
| `fork`: key, `argv`, `environment`, `cores`, and descriptors for output and link | |
| `signal`: key, `number` | |
| | `ended`: key, `code`, negative for a signal |
"""

import importlib
import io
import itertools
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from dlio.launch.node.agent_protocol import Message, pack, receive_exactly
from dlio.util.child_processes import end_with_parent, module_command
from dlio.util.settings import TRIAL_LINK

_STREAMS: Final = 2
_END_TIMEOUT_S: Final = 10.0


class Forker:
    """The searcher's end of a forker process, which imports modules before its first fork."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.control, its = socket.socketpair()
        self._keys = itertools.count()
        with its:
            self._process = subprocess.Popen(
                module_command("dlio.features.search.forker", *modules),
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                # OpenBLAS starts threads when it is loaded.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def fork(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int],
        output: int,
        link: int,
    ) -> int:
        """Fork a rank; return the key by which it is reported.

        `argv` names a module to run as the main program, and its arguments. `output` is the
        descriptor for standard output and error; the rank keeps the descriptor `link`, with its
        number in the environment. Raises OSError if the forker is gone.
        """
        key = next(self._keys)
        request = {"fork": key, "argv": argv, "environment": environment, "cores": cores}
        # The message may be longer than one send takes.
        data = pack(request)
        sent = socket.send_fds(self.control, [data], [output, link])
        self.control.sendall(data[sent:])
        return key

    def signal(self, key: int, number: int) -> None:
        """Send a signal to a rank; nothing if it, or the forker, has ended."""
        with suppress(OSError):
            self.control.sendall(pack({"signal": key, "number": number}))

    def receive(self) -> Message:
        """Return the next message. Raises EOFError or OSError if the forker is gone."""
        message, _ = receive_exactly(self.control)
        return message

    def close(self) -> None:
        """End the forker, and with it all ranks."""
        self.control.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _ForkServer:
    """The forker's end: forks until the searcher is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, tuple[int, int]] = {}
        """Key and pidfd, by process."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Return in a child: the arguments of its program. None in the forker at its end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._ended(key.data)
                    continue
                try:
                    message, streams = receive_exactly(self._control, _STREAMS)
                except (EOFError, OSError):
                    self._end_all()
                    return None
                if "fork" in message:
                    argv = self._fork(message, streams)
                    if argv is not None:
                        return argv
                else:
                    self._signal(message["signal"], message["number"])

    def _fork(self, request: Mapping[str, Any], streams: list[int]) -> list[str] | None:
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            end_with_parent(parent)
            self._leave()
            _become(request, *streams)
            argv: list[str] = request["argv"]
            return argv
        for each in streams:
            os.close(each)
        watch = os.pidfd_open(process)
        self._ranks[process] = (request["fork"], watch)
        self._selector.register(watch, selectors.EVENT_READ, process)
        return None

    def _ended(self, process: int) -> None:
        key, watch = self._ranks.pop(process)
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)  # Processes that it has started.
        message = {"ended": key, "code": os.waitstatus_to_exitcode(status)}
        with suppress(OSError):  # The searcher's end is seen next.
            self._control.sendall(pack(message))

    def _signal(self, wanted: int, number: int) -> None:
        for process, (key, _) in self._ranks.items():
            if key == wanted:
                os.kill(process, number)

    def _end_all(self) -> None:
        for process in self._ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)

    def _leave(self) -> None:
        """In a child: close all that is the forker's."""
        self._selector.close()
        self._control.close()
        for _, watch in self._ranks.values():
            os.close(watch)


def _become(request: Mapping[str, Any], output: int, link: int) -> None:
    """Take over environment, streams and cores."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.clear()
    os.environ.update({**request["environment"], TRIAL_LINK: str(link)})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def main(modules: Sequence[str]) -> None:
    """Import modules and fork ranks. Returns in the forker at its end, and in ranks at theirs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The searcher decides.
    searcher = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for name in modules:
        importlib.import_module(name)
    if "mpi4py.MPI" in sys.modules or len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {', '.join(modules)} starts threads: ranks cannot be forked")
    import torch

    searcher.sendall(pack({"ready": torch.cuda.device_count()}))
    argv = _ForkServer(searcher).serve()
    if argv is not None:
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

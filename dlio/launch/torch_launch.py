"""The launcher without MPI: starts ranks of torch.distributed on this machine.

It serves the store by which ranks meet, and writes each death of a rank there. Unlike torchrun, it
lets the others continue. It does not need torch itself.
"""

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from dlio.launch.job_folder import open_job_folder
from dlio.launch.mpi_launch import code_of
from dlio.launch.rank_environment import meeting_variables, rank_environment
from dlio.launch.rank_failures import ended_by_code, ended_by_signal
from dlio.launch.rank_log import logged
from dlio.launch.rank_output import ErrorFilter, RankOutput
from dlio.util.child_processes import end_groups, module_command
from dlio.util.closable import Closable
from dlio.util.live_line import LiveLine
from dlio.util.settings import DONE, FAILURES, LAUNCHER, MIN_RANKS, settings
from dlio.util.signals import receiving
from dlio.util.threads import Workers

if TYPE_CHECKING:
    from dlio.comm.survival.job_store import EventLog

_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 4096
"""Connections that may wait for torch's store."""
_END_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.2
_TURN_S: Final = 0.005
"""Pause between two looks at all ranks, on systems without file descriptors of processes."""
_ALL_LOST: Final = 1
_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LOOPBACK: Final = ("0100007F", "0000000000000000FFFF00000100007F")
"""The second is how a socket of IPv6 calls it."""
_CALLING: Final = ("01", "02")
"""States of a socket that has connected, or that tries to."""
_REMOTE, _STATE, _USER = 2, 3, 7
"""Columns."""


def launch(
    argv: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    capture: bool = False,
    timeout_s: float | None = None,
    min_ranks: int | None = None,
    live: LiveLine | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on `ranks` ranks of this machine, and wait for their end.

    Ctrl-C and SIGTERM end the ranks. If this process is killed, they end themselves. Arguments are
    those of `mpi_launch.launch`.

    Returns the exit code of the first rank that failed (128 + N if signal N ended it), and the
    output if captured. If ranks survive others: 0 if any rank succeeded.

    Raises subprocess.TimeoutExpired after `timeout_s`.
    """
    # Not at the top: other commands do not need numpy either.
    from dlio.comm.private_store import PrivateStore, StoreServer
    from dlio.comm.survival.job_store import EventLog

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((_HOST, 0), backlog=_BACKLOG))
        folder = stack.enter_context(open_job_folder())
        stack.enter_context(StoreServer(folder))
        stack.enter_context(_ScriptStore(listener))
        port = int(listener.getsockname()[1])
        live = live or LiveLine("", shown=False)
        full = _environment(ranks, folder, port, live, environment or {})
        done_file = None
        if min_ranks is not None:
            done_file = os.path.join(folder, "done")
            # A rank of NCCL that aborts its communicators goes on.
            full |= {MIN_RANKS: str(min_ranks), DONE: done_file}
            full["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        elif not capture:
            full[FAILURES] = folder
        sorter = ErrorFilter(folder=folder)
        output = stack.enter_context(RankOutput(ranks, live, sorter, capture))
        job = stack.enter_context(_TorchJob(logged(argv), ranks, full, output, done_file))
        store = stack.enter_context(contextlib.closing(PrivateStore(folder)))
        order = stack.enter_context(receiving(job.ask_to_end))
        try:
            code = output.as_told(job.run(EventLog(store), timeout_s), order)
        except KeyboardInterrupt:
            sorter.interrupted = True
            raise
        job.close()
        output.close()
        return subprocess.CompletedProcess(list(argv), code, output.text, output.errors)


def _environment(
    ranks: int, store: str, port: int, live: LiveLine, more: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that all ranks have in common."""
    full = {**rank_environment(ranks, live), LAUNCHER: str(os.getpid())}
    # Its warnings of sockets that a lost rank has closed.
    full.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    full |= meeting_variables(ranks, store, _HOST, port)
    # `init_process_group` of a script connects to this store, and serves none itself.
    full["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return {**full, **more}


class _TorchJob(Closable):
    """The ranks, and the store that tells them of deaths."""

    def __init__(
        self,
        argv: Sequence[str],
        ranks: int,
        environment: Mapping[str, str],
        output: RankOutput,
        done_file: str | None,
    ) -> None:
        self._done_file = done_file
        self._output = output
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}
        """Exit code of each rank that has ended, in the order of their ends."""
        try:
            for rank in range(ranks):
                self._ranks[rank] = subprocess.Popen(
                    argv,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output.pipes[rank][0],
                    stderr=output.pipes[rank][1],
                    start_new_session=True,  # `_end` reaches all of a rank.
                )
        except BaseException:
            self.close()
            raise
        output.start()

    def run(self, events: "EventLog", timeout_s: float | None) -> int:
        """Write deaths of ranks until all have ended; return the exit code of the job.

        Raises subprocess.TimeoutExpired.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for rank in self._ends(deadline, timeout_s or 0.0):
            if rank is not None:
                events.append({"dead": rank})
                if self._done_file is None and self._codes[rank]:
                    return self._failed(rank)
            elif failure := self._failure():
                return failure
        if failure := self._failure():
            return failure
        if 0 in self._codes.values():
            return 0
        self._say("all ranks were lost before the end")
        return _ALL_LOST

    def _failed(self, rank: int) -> int:
        """Return the exit code of a rank that others do not survive."""
        code = self._codes[rank]
        if code >= 0:
            self._output.sorter.end_of = ended_by_code(rank, code)
            return code
        if self._output.text is None:
            self._output.sorter.end_of_signal = ended_by_signal(rank, -code)
        else:
            self._say(ended_by_signal(rank, -code))
        return 128 - code

    def _failure(self) -> int | None:
        """Return the exit code with which a rank has ended the job."""
        return None if self._done_file is None else code_of(self._done_file)

    def _say(self, message: str) -> None:
        self._output.live.write(sys.stderr, [f"dlio: error: {message}\n"])

    def _ends(self, deadline: float, timeout_s: float) -> Iterator[int | None]:
        """Yield each rank when it ends, and None from time to time; end with the last one."""
        with ExitStack() as stack:
            poll = select.poll()
            watched = {rank: _watch(process, stack) for rank, process in self._ranks.items()}
            for descriptor in watched.values():
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
            all_watched = None not in watched.values()
            while len(self._codes) < len(self._ranks):
                ready = poll.poll(1000 * (_LOOK_S if all_watched else _TURN_S))
                for rank, process in self._ranks.items():
                    if rank not in self._codes and process.poll() is not None:
                        self._codes[rank] = process.returncode
                        if (descriptor := watched[rank]) is not None:
                            poll.unregister(descriptor)
                        yield rank
                if not ready:
                    yield None
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("dlio", timeout_s)

    def ask_to_end(self) -> None:
        for process in self._ranks.values():
            process.send_signal(signal.SIGUSR1)  # It does nothing to one that has ended.

    def close(self) -> None:
        """End the ranks by SIGTERM, and by SIGKILL if they ignore it."""
        end_groups(list(self._ranks.values()), _END_TIMEOUT_S)


def _watch(process: "subprocess.Popen[bytes]", stack: ExitStack) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None if there is none."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        # Linux before 5.3, a Python built on one, or a sandbox.
        return None
    stack.callback(os.close, descriptor)
    return descriptor


class _ScriptStore(Closable):
    """Serves torch's store at a listener, once a process of this user calls it.

    Most jobs never do: only scripts that make process groups of their own.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = Workers("dlio-script-store", self._run, stop_timeout_s=_END_TIMEOUT_S)
        self._watch.start()

    def close(self) -> None:
        self._watch.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _run(self, _: int) -> None:
        port = int(self._listener.getsockname()[1])
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._watch.stopping.is_set():
            if not poll.poll(1000 * _LOOK_S):
                continue
            if is_called_by_own_user(port):
                break
            self._watch.stopping.wait(_LOOK_S)  # Strangers wait, and take no descriptor.
        else:
            return
        number = self._listener.fileno()
        self._process = subprocess.Popen(
            module_command("dlio.comm.script_store", str(number), str(settings().timeout_s)),
            stdin=subprocess.PIPE,
            pass_fds=[number],
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            start_new_session=True,
        )
        self._listener.close()


def is_called_by_own_user(port: int) -> bool:
    """True if a process of this user has called a port at loopback, whether or not it was accepted.

    True also where the kernel does not tell.
    """
    wanted = [f"{address}:{port:04X}" for address in _LOOPBACK]
    rows: list[str] = []
    try:
        for table in _TABLES:
            with open(table, encoding="ascii") as file:
                rows += file.read().splitlines()[1:]
    except OSError:
        return True
    own = str(os.geteuid())
    calls = (row.split() for row in rows)
    return any(
        call[_REMOTE] in wanted and call[_STATE] in _CALLING and call[_USER] == own
        for call in calls
    )

"""Starting ranks: the mpirun command that `dlio train -n 4` runs for its user."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from dlio.comm.environment import LAUNCHER, TERMINAL
from dlio.errors import UsageError
from dlio.util.cores import available_cores
from dlio.util.shared import SharedFolder

_END_TIMEOUT_S = 10.0
_RULE = "-" * 20
_RULE_BESIDE = re.compile(f"^({_RULE}-*)|({_RULE}-*)$")
_ERROR = "dlio: error:"
_NOT_STARTED = "PMIx server's listener thread failed to start"
"""What mpirun says, before it starts a rank, when a network interface went as it listed them."""
_STARTS = 3
"""How often mpirun is started before that is believed."""
_BANNERS = (
    "MPI_ABORT was invoked",
    "has exited due to process rank",
    "exited with non-zero status",
    "exiting without calling",
    "noticed that process rank",
)


def run_ranks(ranks: int, argv: Sequence[str]) -> int:
    """Run `dlio argv...` on `ranks` ranks of this machine; returns the exit code.

    mpirun gets what it needs: as root, with more ranks than cores, and no binding of a rank's
    threads to one core. Ctrl-C and SIGTERM end the ranks; if this process is killed, they notice
    (`watch_launcher`). What the ranks print is passed on as it comes, but for Open MPI's banners
    on top of an error that a rank has explained itself.

    Raises UsageError when there is no mpirun.
    """
    mpirun = find_mpirun()
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        environment.update(**{TERMINAL: "1"}, COLUMNS=str(size.columns), LINES=str(size.lines))
    command = [mpirun]
    with ExitStack() as stack:
        if _is_open_mpi(mpirun):
            command += ["--bind-to", "none"]
            if ranks > available_cores():
                command.append("--oversubscribe")
            if os.geteuid() == 0:
                environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            # The libfabric transport waits a second for networks; one machine needs none.
            environment.setdefault("OMPI_MCA_btl", "^ofi")
            # Open MPI's own segments would outlive ranks that are killed; there they do not.
            segments = stack.enter_context(SharedFolder(f"mpi-{secrets.token_hex(8)}"))
            environment.setdefault("OMPI_MCA_btl_sm_backing_directory", segments.path)
        command += ["-n", str(ranks), sys.executable, "-m", "dlio.cli", *argv]
        return _run(command, environment)


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run mpirun until it has started its ranks, and these until they end; the exit code."""
    for _ in range(_STARTS - 1):
        sorter = ErrorFilter(again=True)
        code = _run_once(command, environment, sorter)
        if not sorter.not_started:
            return code
    return _run_once(command, environment, ErrorFilter())


def _run_once(command: Sequence[str], environment: dict[str, str], sorter: "ErrorFilter") -> int:
    """Run a command in a process group of its own, which ends with it."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stderr is not None
    relay = threading.Thread(target=_relay, args=(process.stderr, sys.stderr, sorter), daemon=True)
    relay.start()
    try:
        return _exit_code(process.wait())
    except KeyboardInterrupt:
        sorter.interrupted = True
        _end(process)
        raise
    finally:
        relay.join(_END_TIMEOUT_S)
        process.stderr.close()


def find_mpirun() -> str:
    """mpirun of this Python's environment, else the one on PATH. Raises UsageError."""
    beside_python = os.path.join(os.path.dirname(sys.executable), "mpirun")
    found = beside_python if os.access(beside_python, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise UsageError(
            "ranks were asked for (-n), but there is no mpirun: pip install 'dlio[mpi]', or load "
            "your site's MPI module"
        )
    return found


class ErrorFilter:
    """Sorts what ranks and mpirun write to standard error, line by line.

    An error that several ranks report is shown once. Open MPI's banners about an aborted rank
    are kept back; they are shown at the end, unless a rank has explained itself.
    """

    def __init__(self, again: bool = False) -> None:
        """again: mpirun will be started again if it did not start its ranks."""
        self._again = again
        self._errors: set[str] = set()
        self._block: list[str] | None = None
        self._banners: list[str] = []
        self.interrupted = False
        """Set when the user has ended the ranks, who need no explanation then."""
        self.not_started = False
        """Set when mpirun said that it could not start any rank, and may if asked again."""

    def feed(self, line: str) -> list[str]:
        """The lines to show now that this one has come."""
        line = line.replace("\0", "")  # Open MPI ends its banners with one.
        if not line:
            return []
        if _ERROR not in line:
            return self._sort(line)
        # A rank ended before its line did, or in the middle of a banner.
        parts = _RULE_BESIDE.split(line.removesuffix("\n"))
        return [shown for part in parts if part for shown in self._sort(part + "\n")]

    def _sort(self, line: str) -> list[str]:
        if line.startswith(_RULE):
            if self._block is None:
                self._block = [line]
                return []
            block, self._block = [*self._block, line], None
            if self._again and any(_NOT_STARTED in row for row in block):
                self.not_started = True
                return []
            if any(words in row for row in block for words in _BANNERS):
                self._banners += block
                return []
            return block
        if line.lstrip().startswith(_ERROR):
            # Other ranks' words may come in the middle of a banner.
            line = line.lstrip()
            shown = [] if line in self._errors else [line]
            self._errors.add(line)
            return shown
        if self._block is not None:
            self._block.append(line)
            return []
        return [line]

    def end(self) -> list[str]:
        """The lines to show when nothing more comes."""
        left = self._block or []
        return left if self._errors or self.interrupted else [*self._banners, *left]


def _relay(stream: IO[str], to: IO[str], sorter: ErrorFilter) -> None:
    for line in stream:
        if shown := sorter.feed(line):
            to.writelines(shown)
            to.flush()
    to.writelines(sorter.end())
    to.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End mpirun and its ranks: politely, then for good."""
    for number, patience_s in ((signal.SIGTERM, _END_TIMEOUT_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        return


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _is_open_mpi(mpirun: str) -> bool:
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in done.stdout

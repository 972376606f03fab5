"""A way out of commands whose source hangs.

A thread in a system call on a hung file system keeps its process from ending, even by SIGKILL. So
a command reads its source in a child process. The parent touches no source; it ends when the
child's first thread has ended.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Final

from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.util.child_processes import end_with_parent
from dlio.util.printable import print_line
from dlio.util.settings import settings

_PATIENCE_S: Final = 5.0
_POLL_S: Final = 0.02
_HUNG: Final = 2


def abandonable() -> None:
    """Continue in a child process; the parent waits, forwards signals and exits as the child does.

    Call it before any thread is started. In a rank, whose launcher ends it, nothing happens.
    """
    if under_mpi() or under_torch() or settings().no_fork:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # A group of its own: a terminal's Ctrl-C comes once, through the parent.
        os.setpgid(0, 0)
        end_with_parent(parent)
        return
    os._exit(_wait(child))


def _wait(child: int) -> int:
    """Wait for the child and return the exit code; end by the same signal if it was killed."""

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    ended_at: float | None = None
    delay = 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                with suppress(OSError):  # The handling of SIGKILL cannot be set.
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            return code
        if _has_ended(child):
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > _PATIENCE_S:
                print_line(
                    f"dlio: process {child} is left behind: it waits for a file system that hangs",
                    sys.stderr,
                )
                return _HUNG
        time.sleep(delay)
        delay = min(_POLL_S, delay * 1.5)


def _has_ended(pid: int) -> bool:
    """True if a process's first thread has ended, even if others keep the process alive."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False

"""Processes, files and shared memory that jobs leave behind."""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from dlio.util.shared_folders import SHARED_MEMORY, own_memory
from dlio.util.trusted_files import closing_descriptor

JOB: Final = "CHAOS_JOB"
"""Environment variable by which all processes of a job are known, whoever started them."""
_ALIVE: Final = "alive"
_POLL_S: Final = 0.05
_REAPED_S: Final = 10.0


def processes_of(job: str) -> list[int]:
    """Return the living processes of a job, by the variable JOB in their environment."""
    wanted = f"{JOB}={job}".encode()
    living = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            # A zombie has no environment.
            if wanted in file.read().split(b"\0"):
                living.append(int(name))
    return living


def kill(processes: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes; some may have ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def shared_memory() -> set[str]:
    """Return this user's entries in shared memory that no living process uses."""
    mapped = _mapped()
    entries = set()
    own = os.path.basename(own_memory())
    for entry in os.scandir(SHARED_MEMORY):
        with suppress(OSError):
            if entry.name == own:
                entries |= {f"{own}/{name}" for name in _unheld(entry.path)}
            elif entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                entries |= {entry.name} - mapped
    return entries


def _unheld(folder: str) -> list[str]:
    """Return dlio's folders in shared memory whose lock nobody holds."""
    unheld = []
    for entry in os.scandir(folder):
        with suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                continue
            path = os.path.join(entry.path, _ALIVE)
            with closing_descriptor(os.open(path, os.O_RDONLY)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unheld.append(entry.name)
    return unheld


def _mapped() -> set[str]:
    """Return the top entries of shared memory that any process has mapped or open."""
    prefix = f"{SHARED_MEMORY}/"
    paths = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8") as file:
            paths += [line.split(maxsplit=5)[-1] for line in file if prefix in line]
        with suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    paths.append(os.readlink(descriptor.path))
    return {
        path.removeprefix(prefix).split("/")[0].strip() for path in paths if path.startswith(prefix)
    }


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Return what is there besides `before`, once reapers had time for killed jobs' folders."""
    wait_until(lambda: not shared_memory() - before, _REAPED_S)
    return sorted(shared_memory() - before)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Return once a condition holds, or after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)

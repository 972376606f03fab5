"""Processes and their use of the machine, from /proc."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with one thread meanwhile."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def children() -> dict[int, list[int]]:
    """Children of all processes of the machine, by parent.

    Parents are looked up in the list of all processes, as some kernels and sandboxes have no lists
    of children.
    """
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):  # It has ended meanwhile.
            below.setdefault(int(_fields(int(name))[1]), []).append(int(name))
    return below


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    below, processes = children(), [pid]
    for parent in processes:
        processes += below.get(parent, [])
    return processes


def tree(pid: int) -> list[int]:
    """A process and its descendants in the same session; others have left it on purpose."""
    processes = []
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(pid)
        for each in descendants(pid):
            with contextlib.suppress(OSError):
                if os.getsid(each) == session:
                    processes.append(each)
    return processes


def cpu_s(pid: int) -> float:
    """Seconds that a process and its ended children have been on processors."""
    try:
        fields = _fields(pid)
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> int:
    """KiB of memory, that which is shared divided among its sharers."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return 0


def command_line(pid: int) -> str:
    """Words of a process's command; empty when it has ended, also for a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def threads(pid: int) -> int:
    """Threads of a process; 0 when it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _fields(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat after the program's name, which may hold anything. Raises OSError.

    The first is the state, the second the parent.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()

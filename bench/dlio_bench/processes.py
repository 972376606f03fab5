"""Processes and their use of the machine, from /proc."""

import contextlib
import os

__all__ = ["cpu_s", "pss", "threads", "tree"]


def tree(pid: int) -> list[int]:
    """A process and its descendants in the same session; others have left it on purpose."""
    try:
        processes, session = [pid], os.getsid(pid)
    except ProcessLookupError:
        return []
    for parent in processes:
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{parent}/children") as file:
            below = [int(text) for text in file.read().split()]
            processes += [child for child in below if os.getsid(child) == session]
    return processes


def cpu_s(pid: int) -> float:
    """Seconds that a process and its ended children have been on processors."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
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


def threads(pid: int) -> int:
    """Threads of a process; 0 when it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0

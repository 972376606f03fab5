"""Processes and their use of the machine, from /proc."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final


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


@contextlib.contextmanager
def spinning_processes(count: int) -> Iterator[None]:
    """Run processes that use all of a core each, and that end with this one."""
    text = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10000))"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", text]) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def cores_for(threads: int, seconds: float) -> float:
    """Measure how many cores a process of so many threads, that do nothing but compute and need no
    lock, gets next to all else that runs now: its seconds on processors for each second."""
    command = [sys.executable, "-S", "-c", _COMPUTING, str(threads), str(seconds)]
    # In a session of its own, as contenders are: some systems divide cores among sessions first.
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, start_new_session=True
    )
    return float(done.stdout)


_COMPUTING: Final = """
import hashlib, os, sys, threading, time

def compute():
    while True:  # Calls that take milliseconds, without the interpreter's lock.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)

for _ in range(int(sys.argv[1])):
    threading.Thread(target=compute, daemon=True).start()
time.sleep(0.1)
wall, cpu = time.perf_counter(), time.process_time()
time.sleep(float(sys.argv[2]))
print((time.process_time() - cpu) / (time.perf_counter() - wall), flush=True)
os._exit(0)
"""


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

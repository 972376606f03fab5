"""Tells whether a loader's threads wait for each other because Python code holds the interpreter's
lock: torch's worker processes, in whose place they are, would not."""

import ctypes
import functools
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

from dlio.loader.passes import PassCounters
from dlio.util.cores import available_cores
from dlio.util.printable import tell_once
from dlio.util.units import counted

_WATCHED_S: Final = 3.0
"""Time of passes that is watched, without their first batches."""
_EACH_S: Final = 0.02
"""Least time between two looks at the threads."""
_FEWEST: Final = 20
"""Times that the threads are looked at."""
_WAITING: Final = 0.5
"""Least share of the time that the training loop waits for the loader."""
_USED: Final = 0.6
"""Cores in use: with fewer, threads wait for storage."""
_GAIN: Final = 1.3
"""How many times as many cores there are for the threads, at least."""
_BLOCKED: Final = 0.2
"""Least share of the threads' time, but for waiting for a core, that they wait for a lock."""
_QUEUED: Final = 0.5
"""Most of the threads' time that they wait for a core, as next to other processes."""
_LONG_S: Final = 0.005
"""Seconds of a batch's work, at least: to bring one from another process takes about 1 ms."""
_PYTHON: Final = ("fetch", "transform", "collate")
"""Stages of a user's own code."""
_MOSTLY: Final = 0.8
_LONGEST: Final = 128
"""Bytes that are read of a kernel's file."""


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Measurements of a pass's threads while the training loop waits for them."""

    threads: int
    waited: float
    """Share of the time that the training loop waited."""
    used: float
    """Cores that the threads used together."""
    queued: float
    """Share of the threads' time that they waited for a core."""
    blocked: float
    """Share of the threads' time that they waited for a lock."""
    batch_s: float
    """Seconds of the cores that a batch took."""

    def shares_core(self, cores: int) -> bool:
        """True if as many processes would use more of so many cores."""
        return (
            self.batch_s >= _LONG_S
            and self.waited >= _WAITING
            and self.used >= _USED
            and min(self.threads, cores) >= _GAIN * self.used
            and self.queued <= _QUEUED
            and self.blocked >= _BLOCKED * (1 - self.queued)
        )


class LockWatch:
    """Watches the threads of a loader's passes for some seconds, from the thread that takes their
    batches.

    Where the kernel does not show the waits of threads, nothing is told.
    """

    def __init__(self) -> None:
        self.dataset = ""
        """Its name, for users."""
        self._is_over = False
        self._stats: PassCounters | None = None
        self._since: tuple[float, ...] = ()
        """Of the last look: time; seconds used, queued and waited by then; batches."""
        self._sums = [0.0] * 5
        self._looks = self._blocked = 0

    def look(self, stats: PassCounters) -> None:
        """Look at the threads of a pass, if it is time; after each batch."""
        if self._is_over:
            return
        now, threads, last = time.perf_counter(), stats.python_threads, self._since
        if stats is self._stats and last and now - last[0] < _EACH_S:
            return
        times = [_times_of(thread) for thread in threads]
        if len(threads) < 2 or None in times:
            self._is_over = True
            return
        used, queued = (sum(each[k] for each in times if each) for k in (0, 1))
        self._since = (now, used, queued, stats.stall_s, stats.batches)
        if stats is not self._stats:  # The first batch of a pass, which waits for its threads.
            self._stats = stats
            return
        self._sums = [a + b - c for a, b, c in zip(self._sums, self._since, last, strict=True)]
        self._looks += 1
        self._blocked += sum(map(_waits_for_lock, threads))
        seconds, used, queued, waited, batches = self._sums
        if seconds >= _WATCHED_S and self._looks >= _FEWEST:
            self._is_over, self._stats = True, None
            count = len(threads)
            measured = ThreadTimes(
                count,
                waited=waited / seconds,
                used=used / seconds,
                queued=queued / seconds / count,
                blocked=self._blocked / self._looks / count,
                batch_s=used / max(1, batches),
            )
            self._judge(measured, stats)

    def _judge(self, times: ThreadTimes, stats: PassCounters) -> None:
        spent = stats.clock.snapshot()
        own = sum(spent[stage] for stage in _PYTHON)
        if times.shares_core(available_cores()) and own >= _MOSTLY * sum(spent.values()):
            tell_once(described(self.dataset, times))


def described(name: str, times: ThreadTimes) -> str:
    """Return the line about threads that share cores."""
    return (
        f"{name}: {counted(times.threads, 'thread')} of the loader together have {times.used:.0%} "
        "of one core, since its Python code holds the interpreter's lock, and the training loop "
        f"waits for them {times.waited:.0%} of the time: workers='process' makes them processes, "
        "as torch's are, which do not wait for each other"
    )


def _times_of(thread: threading.Thread) -> tuple[float, float] | None:
    """Return the seconds that a thread has used a core, and waited for one."""
    try:
        used, queued, _ = _told_of(thread, "schedstat").split()
        return int(used) / 1e9, int(queued) / 1e9
    except ValueError:  # It has ended, or the kernel counts no times.
        return None


def _waits_for_lock(thread: threading.Thread) -> bool:
    return _told_of(thread, "wchan").startswith(b"futex")


def _told_of(thread: threading.Thread, name: str) -> bytes:
    """Return the first bytes of a file of the kernel about a thread; none if it has ended.

    With the interpreter's lock held: to get it back takes up to 5 ms from each of these threads,
    and none of those that compute would be met waiting for it.
    """
    calls, text = _calls(), ctypes.create_string_buffer(_LONGEST)
    path = f"/proc/self/task/{thread.native_id}/{name}".encode()
    file = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if file < 0:
        return b""
    count = calls.read(file, text, _LONGEST)
    calls.close(file)
    return text.raw[: max(0, count)]


@functools.cache
def _calls() -> ctypes.PyDLL:
    calls = ctypes.PyDLL(None)
    calls.open.argtypes = (ctypes.c_char_p, ctypes.c_int)
    calls.read.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    calls.read.restype = ctypes.c_ssize_t
    return calls

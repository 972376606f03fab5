"""Processor time and memory that a rank and its worker processes take."""

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dlio_bench.bench_processes import cpu_s, pss, tree


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Use of the machine, by this process and all below it."""

    cpu_s: float
    """Seconds on processors."""
    memory_bytes: int
    """Largest proportional set size that was seen, beyond that of the beginning."""
    processes: int
    """Largest number of processes that was seen."""


class ResourceAccount:
    """Measures from `__enter__` to `__exit__`; memory is that of the moments of `look`.

    Memory is not watched all the time: while the system adds up the pages of a process, none of its
    threads can have new memory.
    """

    def __init__(self) -> None:
        self.taken = ResourceUse(0.0, 0, 0)
        """The result, after `__exit__`."""

    def __enter__(self) -> Self:
        self._memory, self._before = 0, _memory()
        self._most_processes = 1
        self._cpu_s = _cpu_s()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.look()
        memory = max(0, self._memory - self._before)
        self.taken = ResourceUse(_cpu_s() - self._cpu_s, memory, self._most_processes)

    def look(self) -> None:
        """Look at the memory; takes milliseconds per GiB."""
        self._memory = max(self._memory, _memory())
        self._most_processes = max(self._most_processes, len(tree(os.getpid())))


def _memory() -> int:
    return 1024 * sum(pss(pid) for pid in tree(os.getpid()))


def _cpu_s() -> float:
    return sum(cpu_s(pid) for pid in tree(os.getpid()))

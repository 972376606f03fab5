"""Processor time and memory that a rank and its worker processes take."""

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from dlio.util.threads import Workers
from dlio_bench.processes import cpu_s, pss, tree

__all__ = ["Account", "Taken"]

_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """Use of the machine, by this process and all below it."""

    cpu_s: float
    """Seconds on processors."""
    memory_bytes: int
    """Largest proportional set size that was seen, beyond that of the beginning."""
    processes: int
    """Largest number of processes that was seen."""


class Account:
    """Measures from `__enter__` to `__exit__`; memory is looked at once a second."""

    def __init__(self) -> None:
        self._workers = Workers("dlio-bench-account", self._watch)
        self.taken = Taken(0.0, 0, 0)
        """The result, after `__exit__`."""

    def __enter__(self) -> Self:
        self._memory, self._before = 0, _memory()
        self._most_processes = 1
        self._cpu_s = _cpu_s()
        self._workers.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._workers.close()
        self._look()
        memory = max(0, self._memory - self._before)
        self.taken = Taken(_cpu_s() - self._cpu_s, memory, self._most_processes)

    def _watch(self, _: int) -> None:
        while not self._workers.stopping.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        self._memory = max(self._memory, _memory())
        self._most_processes = max(self._most_processes, len(tree(os.getpid())))


def _memory() -> int:
    return 1024 * sum(pss(pid) for pid in tree(os.getpid()))


def _cpu_s() -> float:
    return sum(cpu_s(pid) for pid in tree(os.getpid()))

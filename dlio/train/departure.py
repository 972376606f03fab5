"""Ranks that end on purpose: at SIGTERM or SIGUSR1, and at the time of --leave-at."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dlio.comm.survival.membership import Elastic
from dlio.util.signals import (
    RESUME_CODE,
    StopSignals,
    begin_to_save,
    say_nothing_is_saved,
    work_is_done,
)

_TOGETHER_S: Final = 2.0
"""Ranks whose clocks differ by less than this leave together."""


@contextmanager
def departure_at(elastic: Elastic | None, seconds: float | None) -> Iterator[None]:
    """Within a `with` statement, have this rank leave at SIGTERM or SIGUSR1 or in time.

    It finishes its batch. A second signal ends it at once.
    """
    if elastic is None:
        yield
        return
    begin_to_save()
    numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

    def leave(number: int, _: object) -> None:
        elastic.leaves = True
        signal.signal(number, before[number])

    if seconds is not None:
        elastic.leave_at = time.monotonic() + seconds - _TOGETHER_S
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class EndRequests:
    """SIGTERM and SIGUSR1, which tell a run with checkpoints to end.

    Before training begins there is nothing to save: this process ends at once with `RESUME_CODE`.
    Afterwards `ask` is called. A second SIGTERM ends the process in any case.
    """

    def __init__(self) -> None:
        self.ask: Callable[[], object] | None = None
        """Called by the handler of a signal once training has begun."""
        self._asked = StopSignals(self._end)

    def __enter__(self) -> "EndRequests":
        self._asked.listen()
        begin_to_save()  # From here on this is who ends the process.
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            work_is_done()  # Before they have their former effect, which may kill.
        self._asked.stop()

    def _end(self) -> None:
        if self.ask is not None:
            self.ask()
            return
        # Nothing is closed: others may wait for this rank, or this thread be inside of MPI.
        say_nothing_is_saved()
        os._exit(RESUME_CODE)

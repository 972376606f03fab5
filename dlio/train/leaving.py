"""Ranks that end on purpose: at SIGTERM, and at the time of --leave-at."""

import datetime
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dlio.comm.membership import Elastic
from dlio.errors import UsageError

__all__ = ["leaving_at", "seconds_until"]

_TOGETHER_S: Final = 2.0
"""Ranks whose clocks differ by less than this leave together."""


def seconds_until(text: str, now: datetime.datetime) -> float:
    """Return the time until a clock shows HH:MM next. Raises UsageError for another form."""
    try:
        then = datetime.datetime.strptime(text, "%H:%M").time()
    except ValueError:
        raise UsageError(f"--leave-at {text}: give a time of day, such as 23:50") from None
    moment = datetime.datetime.combine(now.date(), then)
    if moment <= now:
        moment += datetime.timedelta(days=1)
    return (moment - now).total_seconds()


@contextmanager
def leaving_at(elastic: Elastic | None, time_of_day: str | None) -> Iterator[None]:
    """Within a `with` statement, have this rank leave at SIGTERM, and at a time of day.

    It finishes its batch. A second SIGTERM ends it at once.
    """
    if elastic is None:
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def leave(*_: object) -> None:
        elastic.leaves = True
        signal.signal(signal.SIGTERM, before)

    if time_of_day is not None:
        left_s = seconds_until(time_of_day, datetime.datetime.now())
        elastic.leave_at = time.monotonic() + left_s - _TOGETHER_S
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

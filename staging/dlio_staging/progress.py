"""Progress of a long command: a bar on a terminal; elsewhere a plain line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dlio.util.printable import print_line
from dlio.util.progress import Bar
from dlio.util.units import format_bytes

__all__ = ["Shown", "show_progress"]

_NEWS_EVERY_S: Final = 10.0
_FIRST_NEWS_S: Final = 2.0


class Shown:
    """Display of progress in bytes, called with the bytes done so far. This one shows nothing."""

    def __init__(self, total: int) -> None:
        self._total = total

    def total(self, total: int) -> None:
        """Set the bytes of the whole work, when they become known later."""
        self._total = total

    def __call__(self, done: int) -> None:
        """Show that `done` bytes of the work are done."""


class _OnTerminal(Shown):
    def __init__(self, total: int, bar: Bar) -> None:
        super().__init__(total)
        self._bar = bar

    def total(self, total: int) -> None:
        self._bar.update(total=total)

    def __call__(self, done: int) -> None:
        self._bar.update(done)


class _InLines(Shown):
    def __init__(self, total: int, title: str) -> None:
        super().__init__(total)
        self._title = title
        self._started = time.monotonic()
        self._next = self._started + _FIRST_NEWS_S

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _NEWS_EVERY_S
        rate = done / (now - self._started)
        left = f", {(self._total - done) / rate:.0f} s left" if rate else ""
        print_line(
            f"{self._title}: {format_bytes(done)} of {format_bytes(self._total)}, "
            f"{format_bytes(rate)}/s{left}",
            stream=sys.stderr,
        )


@contextmanager
def show_progress(total: int, shown: bool, title: str = "staging") -> Iterator[Shown]:
    """Show the progress of the work inside the `with`.

    Args:
        total: bytes of work.
        shown: False to show nothing.
    """
    from dlio.comm.environment import shows_terminal

    if not shown or not total:
        yield Shown(total)
    elif shows_terminal():
        with Bar(title, total=total, in_bytes=True, transient=True, to_stderr=True) as bar:
            yield _OnTerminal(total, bar)
    else:
        yield _InLines(total, title)

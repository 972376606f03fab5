"""Progress of a long command: a bar on a terminal; elsewhere a plain line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dlio.util.live_figures import publish
from dlio.util.printable import print_line
from dlio.util.progress_bar import ProgressBar
from dlio.util.units import format_bytes

_NEWS_EVERY_S: Final = 10.0
_FIRST_NEWS_S: Final = 2.0


class ByteProgress:
    """Display of progress in bytes, called with the bytes done so far. This one shows nothing, but
    to `dlio top`."""

    def __init__(self, total: int, title: str) -> None:
        self._total, self._title = total, title
        self._done = 0

    def figures(self) -> dict[str, object]:
        """Return the bytes done and those of the whole work."""
        return {"title": self._title, "done": self._done, "total": self._total}

    def total(self, total: int) -> None:
        """Set the bytes of the whole work, when they become known later."""
        self._total = total

    def __call__(self, done: int) -> None:
        """Show that `done` bytes of the work are done."""
        self._done = done


class _TerminalProgress(ByteProgress):
    def __init__(self, total: int, title: str, bar: ProgressBar) -> None:
        super().__init__(total, title)
        self._bar = bar

    def total(self, total: int) -> None:
        super().total(total)
        self._bar.update(total=total)

    def __call__(self, done: int) -> None:
        super().__call__(done)
        self._bar.update(done)


class _LineProgress(ByteProgress):
    def __init__(self, total: int, title: str) -> None:
        super().__init__(total, title)
        self._started = time.monotonic()
        self._next = self._started + _FIRST_NEWS_S

    def __call__(self, done: int) -> None:
        super().__call__(done)
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
def show_progress(total: int, shown: bool, title: str = "staging") -> Iterator[ByteProgress]:
    """Show the progress of the work inside the `with`.

    Args:
        total: bytes of work.
        shown: False to show nothing.
    """
    from dlio.comm.launch_environment import shows_terminal

    if not shown or not total:
        with _published(ByteProgress(total, title)) as quiet:
            yield quiet
    elif shows_terminal():
        with (
            ProgressBar(title, total=total, in_bytes=True, transient=True, to_stderr=True) as bar,
            _published(_TerminalProgress(total, title, bar)) as drawn,
        ):
            yield drawn
    else:
        with _published(_LineProgress(total, title)) as line_wise:
            yield line_wise


@contextmanager
def _published(shown: ByteProgress) -> Iterator[ByteProgress]:
    with publish("work", shown.figures):
        yield shown

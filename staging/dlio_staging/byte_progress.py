"""Progress of a long command: a bar on a terminal; elsewhere a plain line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from dlio.util.live_figures import publish
from dlio.util.printable import print_line
from dlio.util.progress_bar import ProgressBar
from dlio.util.units import format_bytes

_NEWS_EVERY_S: Final = 10.0
_FIRST_NEWS_S: Final = 2.0


class ByteProgress:
    """Progress, called with the bytes done so far: on a bar, in lines, or for `dlio top` alone."""

    def __init__(
        self, total: int, title: str, bar: ProgressBar | None = None, *, lines: bool = False
    ) -> None:
        self._total, self._title = total, title
        self._bar, self._lines = bar, lines
        self._done = 0
        self._started = time.monotonic()
        self._next = self._started + _FIRST_NEWS_S

    def figures(self) -> dict[str, object]:
        """Return the bytes done and those of the whole work."""
        return {"title": self._title, "done": self._done, "total": self._total}

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show that `done` bytes of the work are done, of which the whole may be known only now."""
        self._done = done
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.update(done, total=self._total)
        now = time.monotonic()
        if not self._lines or now < self._next:
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
    """Show the progress of the work inside the `with`, of `total` bytes, if it is to be shown."""
    from dlio.comm.launch_environment import shows_terminal

    shown = shown and bool(total)
    with ExitStack() as stack:
        bar = None
        if shown and shows_terminal():
            drawn = ProgressBar(title, total=total, in_bytes=True, transient=True, to_stderr=True)
            bar = stack.enter_context(drawn)
        progress = ByteProgress(total, title, bar, lines=shown and bar is None)
        stack.enter_context(publish("work", progress.figures))
        yield progress

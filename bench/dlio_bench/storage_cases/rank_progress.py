"""Progress of ranks: by their launcher's line, or as a bar of this process's own."""

import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from dlio.util.live_line import tell_launcher, tells_launcher
from dlio.util.progress_bar import ProgressBar


class ProgressRow(Protocol):
    """A row of progress."""

    def begin(self, title: str, total: float | None = None) -> None:
        """Begin other work."""

    def update(self, done: float | None = None) -> None:
        """Show that `done` units are done."""


class RankProgress:
    """Progress of one rank; the others show nothing.

    Args:
        shown: True on the rank that shows it.
    """

    def __init__(self, shown: bool) -> None:
        self._stack = ExitStack()
        self._told = shown and tells_launcher()
        self._bar: ProgressBar | None = None
        if shown and not self._told and sys.stderr.isatty():
            self._bar = ProgressBar(transient=True, to_stderr=True)
        self._title, self._total = "", 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def begin(self, title: str, total: float | None = None) -> None:
        """Begin other work of `total` units."""
        self._title, self._total = title, total or 0.0
        if self._bar is not None:
            self._bar.begin(title, total)
        self.update(0)

    def update(self, done: float | None = None) -> None:
        """Show that `done` units are done."""
        if self._told:
            tell_launcher(self._title, done or 0.0, self._total)
        elif self._bar is not None:
            self._bar.update(done)

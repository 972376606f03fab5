"""Progress of ranks: by their launcher's line, or as a bar of this process's own."""

import sys
from contextlib import ExitStack

from dlio.util.live_line import tell_launcher, tells_launcher
from dlio.util.progress_bar import ProgressBar


class RankProgress(ExitStack):
    """Progress of the rank on which it is shown; the others show nothing."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self._told = shown and tells_launcher()
        self._bar: ProgressBar | None = None
        if shown and not self._told and sys.stderr.isatty():
            self._bar = self.enter_context(ProgressBar(transient=True, to_stderr=True))
        self._title, self._total = "", 0.0

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

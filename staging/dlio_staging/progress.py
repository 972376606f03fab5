"""Progress of a long command: a bar on a terminal, a plain line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dlio.util.units import format_bytes

_NEWS_EVERY_S = 10.0


class Shown:
    """Call it with the bytes done so far, as often as one likes."""

    def __init__(self, total: int) -> None:
        self._total = total

    def total(self, total: int) -> None:
        """Say how many bytes there are, where that is learnt later."""
        self._total = total

    def __call__(self, done: int) -> None:
        """Nothing is shown."""


class _Bar(Shown):
    def __init__(self, total: int, what: str) -> None:
        super().__init__(total)
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            transient=True,
            console=Console(file=sys.stderr),
        )
        self._task = self.bar.add_task(what, total=total)

    def total(self, total: int) -> None:
        self.bar.update(self._task, total=total)

    def __call__(self, done: int) -> None:
        self.bar.update(self._task, completed=done)


class _Lines(Shown):
    def __init__(self, total: int, what: str) -> None:
        super().__init__(total)
        self._what = what
        self._started = self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last < _NEWS_EVERY_S:
            return
        self._last = now
        rate = done / (now - self._started)
        left = f", {(self._total - done) / rate:.0f} s left" if rate else ""
        typer.echo(
            f"{self._what}: {format_bytes(done)} of {format_bytes(self._total)}, "
            f"{format_bytes(rate)}/s{left}",
            err=True,
        )


@contextmanager
def show_progress(total: int, shown: bool, what: str = "staging") -> Iterator[Shown]:
    """Show the progress of what is done in the `with`.

    Args:
        total: bytes that there are to do.
    """
    from dlio.comm.environment import shows_terminal

    if not shown or not total:
        yield Shown(total)
    elif shows_terminal():
        bar = _Bar(total, what)
        with bar.bar:
            yield bar
    else:
        yield _Lines(total, what)

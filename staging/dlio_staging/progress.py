"""Progress of a long command: a bar on a terminal, a plain line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from dlio.units import format_bytes

_NEWS_EVERY_S = 10.0


@contextmanager
def show_progress(
    total: int, shown: bool, what: str = "staging"
) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes done so far, as often as one likes.

    Args:
        total: bytes that there are to do.
    """
    from dlio.comm.launch import shows_terminal

    if not shown or not total:
        yield lambda _: None
    elif shows_terminal():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, transient=True, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        started = last = time.monotonic()

        def tell(done: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < _NEWS_EVERY_S:
                return
            last = now
            rate = done / (now - started)
            left = f", {(total - done) / rate:.0f} s left" if rate else ""
            typer.echo(
                f"{what}: {format_bytes(done)} of {format_bytes(total)}, "
                f"{format_bytes(rate)}/s{left}",
                err=True,
            )

        yield tell

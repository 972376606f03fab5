"""The progress bar of commands, on a terminal."""

import sys
from typing import Any, Final, Self

_BAR: Final = 20


class ProgressBar:
    """A progress bar of one row with the remaining time, drawn with rich in its `with` block.

    Nothing is drawn where the stream is not a terminal. It fits into the terminal's width. Lines
    that are printed meanwhile appear above it. Not thread-safe.
    """

    def __init__(
        self,
        title: str | None = None,
        *,
        total: float | None = None,
        in_bytes: bool = False,
        transient: bool = False,
        to_stderr: bool = False,
        force: bool = False,
    ) -> None:
        """
        Args:
            title: title of the row; None to begin without a row.
            total: total work in units; None if it is not known yet.
            in_bytes: the units are bytes; also show a rate.
            transient: remove the bar at the end.
            to_stderr: draw on standard error.
            force: draw even if the stream does not look like a terminal.
        """
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.table import Column

        def column(share: int | None = None) -> Column:
            # Rows of text that wrap would leave their upper lines behind when they are redrawn.
            return Column(no_wrap=True, overflow="ellipsis", ratio=share)

        title_column = TextColumn("{task.description}", table_column=column())
        columns: list[ProgressColumn] = [title_column, BarColumn(_BAR)]
        if in_bytes:
            columns += [
                DownloadColumn(binary_units=True, table_column=column()),
                TransferSpeedColumn(table_column=column()),
                TimeRemainingColumn(compact=True, table_column=column()),
            ]
        else:
            columns += [
                MofNCompleteColumn(table_column=column()),
                TimeRemainingColumn(compact=True, table_column=column()),
                TextColumn("{task.fields[note]}", table_column=column(1)),
            ]
        console = Console(
            file=sys.stderr if to_stderr else None, force_terminal=True if force else None
        )
        self._rows = Progress(
            *columns,
            transient=transient,
            expand=not in_bytes,  # The note takes the width that is left.
            refresh_per_second=5,
            # Steps of a benchmark may take minutes each; a rate of bytes changes sooner.
            speed_estimate_period=30 if in_bytes else 86_400,
            console=console,
            # Elsewhere it would leave an empty line.
            disable=not console.is_terminal,
        )
        self._row: Any = None
        if title is not None:
            self.begin(title, total)

    def __enter__(self) -> Self:
        self._rows.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.stop()

    def begin(self, title: str, total: float | None = None) -> None:
        """Begin other work, in the same row."""
        if self._row is None:
            self._row = self._rows.add_task(title, total=total, note="")
        else:
            self._rows.reset(self._row, description=title, total=total, note="")

    def update(
        self, done: float | None = None, *, total: float | None = None, note: str | None = None
    ) -> None:
        """Show that `done` units of `total` are done, with a note; None leaves a value as it is."""
        if self._row is None:
            return
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._rows.update(self._row, completed=done, total=total, **fields)

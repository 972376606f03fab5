"""The progress bar of commands, on a terminal."""

import sys
from typing import Any, Self

__all__ = ["Bar"]


class Bar:
    """A progress bar with one or more rows, drawn with rich inside its `with` block.

    Not thread-safe.
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
            title: title of the first row; None to begin without a row.
            total: total work of the first row in units; None if it is not known yet.
            in_bytes: the units are bytes; also show a rate and the remaining time.
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

        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
        if in_bytes:
            columns += [DownloadColumn(binary_units=True), TransferSpeedColumn()]
            columns.append(TimeRemainingColumn())
        else:
            columns += [MofNCompleteColumn(), TextColumn("{task.fields[note]}")]
        self._rows = Progress(
            *columns,
            transient=transient,
            refresh_per_second=5,
            console=Console(
                file=sys.stderr if to_stderr else None, force_terminal=True if force else None
            ),
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
        """Begin another row, which `update` changes from now on."""
        self._row = self._rows.add_task(title, total=total, note="")

    def update(
        self, done: float | None = None, *, total: float | None = None, note: str | None = None
    ) -> None:
        """Show that `done` units of `total` are done, with a note; None leaves a value as it is."""
        if self._row is None:
            return
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._rows.update(self._row, completed=done, total=total, **fields)

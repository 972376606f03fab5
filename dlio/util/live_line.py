"""Progress of a job on the launcher's terminal: one line that is redrawn, below the ranks' output.

A rank cannot draw it: mpirun passes on whole lines. So rank 0 prints a marked line of JSON for each
change (`tell_launcher`), and the launcher, which reads the ranks' output, draws (`LiveLine`).
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final, Self, TextIO

from dlio.errors import printable
from dlio.util.settings import PROGRESS
from dlio.util.threads import Workers

_MARK: Final = "\x1edlio-progress "
"""Begins a line that the launcher draws; the first character separates records in ASCII."""
_EVERY_S: Final = 0.1
_CLEAR: Final = "\r\x1b[K"
_BAR: Final = 20
_LEAST_BAR: Final = 6


def tells_launcher() -> bool:
    """True if this process is a rank whose launcher draws progress."""
    return PROGRESS in os.environ


def tell_launcher(title: str, done: float, total: float | None, note: str = "") -> None:
    """Print the progress of a job as a line for its launcher."""
    row = {"title": title, "done": done, "total": total, "note": note}
    print(f"{_MARK}{json.dumps(row)}", flush=True)


def row_of(title: str, done: float, total: float | None, note: str, columns: int) -> str:
    """Return a line of progress that fits into `columns` characters."""
    room = columns - 1  # A character in the last column may begin another line.
    counts = "" if total is None else f" {done:,.0f}/{total:,.0f}"
    text = printable(title) + counts + (f" {printable(note)}" if note else "")
    width = min(_BAR, room - len(text) - 1)
    if total is None or width < _LEAST_BAR:
        return text if len(text) <= room else text[: max(0, room - 3)] + "..."
    full = round(width * min(1.0, done / total)) if total else width
    head = printable(title)
    return f"{head} {'#' * full}{'.' * (width - full)}{text[len(head) :]}"


def without_progress(line: bytes) -> bytes:
    """Return a line of a rank's output without the progress that it tells its launcher."""
    text, mark, _ = line.partition(_MARK.encode())
    return text if mark else line


class LiveLine:
    """The line, drawn from `__enter__` to `__exit__` if `shown` and standard output is a terminal.

    Thread-safe. Until ranks tell of their progress it shows `title`, the work that is under way,
    and the time that has passed.
    """

    def __init__(self, title: str, shown: bool = True) -> None:
        self.shown = shown and sys.stdout.isatty()
        """True if there is a line; the ranks' standard output then has to pass through `feed`."""
        self._title, self._note = title, ""
        self._done: float = 0
        self._total: float | None = None
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._drawn = False
        self._clock = Workers("dlio-live-line", self._run)

    def __enter__(self) -> Self:
        if self.shown:
            self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._clock.close()
            with self._lock, contextlib.suppress(OSError):
                self._clear()
                sys.stdout.flush()

    def say(self, title: str) -> None:
        """Show another title, with the time from the line's beginning on."""
        with self._lock:
            self._title, self._note, self._total = title, "", None

    def feed(self, line: str) -> None:
        """Take a line of the ranks' standard output: progress, or text that is printed above."""
        text, mark, message = line.partition(_MARK)
        if mark:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                row = json.loads(message)
                total = row["total"]
                shown = str(row["title"]), float(row["done"]), str(row["note"])
                with self._lock:
                    self._title, self._done, self._note = shown
                    self._total = None if total is None else float(total)
        if text:
            self.write(sys.stdout, [text])

    def write(self, stream: TextIO, lines: Iterable[str]) -> None:
        """Write lines above the line."""
        with self._lock:
            self._clear()
            stream.writelines(lines)
            stream.flush()

    def _clear(self) -> None:
        if self._drawn:
            sys.stdout.write(_CLEAR)
            sys.stdout.flush()
            self._drawn = False

    def _run(self, _: int) -> None:
        while True:
            with self._lock, contextlib.suppress(OSError):
                self._draw()
            if self._clock.stopping.wait(_EVERY_S):
                return

    def _draw(self) -> None:
        note = self._note
        if self._total is None:
            note = f"({time.monotonic() - self._started:.0f} s)"
        columns = shutil.get_terminal_size().columns
        row = row_of(self._title, self._done, self._total, note, columns)
        sys.stdout.write(f"{_CLEAR}{row}")
        sys.stdout.flush()
        self._drawn = True

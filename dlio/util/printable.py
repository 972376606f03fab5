"""Names from files and URLs, made safe for terminals and logs."""

import html
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TextIO

from dlio.errors import printable, shortened


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def as_html(text: str) -> str:
    """Return a text as HTML, in one line, whatever names are in it."""
    return html.escape(printable(text))


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line for users, whatever names are in it, to standard output or a stream."""
    print(printable(text), file=sys.stdout if stream is None else stream, flush=True)


def log_warning(text: str, *values: object) -> None:
    """Log a warning of dlio's, as `logging` has it, with names in it escaped."""
    log_line(logging.WARNING, text, *values)


_told: Final[set[str]] = set()
_heard: Final[ContextVar[list[str] | None]] = ContextVar("heard", default=None)


@contextmanager
def hearing() -> Iterator[list[str]]:
    """Yield a list that gets whatever `tell_once` is given in the block; one around it, too."""
    outer = _heard.get()
    heard: list[str] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)
        if outer is not None:
            outer += heard


def tell_once(text: str, kind: str = "") -> None:
    """Log a warning of dlio's that this process has not logged before, nor another of its kind."""
    heard = _heard.get()
    if heard is not None:
        heard.append(text)
    if (kind or text) not in _told:
        _told.add(kind or text)
        log_warning("%s", text)


def log_line(level: int, text: str, *values: object) -> None:
    """Log a line of dlio's of a level, with names in it escaped."""
    log = logging.getLogger("dlio")
    if log.isEnabledFor(level):
        line = shortened(printable(text % values if values else text))
        log.log(level, "%s", line, stacklevel=3)


def warn_user(text: str, kind: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Warn by `warnings.warn`, with names in the text escaped. `stacklevel` 1 is the caller."""
    warnings.warn(printable(text), kind, stacklevel=stacklevel + 1)


@contextmanager
def escaping_libraries() -> Iterator[None]:
    """Have warnings of libraries, and lines of theirs that no log handler takes, shown on one line
    each within the block, as `printable` has it."""
    shown, last = warnings.formatwarning, logging.lastResort

    def format_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        return shown(printable(str(message)), category, filename, lineno, line)

    warnings.formatwarning = format_warning
    before = None if last is None else last.formatter
    if last is not None:
        last.setFormatter(_EscapedLine())
    try:
        yield
    finally:
        warnings.formatwarning = shown
        if last is not None:
            last.setFormatter(before)


class _EscapedLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

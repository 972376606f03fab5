"""Names from files, made safe for terminals and logs."""

import sys
from typing import TextIO


def printable(text: str | bytes) -> str:
    """Return a text with all control characters and invalid bytes escaped, line ends included."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line for users, whatever names are in it, to standard output or a stream."""
    print(printable(text), file=sys.stdout if stream is None else stream, flush=True)

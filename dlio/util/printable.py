"""Names from files, made safe for terminals and logs."""

import sys
import warnings
from typing import TextIO

from dlio.errors import printable


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line for users, whatever names are in it, to standard output or a stream."""
    print(printable(text), file=sys.stdout if stream is None else stream, flush=True)


def warn_user(text: str, kind: type[Warning] = RuntimeWarning, *, stacklevel: int = 1) -> None:
    """Warn by `warnings.warn`, whatever names are in the text. `stacklevel` 1 is the caller."""
    warnings.warn(printable(text), kind, stacklevel=stacklevel + 1)

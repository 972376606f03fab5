"""Files that users name, and state of earlier runs, opened to be read: nothing in them is believed.

Nothing but regular files is opened, so that no pipe, socket or device hangs a command. A file
that is read whole has a bound of bytes, and of nesting before it is parsed. `as_usage` makes one
line of the errors that such contents cause.
"""

import errno
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, TextIO

from dlio.errors import DlioError, UsageError, printable
from dlio.util.limits import open_regular

MOST_STATE: Final = 64 << 20
"""Bytes of a file that is read whole, if its kind has no smaller bound."""
MOST_SETTINGS: Final = 1 << 20
"""Bytes of a file of settings."""
_MOST_DEPTH: Final = 64
_LONGEST_REASON: Final = 200
_TEXTS: Final = re.compile(rb'"[^"]*"|[^\[\]{}"]+')


def open_input(path: str) -> BinaryIO:
    """Open a regular file to read its bytes. Raises OSError, also for anything else."""
    return os.fdopen(open_regular(path), "rb")


def open_text(path: str, *, encoding: str = "utf-8", errors: str = "strict") -> TextIO:
    """Open a regular file to read its text. Raises OSError as `open_input`."""
    return os.fdopen(open_regular(path), encoding=encoding, errors=errors)


def read_bytes(path: str, most: int = MOST_STATE) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises OSError as `open_input`, and if it is larger.
    """
    with open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes, the most of such files", path)
    return data


def read_text(path: str, most: int = MOST_STATE, *, errors: str = "strict") -> str:
    """Read a regular file of at most `most` bytes as UTF-8, with lines as Python has them.

    Raises OSError as `read_bytes`, UnicodeDecodeError.
    """
    data = io.BytesIO(read_bytes(path, most))
    return io.TextIOWrapper(data, encoding="utf-8", errors=errors).read()


def read_json(path: str, most: int = MOST_STATE) -> object:
    """Read a file of JSON. Raises OSError as `read_bytes`, ValueError as `json_value`."""
    return json_value(read_bytes(path, most))


def json_value(text: str | bytes) -> object:
    """Return the value of a text of JSON.

    Raises ValueError if it is none, or is nested more than 64 deep.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > _MOST_DEPTH:
        _check_depth(data)
    return json.loads(text)


def _check_depth(data: bytes) -> None:
    brackets = _TEXTS.sub(b"", data.replace(b"\\\\", b"").replace(b'\\"', b""))
    depth = 0
    for each in brackets:
        depth += 1 if each in b"[{" else -1
        if depth > _MOST_DEPTH:
            raise ValueError(f"nested more than {_MOST_DEPTH} deep")


def yaml_value(text: str) -> object:
    """Return the value of a text of YAML. Anchors are not needed for settings, and are refused: a
    few lines of them stand for billions.

    Raises ValueError if it is none, has anchors, or is nested more than 64 deep.
    """
    import yaml

    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise ValueError("anchors (&, *) are not read; write the values out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                raise ValueError(f"nested more than {_MOST_DEPTH} deep")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


@contextmanager
def as_usage(path: str, remedy: str) -> Iterator[None]:
    """Turn errors that malformed contents of a file cause in the block into one UsageError.

    It names the file and the remedy, such as "give a file that --trace has written". Errors of dlio
    pass, and so does a missing file (FileNotFoundError).
    """
    try:
        yield
    except (DlioError, FileNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif isinstance(error, KeyError):
            reason = f"{error} is missing"
        elif isinstance(error, MemoryError | RecursionError):
            reason = "it is too large, or nested too deeply"
        else:
            reason = str(error) or type(error).__name__
        line = printable(" ".join(reason.split())[:_LONGEST_REASON])
        raise UsageError(f"{printable(path)} cannot be read: {line}; {remedy}") from error

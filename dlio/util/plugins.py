"""Entry points of installed packages: commands, readers, features and compressors."""

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any


def plugins(group: str) -> EntryPoints:
    """Return the entry points of a group.

    Packages that are installed while this process runs are found by the next one: to look through
    the metadata of a hundred packages takes 5 ms, and every `dlio.open` would.
    """
    entries: EntryPoints = _installed(tuple(sys.path)).select(group=group)
    return entries


@cache
def _installed(path: tuple[str, ...]) -> Any:  # noqa: ARG001 - the result depends on it
    return entry_points()  # Of another class since Python 3.12, which has `select`, too.

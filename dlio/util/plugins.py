"""Entry points of installed packages: commands, readers, features and compressors."""

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points


def plugins(group: str) -> EntryPoints:
    """Return the entry points of a group.

    Packages that are installed while this process runs are found by the next one: to look through
    the metadata of a hundred packages takes 5 ms, and every `dlio.open` would.
    """
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:  # noqa: ARG001 - a part of the key
    return entry_points(group=group)

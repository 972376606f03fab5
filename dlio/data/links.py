"""Symbolic links in data sets.

A data set may come from someone else, and a link in it can name any file of the user's. So links
are followed if they stay within the data set's own folder, and otherwise only if the user wants it:
`--follow-links`, `follow_links=True` or DLIO_FOLLOW_LINKS.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dlio.errors import SourceError
from dlio.util.settings import settings

_MAX_VISITS: Final = 16
_followed: ContextVar[bool | None] = ContextVar("followed", default=None)


@contextmanager
def following_links(follow: bool | None) -> Iterator[None]:
    """Follow links out of data sets that are opened in the block, or refuse them. None leaves it as
    it is."""
    token = _followed.set(_followed.get() if follow is None else follow)
    try:
        yield
    finally:
        _followed.reset(token)


def links_followed() -> bool:
    """True if links out of a data set that is opened now are to be followed."""
    follow = _followed.get()
    return settings().follow_links if follow is None else follow


def check_link(root: str, path: str) -> None:
    """Raise SourceError if a path below a local folder leads out of it."""
    real, inside = os.path.realpath(path), os.path.realpath(root)
    if real != inside and not real.startswith(inside.rstrip("/") + "/"):
        raise SourceError(
            f"{path} is a link to {real}, outside of the data set's folder: copy what it names, or "
            "follow such links with --follow-links (in Python, follow_links=True)"
        )


class FolderLinks:
    """Links to folders that one walk meets. Thread-safe."""

    def __init__(self) -> None:
        self._visits: dict[str, list[None]] = {}

    def enter(self, path: str, came_by: tuple[str, ...]) -> tuple[str, ...]:
        """Return the folders that a walk has come by once it follows a link. `came_by` are the real
        paths of the folders whose links it followed so far.

        Raises SourceError if the link leads back to where the walk comes from, and if links lead to
        a folder very often.
        """
        real = os.path.realpath(path)
        before = (*came_by, os.path.realpath(os.path.dirname(path)))
        if any(each == real or each.startswith(real.rstrip("/") + "/") for each in before):
            raise SourceError(f"{path} is a link to {real}, which it lies in: remove the link")
        visits = self._visits.setdefault(real, [])
        visits.append(None)
        if len(visits) > _MAX_VISITS:
            raise SourceError(
                f"{path} is one of over {_MAX_VISITS} links to {real}: remove some of them"
            )
        return before

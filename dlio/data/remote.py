"""File systems behind fsspec, in each process."""

import os
from importlib import import_module
from types import ModuleType
from typing import Any


class FsspecHandle:
    """Whatever keeps a file system of fsspec.

    A forked child, such as a worker process of torch's loader, has none of the threads in which
    its parent's file systems work: it opens its own, once.
    """

    _opened: Any = None

    @property
    def _files(self) -> Any:
        """The file system; None for local files."""
        opened = self._opened
        if opened is not None and getattr(opened, "_pid", os.getpid()) != os.getpid():
            self._opened = opened = type(opened)(*opened.storage_args, **opened.storage_options)
        return opened


def fsspec() -> ModuleType:
    """Return fsspec, which takes long to import."""
    return import_module("fsspec")

"""Where a data set lives: files behind fsspec, with a short way for local ones.

Local files are read with the kernel's own calls: no seek, no buffer, no lock between threads.
Everything else goes through fsspec: `s3://`, `memory://`, chained URLs. Errors name the file.
"""

import os
from dataclasses import dataclass
from typing import Any

from dlio.errors import SourceError


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder in a listing."""

    name: str
    folder: bool
    size: int
    modified_ns: int
    """0 where the file system does not tell."""


class Source:
    """The file system below one path or URL. Thread-safe; holds nothing open.

    Paths are relative to the root, with forward slashes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files: Any = None
        self.root = os.path.abspath(os.path.expanduser(url))
        if "://" in url or "::" in url:
            import fsspec

            try:
                self._files, self.root = fsspec.core.url_to_fs(url)
            except (ImportError, ValueError, OSError) as error:
                raise SourceError(f"{url} cannot be opened: {error}") from error
            self.root = self.root.rstrip("/")

    @property
    def local(self) -> bool:
        return self._files is None

    def path(self, name: str = "") -> str:
        """The full path of a file below the root."""
        return f"{self.root}/{name}" if name else self.root

    def is_folder(self, name: str = "") -> bool:
        if self._files is None:
            return os.path.isdir(self.path(name))
        return bool(self._files.isdir(self.path(name)))

    def exists(self, name: str = "") -> bool:
        if self._files is None:
            return os.path.exists(self.path(name))
        return bool(self._files.exists(self.path(name)))

    def modified_ns(self, name: str = "") -> int:
        """When a folder's listing changed last; 0 where that is not told."""
        if self._files is None:
            try:
                return os.stat(self.path(name)).st_mtime_ns
            except OSError:
                return 0
        return 0

    def listing(self, name: str = "") -> list[Entry]:
        """What a folder holds, sorted by name. Raises SourceError when it cannot be listed."""
        try:
            if self._files is None:
                return sorted(self._scan(name), key=lambda entry: entry.name)
            rows = self._files.ls(self.path(name), detail=True)
        except OSError as error:
            raise self._failed(name, error) from error
        entries = [
            Entry(
                row["name"].rstrip("/").rsplit("/", 1)[-1],
                row["type"] == "directory",
                int(row.get("size") or 0),
                0,
            )
            for row in rows
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
        """Bytes of a file, `count` of them or up to its end; fewer when the file is shorter."""
        try:
            if self._files is None:
                return self._read_local(name, offset, count)
            end = None if count is None else offset + count
            data: bytes = self._files.cat_file(self.path(name), start=offset, end=end)
        except OSError as error:
            raise self._failed(name, error) from error
        return data

    def _read_local(self, name: str, offset: int, count: int | None) -> bytes:
        descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if count is None:
                count = max(0, os.fstat(descriptor).st_size - offset)
            data = os.pread(descriptor, count, offset)
            while len(data) < count:
                more = os.pread(descriptor, count - len(data), offset + len(data))
                if not more:
                    break
                data += more
            return data
        finally:
            os.close(descriptor)

    def _scan(self, name: str) -> list[Entry]:
        entries = []
        with os.scandir(self.path(name)) as rows:
            for row in rows:
                try:
                    status = row.stat()
                except FileNotFoundError:
                    continue  # A dangling link: torchvision cannot read it either.
                entries.append(Entry(row.name, row.is_dir(), status.st_size, status.st_mtime_ns))
        return entries

    def _failed(self, name: str, error: OSError) -> SourceError:
        reason = error.strerror or str(error) or type(error).__name__
        return SourceError(f"{self.path(name)} cannot be read: {reason}")

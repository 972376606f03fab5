"""Where a data set lives: files behind fsspec, with a short way for local ones.

Local files are read with the kernel's own calls: no seek, no buffer, no lock between threads.
Everything else goes through fsspec: `s3://`, `memory://`, chained URLs, with credentials as
fsspec takes them. Errors name the file, and never what is secret in its URL.
"""

import glob
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from dlio.errors import SourceError, UsageError

__all__ = [
    "Entry",
    "File",
    "Source",
    "expand",
    "failed",
    "files_below",
    "is_remote",
    "listed_once",
    "own_name",
    "redact",
    "split_fields",
]

_MAX_FILES: Final = 1_000_000
_CHAINING: Final = re.compile(
    r"(zip|tar|libarchive|simplecache|filecache|blockcache|dir|cached)://"
)
_STAMPS: Final = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
    "date_time",
    "md5Hash",
    "CRC",
)
"""What file systems tell of a file that changes when the file does."""


_seen: ContextVar[dict[tuple[str, str], list[tuple[str, bool]]] | None] = ContextVar(
    "seen", default=None
)


@contextmanager
def listed_once() -> Iterator[None]:
    """Within it, `Source.names` asks for each folder once: for readers that look at the same."""
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder in a listing."""

    name: str
    folder: bool
    size: int
    modified_ns: int
    """0 where the file system does not tell."""
    changed_ns: int = 0
    """When the file or what is said of it changed: nobody can set it back. 0 likewise."""


class Source:
    """The file system below one path or URL. Thread-safe; holds nothing open.

    Paths are relative to the root, with forward slashes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files: Any = None
        self.root = os.path.abspath(os.path.expanduser(url))
        if is_remote(url):
            try:
                self._files, self.root = _fsspec().core.url_to_fs(url)
            except Exception as error:
                raise SourceError(f"{redact(url)} cannot be opened: {error}") from error
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
        try:
            return bool(self._files.isdir(self.path(name)))
        except Exception as error:
            raise self._failed(name, error) from error

    def exists(self, name: str = "") -> bool:
        if self._files is None:
            return os.path.exists(self.path(name))
        try:
            return bool(self._files.exists(self.path(name)))
        except Exception as error:
            raise self._failed(name, error) from error

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
        except Exception as error:
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

    def names(self, name: str = "") -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of what a folder holds, sorted; asks for no local file's
        attributes, which over a network takes a request each. Raises SourceError."""
        seen = _seen.get()
        key = (self.root, name)
        if seen is not None and key in seen:
            return seen[key]
        if self._files is not None:
            rows = [(entry.name, entry.folder) for entry in self.listing(name)]
        else:
            try:
                with os.scandir(self.path(name)) as entries:
                    rows = sorted((entry.name, entry.is_dir()) for entry in entries)
            except OSError as error:
                raise self._failed(name, error) from error
        if seen is not None:
            seen[key] = rows
        return rows

    def entry(self, folder: str, name: str) -> Entry | None:
        """A file of a local folder; None for a link that leads nowhere."""
        try:
            status = os.stat(f"{self.path(folder)}/{name}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(f"{folder}/{name}", error) from error
        return Entry(name, False, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
        """Bytes of a file, `count` of them or up to its end; fewer when the file is shorter."""
        try:
            if self._files is None:
                return _pread(self.path(name), offset, count)
            end = None if count is None else offset + count
            data: bytes = self._files.cat_file(self.path(name), start=offset, end=end)
        except Exception as error:
            raise self._failed(name, error) from error
        return data

    def _scan(self, name: str) -> list[Entry]:
        entries = []
        with os.scandir(self.path(name)) as rows:
            for row in rows:
                try:
                    status = row.stat()
                except FileNotFoundError:
                    continue  # A dangling link: torchvision cannot read it either.
                entries.append(
                    Entry(
                        row.name,
                        row.is_dir(),
                        status.st_size,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                    )
                )
        return entries

    def _failed(self, name: str, error: Exception) -> SourceError:
        return failed(self.path(name), error)


class File:
    """One file behind fsspec. Thread-safe; holds nothing open.

    Raises SourceError when there is none at `url`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = redact(url)
        """The URL as messages may show it."""
        self.local_path: str | None = None
        self._files: Any = None
        self._path = url
        try:
            if is_remote(url):
                self._files, self._path = _fsspec().core.url_to_fs(url)
                info = self._files.info(self._path)
                if info["type"] != "file" or info["size"] is None:
                    raise SourceError(f"{self.name} is no file of a known size: check the path")
                self.size = int(info["size"])
                told = [f"{key} {info[key]}" for key in _STAMPS if key in info]
                self.stamp = " ".join([str(self.size), *told])
            else:
                self._path = self.local_path = os.path.abspath(os.path.expanduser(url))
                status = os.stat(self._path)
                self.size = status.st_size
                self.stamp = f"{status.st_size} {status.st_mtime_ns}"
        except SourceError:
            raise
        except Exception as error:
            raise failed(url, error) from error

    def read(self, offset: int = 0, count: int | None = None) -> bytes:
        """Bytes of the file, `count` of them or up to its end; fewer when the file is shorter."""
        try:
            if self.local_path is not None:
                return _pread(self.local_path, offset, count)
            end = None if count is None else offset + count
            data: bytes = self._files.cat_file(self._path, start=offset, end=end)
        except Exception as error:
            raise failed(self.url, error) from error
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` on. Raises SourceError when the file is shorter than that."""
        done = 0
        try:
            if self.local_path is not None:
                descriptor = os.open(self.local_path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    while done < len(into):
                        count = os.preadv(descriptor, [into[done:]], offset + done)
                        if not count:
                            break
                        done += count
                finally:
                    os.close(descriptor)
            else:
                data = self.read(offset, len(into))
                done = len(data)
                if done == len(into):
                    into[:] = data
        except SourceError:
            raise
        except OSError as error:
            raise failed(self.url, error) from error
        if done != len(into):
            raise SourceError(
                f"{self.name} ends {len(into) - done} bytes early: it was cut off, or has changed "
                "since it was opened; restore it, or run again"
            )

    def open(self) -> BinaryIO:
        """A seekable stream of the file, for libraries that want one. The caller closes it."""
        try:
            if self.local_path is not None:
                return io.FileIO(self.local_path)
            stream: BinaryIO = self._files.open(self._path, "rb")
        except Exception as error:
            raise failed(self.url, error) from error
        return stream


def is_remote(url: str) -> bool:
    """Whether fsspec has to resolve it."""
    return "://" in url or "::" in url


def own_name(url: str) -> str:
    """The path in the first link of a URL, in lower case: what its suffix is looked for in."""
    return url.split("::")[0].lower()


def split_fields(path: str) -> tuple[str, tuple[str, ...]]:
    """(path, names of fields): `file.h5::images,labels` names two; without names, ().

    In chained URLs, such as `zip://a.h5::s3://bucket/b.zip`, what follows the last `::` is a path.
    """
    head, mark, tail = path.rpartition("::")
    if not mark or "://" in tail or _CHAINING.match(head.rpartition("::")[2]):
        return path, ()
    return head, tuple(name for name in tail.split(",") if name)


def expand(path: str | Sequence[str]) -> list[str]:
    """The files that a path, or several, stand for: `{000..099}`, `{a,b}`, `*`, `?`, `[0-9]`.

    What a pattern matches comes sorted; lists and braces keep their order. Raises SourceError
    when a pattern matches nothing.
    """
    found: list[str] = []
    for pattern in [path] if isinstance(path, str) else path:
        for each in _braces(pattern):
            found += _globbed(each) if re.search(r"[*?\[]", _own_part(each)) else [each]
            if len(found) > _MAX_FILES:
                raise UsageError(f"{redact(pattern)} stands for over {_MAX_FILES:,} files")
    if not found:
        raise SourceError("no files are named: check the path")
    return found


def files_below(path: str | Sequence[str], suffixes: str | tuple[str, ...]) -> list[str]:
    """The files that a path, or several, stand for; of a folder, those in it with such a suffix,
    sorted by name."""
    found = []
    for each in expand(path):
        if own_name(each).endswith(suffixes) or not Source(each).is_folder():
            found.append(each)
            continue
        own, _, chain = each.partition("::")
        tail = f"::{chain}" if chain else ""
        names = [name for name, _ in Source(each).names()]
        found += [f"{own.rstrip('/')}/{n}{tail}" for n in names if n.lower().endswith(suffixes)]
    return found


def redact(text: str) -> str:
    """A URL, or a message with URLs, without passwords and signatures."""
    text = re.sub(r"://[^/@\s:]+:[^/@\s]+@", "://***@", text)
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?***", text)


def failed(url: str, error: Exception) -> SourceError:
    """What to raise when a file cannot be read."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return SourceError(f"{redact(url)} cannot be read: {redact(reason)}")


def _pread(path: str, offset: int, count: int | None) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def _fsspec() -> Any:
    import fsspec

    return fsspec


def _own_part(url: str) -> str:
    """What of a chained URL may hold patterns: the first link."""
    part = url.split("::")[0]
    return "" if part.startswith(("http://", "https://")) else part


def _globbed(url: str) -> list[str]:
    if not is_remote(url):
        found = sorted(glob.glob(os.path.expanduser(url)))
    else:
        try:
            files, root = _fsspec().core.url_to_fs(url)
            names = sorted(files.glob(root))
        except Exception as error:
            raise failed(url, error) from error
        own, _, chain = url.partition("::")
        scheme = own.partition("://")[0]
        tail = f"::{chain}" if chain else ""
        found = [f"{scheme}://{name.removeprefix('/')}{tail}" for name in names]
        if scheme in ("file", "local", "memory"):
            found = [f"{scheme}:///{name.removeprefix('/')}{tail}" for name in names]
    if not found:
        raise SourceError(f"{redact(url)} matches no file: check the pattern")
    return found


def _braces(text: str) -> list[str]:
    """Brace expansion as shells do it, as far as data sets are named so."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if abs(last - first) >= _MAX_FILES:
            raise UsageError(f"{redact(text)} stands for over {_MAX_FILES:,} files")
        width = max(len(span[1]), len(span[2])) if span[1][0] == "0" or span[2][0] == "0" else 0
        step = 1 if last >= first else -1
        options = [str(number).zfill(width) for number in range(first, last + step, step)]
    elif "," in match[1]:
        options = match[1].split(",")
    else:
        return [text]
    found = []
    for option in options:
        found += _braces(text[: match.start()] + option + text[match.end() :])
        if len(found) > _MAX_FILES:
            raise UsageError(f"{redact(text)} stands for over {_MAX_FILES:,} files")
    return found

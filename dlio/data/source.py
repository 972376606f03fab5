"""Files and folders of a data set, local or behind fsspec.

Local files are read with the kernel's own calls: no seek, no buffer, no lock between threads.
Everything else goes through fsspec: `s3://`, `memory://`, chained URLs, with credentials as
fsspec takes them. Errors name the file, without passwords and signatures in its URL.
"""

import errno
import glob
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import islice
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Final, TypeVar
from zipfile import ZIP_STORED

import xxhash

from dlio.data.braces import MAX_FILES, expand_braces
from dlio.data.folder_names import FolderNames, Row, Rows, files_among, folders_among, sorted_rows
from dlio.data.hidden_names import is_hidden
from dlio.data.identity import content_sample, look_again, stamp_of
from dlio.data.links import DataRoot, OpenFolder, check_descent
from dlio.data.requests import pread, pread_into, request
from dlio.data.web_requests import is_absent, newest, web_options
from dlio.data.zip_members import open_stored, read_stored
from dlio.errors import DlioError, SourceError, UsageError, printable, redact
from dlio.util.arguments import nearest
from dlio.util.limits import check_regular
from dlio.util.link_free import opens_at_once
from dlio.util.printable import tell_once
from dlio.util.settings import settings
from dlio.util.trusted_files import closing_descriptor, path_of, shown_as
from dlio.util.units import counted

_MOST_NEIGHBOURS: Final = 4096
_TOLD_FROM: Final = 1 << 20
"""Bytes in front of a range in an archive whose reading is told."""
_MOST_PAGE: Final = 16 << 20
"""Bytes of a web server's page that lists a folder."""
_CHAINING: Final = re.compile(
    r"(zip|tar|libarchive|simplecache|filecache|blockcache|dir|cached)://"
)
_CACHES: Final = ("simplecache", "filecache", "blockcache", "cached")


class _SeenNames:
    """Names of listed folders, as texts: a list takes ten times as much. The last one is a list all
    the same, as readers ask about one folder in turn."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], tuple[str, bytes] | FolderNames] = {}
        """All names, and for each if it is a folder."""
        self._last: tuple[tuple[str, str] | None, Rows] = None, []

    def get(self, key: tuple[str, str]) -> Rows | None:
        """Return the rows of a folder; None if they are not kept."""
        last, rows = self._last
        if last == key:
            return rows
        if (kept := self._texts.get(key)) is None:
            return None
        if isinstance(kept, FolderNames):
            return kept
        rows = list(zip(kept[0].split("/"), map(bool, kept[1]), strict=False))
        self._last = key, rows
        return rows

    def keep(self, key: tuple[str, str], rows: Rows) -> None:
        """Keep the rows of a folder: no name has a slash in it."""
        if isinstance(rows, FolderNames):
            self._texts[key] = rows
            return
        names = "/".join([name for name, _ in rows])
        self._texts[key] = names, bytes([inside for _, inside in rows])
        self._last = key, rows

    def forget(self, key: tuple[str, str]) -> None:
        """Keep the rows of a folder no longer, if they are."""
        self._texts.pop(key, None)
        if self._last[0] == key:
            self._last = None, []


_seen: ContextVar[_SeenNames | None] = ContextVar("seen", default=None)


@contextmanager
def listed_once() -> Iterator[None]:
    """Have `Source.names` list each folder once while the block runs.

    For readers that look at the same folders one after another.
    """
    token = _seen.set(_SeenNames())
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
    """Bytes; -1 for a file of a server that lists names alone."""
    modified_ns: int
    """Time of the last change of the contents; of a remote file a hash of its ETag or time."""
    changed_ns: int = 0
    """Time of the last change of contents or attributes, which no user can set; 0 if unknown."""

    def known_size(self) -> int:
        """Return the size in bytes. Raises SourceError if it is unknown."""
        if self.size < 0:
            raise SourceError(
                f"{self.name}: the server lists files without their sizes, which dlio needs; read "
                "a packed data set or an archive from it, or copy the folder"
            )
        return self.size


class ReadErrors:
    """Turns errors of any kind, as libraries raise them, into SourceError: for a `with` statement.

    Errors of dlio's own stay. The message names the URL, without secrets, or another place. Written
    out, as samples are read one by one: a generator takes longer.
    """

    __slots__ = ("_text", "_where")

    def __init__(self, where: str, text: str = "cannot be read") -> None:
        self._where, self._text = where, text

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, DlioError):
            # An error of the system, of memory or of a server says nothing about the contents.
            outside = isinstance(error, MemoryError) or getattr(error, "errno", None)
            outside = outside or type(error).__module__.startswith("aiohttp") or is_hanging(error)
            text = "cannot be read" if outside else self._text
            raise failed(self._where, error, text) from error


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

    def _range(self, path: str, offset: int, count: int | None) -> bytes:
        """Return a range of a file behind fsspec, in place if it is stored in a zip archive."""
        end = None if count is None else offset + count
        files = self._files
        with request():
            stored = read_stored(files, path, offset, end)
            if stored is not None:
                return stored
            data: bytes = files.cat_file(path, start=offset, end=end)
        return data


class Source(FsspecHandle):
    """The file system below one path or URL. Thread-safe; keeps no file open.

    Paths are relative to the root, with forward slashes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.root = os.path.abspath(os.path.expanduser(url))
        self.dangling: list[str] = []
        """Paths of links that `entry` was asked for, and that lead to nothing."""
        self.left_out: set[str] = set()
        """Names of files that a reader has met, and leaves out."""
        if is_remote(url):
            with ReadErrors(url, "cannot be opened"):
                self._opened, self.root = _url_to_fs(url)
            self.root = self.root.rstrip("/")
        self._place = DataRoot.of(self.root)

    @property
    def local(self) -> bool:
        """True if the path is on a mounted file system."""
        return self._files is None

    def path(self, name: str = "") -> str:
        """Return the full path of a file below the root."""
        # Archives (`zip://`) have no root of their own, and no names that begin with a slash.
        return f"{self.root}/{name}" if name and self.root else name or self.root

    def shown(self, name: str = "") -> str:
        """Return the full path or URL of a file below the root, as messages name it."""
        url = inside(self.url, name) if name and not self.local else self.url
        return self.path(name) if self.local else redact(url)

    def file_at(self, name: str) -> "FilePlace":
        """Return a file below the root, to be opened."""
        if self._files is not None:
            return FilePlace(inside(self.url, name) if name else self.url, None)
        # A name below a local folder is never a URL, whatever is in it.
        return FilePlace(f"{self.url.rstrip('/')}/{name}" if name else self.url, self._place)

    def inner(self, name: str) -> str:
        """Return the path or URL of a folder below the root, to be read as a data set of its own.

        Raises SourceError if it is a link to one that it lies in.
        """
        if self._files is None:
            check_descent(self.path(name))
        return inside(self.url, name)

    def file(self, name: str) -> "File":
        """Return a file below the root. Raises SourceError when there is none."""
        return self.file_at(name).opened()

    def open(self, path: str, flags: int = 0) -> int:
        """Open a local file by its full path and return its descriptor; see `DataRoot.open`."""
        return self._place.open(path, flags)

    def open_regular(self, path: str) -> int:
        """Open a regular file by its full path; see `DataRoot.open_regular`."""
        return self._place.open_regular(path)

    def names_below(self) -> tuple[OpenFolder, bool] | None:
        """Return the root, open for files below it to be opened from it, and True if their paths
        may lead over links; None where files are opened otherwise."""
        if not self.local or not (self._place.follows or opens_at_once()):
            return None
        with suppress(OSError, SourceError):
            return self._place.folder(self.root), self._place.follows
        return None

    def folder_of(self, name: str) -> tuple[OpenFolder, bool]:
        """Return a local folder below the root, open for its files to be looked at, and True if
        links in it are followed. Raises SourceError."""
        with ReadErrors(self.shown(name)):
            return self._place.folder(self.path(name)), self._place.follows

    def close(self) -> None:
        """Close folders that are kept open. Those that are needed again are opened again."""
        self._place.close()

    def is_folder(self, name: str = "") -> bool:
        """True if a path is a folder. Raises SourceError when that cannot be found out."""
        # A web server's folder is a page of links, which fsspec reads as a whole.
        if self._is_web and not self._exists_on_web(name, most=_MOST_PAGE):
            return False
        return self._ask("isdir", os.path.isdir, name)

    def exists(self, name: str = "") -> bool:
        """True if a path exists. Raises SourceError when that cannot be found out."""
        return self._exists_on_web(name) if self._is_web else self._ask("exists", _exists, name)

    @property
    def _is_web(self) -> bool:
        return self._files is not None and "http" in self._files.protocol

    def _exists_on_web(self, name: str, most: int | None = None) -> bool:
        """True if a web server has a file, of up to `most` bytes. fsspec itself says that there is
        none where a server is busy, refuses or is gone."""
        with ReadErrors(self.shown(name)):
            try:
                size = self._files.info(self.path(name))["size"]
            except FileNotFoundError as error:
                if is_absent(error):
                    return False
                raise
        return most is None or size is None or size <= most

    def _ask(self, question: str, local: Callable[[str], bool], name: str) -> bool:
        with ReadErrors(self.shown(name)):
            if self._files is None:
                self._place.note(self.path(name))
                return local(self.path(name))
            return bool(getattr(self._files, question)(self.path(name)))

    def missing(self) -> SourceError:
        """Return the error to raise where `exists` says no: a web server may have refused, which
        is not the same as a file that is not there."""
        if self._is_web:
            try:
                self._files.info(self.root)
            except Exception as error:
                if getattr(error.__cause__, "status", 404) not in (404, 410):
                    return failed(self.url, error)
        is_pattern = self.url.startswith(("http://", "https://")) and "*" in self.url
        lists = "patterns need a listing, so name files of a web server by {000..099} or a list"
        remedy = lists if is_pattern else "check the path"
        advice = _near(self.root) if self.local else ""
        return SourceError(f"{self.url}: no such file or folder: {remedy}{advice}")

    def modified_ns(self, name: str = "") -> int:
        """Return the time of a folder's last change, 0 where it is unknown."""
        return self.times_ns(name)[0]

    def times_ns(self, name: str = "") -> list[int]:
        """Do `modified_ns`, and return the time that nobody can set (ctime), too."""
        with suppress(OSError):
            if self._files is None:
                status = os.stat(self.path(name))
                return [status.st_mtime_ns, status.st_ctime_ns]
        return [0, 0]

    def listing(self, name: str = "") -> list[Entry]:
        """List a folder, sorted by name, without hidden files (`is_hidden`).

        Raises SourceError when it cannot be listed.
        """
        with ReadErrors(self.shown(name)):
            if self._files is None:
                return sorted(self._scan(name), key=lambda entry: entry.name)
            listed = self._files.ls(self.path(name), detail=True)
            here = self.path(name).strip("/")  # Some list a folder as its own entry, too.
            rows = [row for row in listed if row["name"].strip("/") != here]
        entries = [
            Entry(
                row["name"].rstrip("/").rsplit("/", 1)[-1],
                row["type"] == "directory",
                _size_of(row),
                xxhash.xxh3_64_intdigest(stamp_of(row).encode()) >> 1,
            )
            for row in rows
        ]
        entries = [entry for entry in entries if not is_hidden(entry.name)]
        return sorted(entries, key=lambda entry: entry.name)

    def names(self, name: str = "", *, keep: bool = True) -> Rows:
        """List (name, True if it is a folder) of a folder's entries, sorted.

        Within `listed_once` they are kept for the next call, unless this is the last one.

        Hidden files (`is_hidden`) are left out. Attributes of local files are not read,
        which would take a request each over a network.

        Raises SourceError when the folder cannot be listed.
        """
        seen = _seen.get()
        key = (self.root, name)
        if seen is not None and (kept := seen.get(key)) is not None:
            if not keep:
                seen.forget(key)
            return kept
        if self._files is not None:
            rows: Rows = [(entry.name, entry.folder) for entry in self.listing(name)]
        else:
            with ReadErrors(self.shown(name)), self._scanned(name) as entries:
                rows = sorted_rows(self._rows_of(entries))
            if self._place.looks is not None:
                self._place.looks.names += len(rows)
        if seen is not None and keep:
            seen.keep(key, rows)
        return rows

    def folders(self, name: str = "") -> list[str]:
        """List the names of the folders in a folder, sorted; see `names`."""
        return folders_among(self.names(name))

    def files(self, name: str = "", suffixes: tuple[str, ...] = ()) -> Sequence[str]:
        """List the names of a folder's files, sorted, or those with some suffixes; see `names`."""
        return files_among(self.names(name), suffixes)

    def _rows_of(self, entries: "Iterator[os.DirEntry[str]]") -> Iterator[Row]:
        """Yield a local folder's entries that are not hidden, and note links."""
        looks = self._place.looks
        for each in entries:
            if not is_hidden(each.name):
                if looks is not None:
                    looks.has_links |= each.is_symlink()
                yield each.name, each.is_dir()

    def entry(self, folder: str, name: str) -> Entry | None:
        """Return a file of a local folder, None if it is not there. One that is a link to nothing
        is noted in `dangling`.

        Raises SourceError, also if it is not a regular file, or a link out of the root.
        """
        path = f"{self.path(folder)}/{name}"
        with ReadErrors(path):
            try:
                status = self._place.status(path)
            except FileNotFoundError:
                if os.path.islink(path):
                    self.dangling.append(path)
                return None
            check_regular(status, path)
        return Entry(name, False, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
        """Return `count` bytes of a file, or all up to its end; fewer when the file is shorter.

        Raises SourceError.
        """
        with ReadErrors(self.shown(name)):
            if self._files is None:
                return pread(self._place, self.path(name), offset, count)
            if count == 0:
                return b""  # Servers take an empty range for the whole file.
            return self._range(self.path(name), offset, count)

    def check_links(self, name: str) -> None:
        """Raise SourceError if a path leads over a link out of the root that is not followed."""
        if self.local:
            self._place.check(self.path(name))

    def check_dangling(self, found: int) -> None:
        """Raise SourceError if files of the data set are links to nothing, next to the `found` ones
        that are there: purged from scratch, or not fetched yet."""
        if not self.dangling:
            return
        first = min(self.dangling)
        with suppress(OSError):
            first = f"{first} -> {os.readlink(first)}"
        count = len(self.dangling)
        raise SourceError(
            f"{self.shown()}: links to missing files: {count} of "
            f"{counted(found + count, 'file')}, such as {printable(first)}: restore or fetch "
            "these, or remove the links"
        )

    def _scan(self, name: str) -> list[Entry]:
        entries = []
        with self._scanned(name) as rows:
            for row in rows:
                if is_hidden(row.name):
                    continue
                try:
                    status = row.stat()
                except FileNotFoundError:
                    continue  # A dangling link, or removed meanwhile.
                times = status.st_mtime_ns, status.st_ctime_ns
                entries.append(Entry(row.name, row.is_dir(), status.st_size, *times))
        return entries

    @contextmanager
    def _scanned(self, name: str) -> "Iterator[Iterator[os.DirEntry[str]]]":
        folder = self._place.open(self.path(name), os.O_DIRECTORY)
        with closing_descriptor(folder), os.scandir(folder) as rows:
            yield rows


class File(FsspecHandle):
    """One file, local or behind fsspec. Thread-safe; stays closed between calls.

    `root` is the folder by which a local file is judged: `url` is then a path, whatever is in it.
    Without one, the user has named it.

    Raises SourceError when there is not a file at `url`, or if it is a link out of the root.
    """

    def __init__(self, url: str, root: DataRoot | None = None) -> None:
        self.url = url
        self.name = redact(url)
        """The URL without secrets, for messages."""
        self.local_path: str | None = None
        self._path = url
        self.times = self._changed = ""
        """Text of the time of change."""
        self._known = (0, 0)
        """Size and time of change of a local file, as last looked at."""
        with ReadErrors(url):
            if root is None and is_remote(url):
                self._opened, self._path = _url_to_fs(url)
                info = self._files.info(self._path)
                if info["type"] != "file":
                    raise SourceError(f"{self.name} is not a file: check the path")
                if info["size"] is None:
                    raise SourceError(
                        f"{self.name}: the server does not tell the file's size, which dlio needs: "
                        "use one that does, or copy the file"
                    )
                self.size = int(info["size"])
                self.times = stamp_of(info)
            else:
                self._path = self.local_path = os.path.abspath(os.path.expanduser(url))
                self.root = root or DataRoot.of(self._path)
                status = self.root.status(self._path)
                check_regular(status, self._path)
                self.size = status.st_size
                self._known = status.st_size, status.st_mtime_ns
                self.times = f"{status.st_mtime_ns}"
                self._changed = f"{status.st_ctime_ns} {status.st_ino}"

    @property
    def own_name(self) -> str:
        """The path or URL in lower case, of a chained URL its first link, to compare suffixes."""
        return own_name(self.name) if self.local_path is None else self.name.lower()

    @cached_property
    def stamp(self) -> str:
        """Text that changes when the contents do: size, time of change, and a sample of them.

        Raises SourceError.
        """
        return f"{self.size} {self.times} {self._content}"

    @cached_property
    def _content(self) -> str:
        if self.local_path is None:
            return ""
        with ReadErrors(self.url):
            return content_sample(self.local_path, opened=self.root.open_regular)

    @property
    def state(self) -> str:
        """Text that changes when the contents may have changed: also with permissions."""
        return f"{self.stamp} {self._changed}"

    def read(self, offset: int = 0, count: int | None = None) -> bytes:
        """Return `count` bytes of the file, or all up to its end; fewer when it is shorter.

        Raises SourceError.
        """
        with ReadErrors(self.url):
            if self.local_path is not None:
                return self._pread(self.local_path, offset, count)
            if count == 0:
                return b""  # Servers take an empty range for the whole file.
            if offset >= _TOLD_FROM and _reads_up_to(self._files, self._path):
                tell_once(
                    f"{self.name}: each read inside of a zip begins at the start of its file, as "
                    "it is compressed: extract it, or make the zip without compression (zip -0)"
                )
            data = self._range(self._path, offset, count)
        if count is not None and len(data) > count:
            raise SourceError(
                f"{self.name}: the server sent {len(data)} bytes for a request of {count}: it does "
                "not serve parts of files; use one that does, or copy the files"
            )
        self._check_same()
        return data

    def _check_same(self) -> None:
        """Raise SourceError if a web server has said since that it has another file."""
        now = newest(self._path)
        if now is not None and (now.times != self.times or now.size not in (self.size, None)):
            raise SourceError(f"{self.name} has changed since it was opened: run again")

    def check(self) -> None:
        """Raise SourceError if the file has changed, or its web server has said so."""
        self.read(0, 0)
        self._check_same()

    def check_open(self, descriptor: int) -> None:
        """Raise SourceError if a local file, which is open, is not as it was; see `look_again`."""
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns) != self._known:
            content = self.__dict__.get("_content")
            self._known = look_again(descriptor, self.name, self._known, self.size, content)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` on. Raises SourceError when the file is too short."""
        if self.local_path is None:
            data = self.read(offset, len(into))
            done = len(data)
            if done == len(into):
                into[:] = data
        else:
            try:
                done = self._pread_into(self.local_path, offset, into)
            except OSError as error:
                raise failed(self.url, error) from error
        self.check_whole(into, done)

    def check_whole(self, into: memoryview, done: int) -> None:
        """Raise SourceError unless all of the `into` that was asked for has come."""
        if done != len(into):
            raise SourceError(
                f"{self.name} ends {len(into) - done} bytes early: it is truncated, or has changed "
                "since it was opened; restore it, or run again"
            )

    def open(self) -> BinaryIO:
        """Open a seekable stream of the file, for libraries. The caller closes it."""
        with ReadErrors(self.url):
            if self.local_path is not None:
                stream: BinaryIO = io.FileIO(self.root.open_regular(self.local_path))
                with ExitStack() as failed:
                    failed.callback(stream.close)
                    self.check_open(stream.fileno())
                    failed.pop_all()
                return stream
            files = self._files
            stream = open_stored(files, self._path) or files.open(self._path, "rb")
        self._check_same()
        return stream

    @contextmanager
    def for_library(self) -> "Iterator[str | BinaryIO]":
        """Yield for a library to open in the block: a path to the descriptor of a local file, or a
        stream that the library closes. Raises SourceError."""
        if self.local_path is None:
            yield self.open()
            return
        with ReadErrors(self.url):
            descriptor = self.root.open_regular(self.local_path)
        with closing_descriptor(descriptor), shown_as(path_of(descriptor), self.local_path):
            self.check_open(descriptor)
            yield path_of(descriptor)

    def close(self) -> None:
        """Close the file's folder, and the file itself if it is one that stays open."""
        if self.local_path is not None:
            self.root.close()

    def _pread(self, path: str, offset: int, count: int | None) -> bytes:
        return pread(self.root, path, offset, count, self.check_open)

    def _pread_into(self, path: str, offset: int, into: memoryview) -> int:
        return pread_into(self.root, path, offset, into, self.check_open)


FileKind = TypeVar("FileKind", bound=File)


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A file that the user has named, or that lies in a folder of his; not looked at yet."""

    url: str
    root: DataRoot | None
    """The folder by which a local file is judged."""

    @property
    def name(self) -> str:
        """The name without its folder."""
        return last_name(self.url) if self.root is None else self.url.rpartition("/")[2]

    def opened(self) -> File:
        """Return the file. Raises SourceError when there is none."""
        return File(self.url, self.root)

    def opened_as(self, kind: type[FileKind]) -> FileKind:
        """Return the file as one of a subclass. Raises SourceError when there is none."""
        return kind(self.url, self.root)


def file_at(url: str) -> FilePlace:
    """Return the file at a path or URL, to be opened."""
    if is_remote(url):
        return FilePlace(url, None)
    return FilePlace(url, DataRoot.of(os.path.abspath(os.path.expanduser(url))))


def fsspec() -> ModuleType:
    """Return fsspec, which takes long to import."""
    return import_module("fsspec")


def _url_to_fs(url: str) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path in it. Raises OSError for pipes and
    the like, at which fsspec would wait."""
    own = local_path(url)
    if own is not None and os.path.exists(own) and not os.path.isdir(own):
        check_regular(os.stat(own), own)
    system, path = fsspec().core.url_to_fs(url, **web_options(url))
    return system, path


def is_remote(url: str) -> bool:
    """True for URLs, which fsspec resolves, False for paths."""
    return "://" in url or "::" in url


def local_path(url: str) -> str | None:
    """Return the full path of the file or folder whose bytes a path or URL reads; None for others.

    That is the path without names of fields (`a.h5::x`), of a `file://` URL, and of the archive in
    which a chained URL ends (`zip://a.h5::b.zip`).
    """
    # Readers of several local files join their paths: the first stands for all of them.
    last = split_fields(url)[0].rpartition("::")[2] if "://" in url else url.split("::")[0]
    scheme, mark, path = last.rpartition("://")
    if mark and scheme not in ("file", "local"):
        return None
    return os.path.abspath(os.path.expanduser(path))


def own_name(url: str) -> str:
    """Return the first link of a chained URL in lower case, to compare its suffix: without the
    query of a web server's URL, such as its signature."""
    own = _own_link(url)[1].lower()
    return own.partition("?")[0] if own.startswith(("http://", "https://")) else own


def last_name(url: str) -> str:
    """Return a file's name without its folder, of a chained URL the one of its first link."""
    return _own_link(url)[1].rstrip("/").rsplit("/", 1)[-1]


def _own_link(url: str) -> tuple[str, str, str]:
    """Split a chained URL around the link that names the file: (`simplecache::`, `zip://a`,
    `::b.zip`). Links in front without a path of their own, such as caches, name none."""
    own, mark, chain = url.partition("::")
    if "://" in own or "://" not in chain or own not in _CACHES:
        return "", own, mark + chain
    before, inner, after = _own_link(chain)
    return f"{own}::{before}", inner, after


def split_fields(path: str) -> tuple[str, tuple[str, ...]]:
    """Split `file.h5::images,labels` into the path and the names of fields; () without names.

    In chained URLs such as `zip://a.h5::s3://bucket/b.zip`, the part after `::` is a path.
    """
    head, mark, tail = path.rpartition("::")
    if not mark or "://" in tail or _CHAINING.match(head.rpartition("::")[2]):
        return path, ()
    return head, tuple(name for name in tail.split(",") if name)


def expand(path: str | Sequence[str]) -> list[str]:
    """Expand the patterns in one or several paths: `{000..099}`, `{a,b}`, `*`, `?`, `[0-9]`.

    Matches of a pattern are sorted; lists and braces keep their order. Names of fields after `::`
    stay at each path. A local path that exists as it is written is itself, as `scans [1]`.

    Raises SourceError when a pattern matches nothing, UsageError when one is for too many files.
    """
    files: list[str] = []
    for pattern in [path] if isinstance(path, str) else path:
        url = split_fields(pattern)[0]
        names = pattern[len(url) :]
        for each in [url] if _exists_so(url) else expand_braces(url):
            is_pattern = re.search(r"[*?\[]", _own_part(each)) and not _exists_so(each)
            matches = _globbed(each) if is_pattern else [each]
            files += [match + names for match in matches]
            if len(files) > MAX_FILES:
                raise UsageError(f"{pattern} stands for over {MAX_FILES:,} files")
    if not files:
        raise SourceError("no files are named: check the path")
    return files


_COMPRESSED: Final = re.compile(r"\.(gz|bz2|xz|zst|lz4)$", re.IGNORECASE)


def files_below(path: str | Sequence[str], suffixes: str | tuple[str, ...]) -> list[FilePlace]:
    """Expand one or several paths; a folder becomes its files with one of `suffixes`, sorted.

    Raises SourceError when a pattern matches nothing or a folder cannot be listed.
    """
    files = []
    for each in expand(path):
        if own_name(each).endswith(suffixes) or not Source(each).is_folder():
            files.append(file_at(each))
            continue
        source = Source(each)
        names = [name for name, _ in source.names() if name.lower().endswith(suffixes)]
        files += [source.file_at(name) for name in _without_copies(each, names)]
    return files


def _without_copies(url: str, names: list[str]) -> list[str]:
    """Return names without those of files that lie there uncompressed too, as `gunzip -k` leaves
    them, and tell so."""
    known = set(names)
    plain = [(name, _COMPRESSED.sub("", name)) for name in names]
    copies = [name for name, without in plain if without != name and without in known]
    if copies:
        tell_once(
            f"{redact(url)}: {copies[0]} lies there uncompressed as well, and is left out"
            + (f", as are {counted(len(copies) - 1, 'other file')}" if len(copies) > 1 else "")
            + ": open it by its name if it is other data"
        )
    left_out = set(copies)
    return [name for name in names if name not in left_out]


def inside(url: str, name: str) -> str:
    """Return the path or URL of an entry of a folder, also in a chained URL (`zip://a::b.zip`).

    Raises SourceError for a name that would make another URL of it: data sets choose their names.
    """
    if "::" in name or "://" in name:
        raise SourceError(f"{url}: the name {name} has :: or ://, which stand for URLs: rename it")
    before, own, after = _own_link(url)
    folder = own if own.endswith("://") else own.rstrip("/") + "/"  # The top of an archive.
    return f"{before}{folder}{name}{after}"


def failed(url: str, error: Exception, text: str = "cannot be read") -> SourceError:
    """Return the error to raise when a file cannot be read, or something else is wrong."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec raises this for all that a web server answers.
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, EOFError) and not str(error):
        reason = "it ends before its last byte: restore it"
    if type(error).__name__ == "TooManyRedirects":
        reason = "the server redirects in a circle"
    elif is_hanging(error):
        seconds = f"{settings().timeout_s:.0f} s"
        reason = f"no whole answer for {seconds}: the source hangs (DLIO_TIMEOUT sets the patience)"
    if "::" not in url and (archive := re.match(r"(zip|tar|libarchive)://", url)):
        reason = f"it names no archive: write {archive[0]}::{url[archive.end() :] or 'ARCHIVE'}"
    if getattr(error, "errno", None) == errno.ESPIPE:
        reason = "it is a pipe or a socket, not a regular file"
    return SourceError(f"{url} {text}: {reason}")


def is_hanging(error: BaseException | None) -> bool:
    """True for an error that says that a source has given no answer before a deadline."""
    while error is not None and not (isinstance(error, TimeoutError) and error.errno is None):
        error = error.__cause__ or error.__context__
    return error is not None


def _size_of(row: dict[str, Any]) -> int:
    size = row.get("size")
    return -1 if size is None and row["type"] == "file" else int(size or 0)


def _own_part(url: str) -> str:
    """Return the part of a chained URL that may hold patterns: the first link."""
    part = _own_link(url)[1]
    return "" if part.startswith(("http://", "https://")) else part


def _reads_up_to(files: Any, path: str) -> bool:
    """True if all of a file in an archive that lies before a range of it is read, too."""
    member = getattr(getattr(files, "zip", None), "NameToInfo", {}).get(path.lstrip("/"))
    return member is not None and member.compress_type != ZIP_STORED


def _exists(path: str) -> bool:
    """True if a local path exists. Raises OSError when that cannot be found out, as below a folder
    that this user may not search."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def _near(path: str) -> str:
    """Return, to follow an error, a name that may be meant by a local path that is not there."""
    if os.path.islink(path):
        return f"; it is a link to {os.readlink(path)}, which is not there"
    folder, name = os.path.split(path)
    if os.path.isfile(folder):
        return f"; {folder} is a file"
    lost = ""
    while not os.path.exists(folder):
        folder, lost = os.path.dirname(folder), folder
    if lost:
        return f"; there is no {lost}"
    with suppress(OSError), os.scandir(folder) as rows:
        names = [row.name for row in islice(rows, _MOST_NEIGHBOURS)]
        # Megatron names its pairs of .bin and .idx by the part before these.
        return nearest(name, [f"{name}.bin"] if f"{name}.bin" in names else names)
    return ""


def _exists_so(url: str) -> bool:
    """True for a local path with characters of patterns in the name of something that exists."""
    has_marks = re.search(r"[*?\[{]", url) is not None
    return has_marks and not is_remote(url) and os.path.lexists(os.path.expanduser(url))


def _globbed(url: str) -> list[str]:
    if not is_remote(url):
        matches = sorted(glob.glob(os.path.expanduser(url)))
    else:
        with ReadErrors(url):
            system, root = _url_to_fs(url)
            names = sorted(system.glob(root))
        before, own, after = _own_link(url)
        scheme = own.partition("://")[0]
        slash = "/" if scheme in ("file", "local", "memory") else ""
        matches = [f"{before}{scheme}://{slash}{name.removeprefix('/')}{after}" for name in names]
    if not matches:
        raise SourceError(f"{url} matches no file: check the pattern")
    return matches

"""Indexes of data sets: built once, kept in a cache, read into memory.

    <cache>/<kind>.<files>/<state of the files>/head.json, <array>.npy

The cache is DLIO_CACHE, or dlio below XDG_CACHE_HOME or ~/.cache. If others can write there, each
user has a private folder in it, dlio-<uid>. Its contents are used only if
their shapes and checksums are right. A cache that cannot be written is not used, without an error.
Nothing is mapped: a file that another node removes, or that is truncated, would kill the process.
"""

import contextlib
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.npy import read_npy_head
from dlio.data.source import File
from dlio.errors import CorruptBlock
from dlio.util.folders import (
    MARK,
    empty_folder,
    open_below,
    open_working,
    remove_entry,
    remove_marked,
    rename,
)
from dlio.util.settings import settings
from dlio.util.shared_folders import user_folder
from dlio.util.trusted_files import (
    closing_descriptor,
    open_file,
    open_new,
    read_small,
    temporary_name,
)
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import take_lock, write_whole_at

Arrays = dict[str, npt.NDArray[Any]]
"""Arrays of an index by name; text is stored as uint8."""
_WAIT_S = 600.0
_HEAD = "head.json"
_MOST_HEAD = 1 << 20
_LOCK = "lock"
_KEPT = "kept"


class Names:
    """Many strings in two arrays, decoded one at a time. `blob` has the bytes of all strings, one
    after another, and `ends` the end of each in it."""

    def __init__(self, blob: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        """Make one of a sequence of strings."""
        encoded = [os.fsencode(name) for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.blob[start : int(self.ends[number])].tobytes())


def cache_folder() -> str:
    """Return the folder that indexes are kept in."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return settings().cache or os.path.join(home, "dlio")


def cached_index(
    kind: str, version: int, files: Sequence[File], build: Callable[[], Arrays]
) -> Arrays:
    """Return the index of some files, from the cache if they are unchanged, otherwise built.

    Several processes that want the same index at once wait for the first to build it. An index of
    another `version` of its layout is built again.

    Returns arrays that must not be written to.
    """
    urls, states = xxhash.xxh3_64(), xxhash.xxh3_128(f"{kind} {version}".encode())
    for file in files:
        urls.update(f"{file.url}\n".encode("utf-8", "surrogateescape"))
        states.update(f"{file.url}\n{file.state}\n".encode("utf-8", "surrogateescape"))
    every, state = urls.hexdigest(), states.hexdigest()
    return _index(kind, every, state, lambda _: True, lambda: (build(), True))


def kept_index(
    kind: str,
    version: int,
    url: str,
    good: Callable[[Arrays], bool],
    build: Callable[[], tuple[Arrays, bool]],
) -> Arrays:
    """Return an index that can be validated by its contents, such as a listing of folders. `good`
    is true for one that is still valid; `build` returns the arrays, and True if they may be kept.
    """
    return _index(kind, _key_of(version, url), _KEPT, good, build)


def forget_index(kind: str, version: int, url: str) -> None:
    """Have `kept_index` build its index again, because it has turned out to be wrong."""
    with _entry(kind, _key_of(version, url)) as folder:
        if folder is not None:
            remove_entry(folder, _KEPT)


def _key_of(version: int, url: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{version} {url}".encode("utf-8", "surrogateescape"))


def _index(
    kind: str,
    key: str,
    name: str,
    good: Callable[[Arrays], bool],
    build: Callable[[], tuple[Arrays, bool]],
) -> Arrays:
    """Return an index from the cache if it is good there, otherwise as one process builds it."""
    with _entry(kind, key) as folder:
        index = _load(folder, name)
        if index is not None and good(index):
            return index
        with _alone(folder):
            index = _load(folder, name)
            if index is None or not good(index):
                index, keep = build()
                if keep:
                    _save(folder, name, index)
                    index = _load(folder, name) or index
                elif folder is not None:
                    remove_entry(folder, name)
    return index


def fingerprint_of(kind: str, version: int, *parts: str | bytes | npt.NDArray[np.generic]) -> str:
    """Return 32 hex digits that change when any part does."""
    digest = xxhash.xxh3_128(f"{kind} {version}".encode())
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"|{part.dtype.str}{part.shape}|".encode())
            digest.update(_bytes(part))
        else:
            data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
            digest.update(f"|{len(data)}|".encode() + data)
    return digest.hexdigest()


@contextlib.contextmanager
def open_cache() -> Iterator[int]:
    """Open this user's cache and yield its descriptor; create it if it is missing. Raises OSError.

    If others own the folder, or can write in it, this user has a private folder there.
    """
    with closing_descriptor(make_folders(cache_folder(), 0o700)) as folder:
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            yield folder
            return
        with closing_descriptor(open_working(folder, user_folder(), marked=False)) as private:
            yield private


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An index, or another file, in this user's cache."""

    name: str
    """Name in the cache: of an index, its format and a hash of the path."""
    bytes: int
    used: float
    """Time of the last change, in seconds since the epoch."""
    is_index: bool


def cache_entries() -> list[CacheEntry]:
    """Return the contents of this user's cache, sorted by name; none if it cannot be opened."""
    entries = []
    with contextlib.suppress(OSError), open_cache() as cache:
        for name in sorted(os.listdir(cache)):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=cache, follow_symlinks=False)
                is_index = stat.S_ISDIR(status.st_mode)
                size = _bytes_below(cache, name) if is_index else status.st_size
                entries.append(CacheEntry(name, size, status.st_mtime, is_index))
    return entries


def clean_cache(older_s: float = 0.0) -> tuple[int, int]:
    """Remove indexes from this user's cache that have not changed for some time.

    Only folders that dlio has marked as its own are removed. Processes that use an index keep it in
    memory. Returns the number of indexes that were removed, and their bytes.
    """
    removed = size = 0
    now = time.time()
    with contextlib.suppress(OSError), open_cache() as cache:
        for entry in cache_entries():
            if not entry.is_index or now - entry.used < older_s:
                continue
            with contextlib.suppress(OSError):
                if remove_marked(cache, entry.name):
                    removed, size = removed + 1, size + entry.bytes
    return removed, size


def _bytes_below(parent: int, name: str) -> int:
    """Return the bytes of the files in a folder and its folders. Raises OSError."""
    total = 0
    with closing_descriptor(open_below(parent, name)) as folder:
        for each in os.listdir(folder):
            status = os.stat(each, dir_fd=folder, follow_symlinks=False)
            inside = stat.S_ISDIR(status.st_mode)
            total += _bytes_below(folder, each) if inside else status.st_size
    return total


@contextlib.contextmanager
def _entry(kind: str, key: str) -> Iterator[int | None]:
    """Open the folder of an index; yields None if the cache cannot be used.

    After an error it is removed, and nothing is remembered.
    """
    with contextlib.ExitStack() as stack:
        folder, cache, name = None, -1, f"{kind}.{key}"
        with contextlib.suppress(OSError):
            cache = stack.enter_context(open_cache())
            folder = stack.enter_context(closing_descriptor(open_working(cache, name)))
        try:
            yield folder
        except BaseException:
            if folder is not None:
                with contextlib.suppress(OSError):
                    remove_marked(cache, name)
            raise


@contextlib.contextmanager
def _alone(folder: int | None) -> Iterator[None]:
    """Keep other processes from building the same index, if the file system supports locks."""
    descriptor = -1
    if folder is not None:
        with contextlib.suppress(OSError):  # Without a lock every process builds its own.
            descriptor = open_file(folder, _LOCK, os.O_RDWR | os.O_CREAT)
            take_lock(descriptor, fcntl.LOCK_EX, _WAIT_S)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _save(folder: int | None, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    if folder is None:
        return
    temporary = temporary_name(name)
    try:
        with closing_descriptor(open_working(folder, temporary, marked=False)) as inside:
            head = {}
            for each, array in arrays.items():
                plain = np.ascontiguousarray(array)
                head[each] = [plain.dtype.str, list(plain.shape), _digest(plain)]
                with open_new(inside, f"{each}.npy", 0o600) as file:
                    np.save(file, plain, allow_pickle=False)
            text = json.dumps(head).encode()
            write_whole_at(inside, _HEAD, lambda file: file.write(text))
        remove_entry(folder, name)
        rename(temporary, name, folder, folder)
        # Indexes of earlier states of the files.
        empty_folder(folder, keep=(_LOCK, MARK, name))
    except OSError:
        remove_entry(folder, temporary)


def _load(folder: int | None, name: str) -> Arrays | None:
    """Read the arrays of an index, None if they are missing or damaged."""
    if folder is None:
        return None
    try:
        with closing_descriptor(open_below(folder, name)) as inside:
            return _loaded(inside)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, CorruptBlock):
        return None


def _loaded(folder: int) -> Arrays | None:
    head = json.loads(read_small(folder, _HEAD, _MOST_HEAD))
    arrays: Arrays = {}
    for name, (dtype, shape, digest) in head.items():
        array = _read_array(folder, f"{os.path.basename(name)}.npy", dtype, tuple(shape))
        if array is None or _digest(array) != digest:
            return None
        arrays[name] = array
    return arrays


def _read_array(
    folder: int, name: str, dtype: str, shape: tuple[int, ...]
) -> npt.NDArray[Any] | None:
    """Read a .npy file of a certain type and shape; None if it is another one, or cut off."""
    with os.fdopen(open_file(folder, name, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Before memory is taken: a damaged file may claim to have any size.
        if size > math.prod(shape) * np.dtype(dtype).itemsize + _MOST_HEAD:
            return None
        memory = bytearray(size)
        if file.readinto(memory) != size:
            return None
    head = read_npy_head(memoryview(memory))
    is_whole = head.offset + head.nbytes == len(memory)
    if (head.descr, head.shape) != (dtype, shape) or head.fortran or not is_whole:
        return None
    return np.ndarray(shape, dtype, memory, head.offset)


def _digest(array: npt.NDArray[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(array))


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

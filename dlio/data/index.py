"""Indexes of data sets: built once, kept in a cache, and shared by the processes of a node.

    <cache>/<kind>.<files>/<state of the files>/head.json, <array>.npy

The cache is DLIO_CACHE, or dlio below XDG_CACHE_HOME or ~/.cache. If others can write there, each
user has a private folder in it, dlio-<uid>. Its contents are used only if their shapes and
checksums are right; a damaged index is built again. A cache that cannot be written is not used,
which is said once.

Large arrays are mapped, so that all ranks of a node share one copy in the page cache. Only files of
this node's own file systems are: one that another node removes would kill the process. Of a cache
on any other file system each node has a copy below TMPDIR, in the user's private folder, if that
is its own; otherwise each process reads the index into its memory.
"""

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.npy import read_npy_head
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
from dlio.util.mount_points import is_local
from dlio.util.printable import log_warning, tell_once
from dlio.util.settings import settings
from dlio.util.shared_folders import user_folder
from dlio.util.trusted_files import (
    closing_descriptor,
    open_file,
    open_new,
    path_of,
    read_small,
    temporary_name,
)
from dlio.util.user_folders import make_folders, open_folder
from dlio.util.whole_files import take_lock, write_whole_at

Arrays = dict[str, npt.NDArray[Any]]
"""Arrays of an index by name; text is stored as uint8."""
_WAIT_S = 600.0
_HEAD = "head.json"
_MOST_HEAD = 1 << 20
_MAPPED = 1 << 16
"""Bytes of the smallest file that is mapped."""
_WINDOW = 8 << 20
"""Bytes of a mapped file that are in memory at a time while it is verified."""
_LOCK = "lock"
_KEPT = "kept"
_near: dict[int, bool] = {}
"""Whether a device, by its number, is this node's own."""


class IndexedFile(Protocol):
    """A file of which there is an index."""

    url: str

    @property
    def state(self) -> str:
        """Text that changes when the contents may have."""
        ...


def cache_folder() -> str:
    """Return the folder that indexes are kept in."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # Such paths count as none, as the standard of XDG has it.
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return settings().cache or os.path.join(home, "dlio")


def cached_index(
    kind: str, version: int, files: Sequence[IndexedFile], build: Callable[[], Arrays]
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


def peek_index(kind: str, version: int, key: str) -> Arrays | None:
    """Return the arrays that `keep_index` has kept; None without, or if damaged. Makes nothing."""
    name = f"{kind}.{_key_of(version, key)}"
    with (
        contextlib.suppress(OSError),
        open_cache() as cache,
        closing_descriptor(open_below(cache, name)) as folder,
    ):
        return _load(folder, _KEPT, says=False)
    return None


def keep_index(kind: str, version: int, key: str, arrays: Arrays) -> None:
    """Keep arrays for `peek_index`, if the cache can be written."""
    with _entry(kind, _key_of(version, key)) as folder, _alone(folder):
        _save(folder, _KEPT, arrays)


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
    with _entry(kind, key) as folder, _near_entry(kind, key, folder) as near:
        for place in (folder,) if near is None else (near, folder):
            index = _load(place, name, says=False)  # Said by the one that builds it.
            if index is not None and good(index):
                return index if place is near or near is None else _copied(near, name, index)
        with _alone(folder):
            index = _load(folder, name)
            if index is None or not good(index):
                index, keep = build()
                if not keep and folder is not None:
                    remove_entry(folder, name)
                if keep and _save(folder, name, index):
                    index = {}  # Its memory is free before the file takes the same.
                    index = _load(folder, name) or build()[0]
        return index if near is None else _copied(near, name, index)


def _copied(near: int, name: str, index: Arrays) -> Arrays:
    """Return an index as this node's copy of it, made if it is missing."""
    with _alone(near):
        own = _load(near, name)
        if own is None or any(_digest(own[k]) != _digest(index[k]) for k in own):
            own = _load(near, name) if _save(near, name, index) else None
    return index if own is None else own


@contextlib.contextmanager
def _near_entry(kind: str, key: str, folder: int | None) -> Iterator[int | None]:
    """Open the folder of an index's copy on this node; yields None where the cache itself is on
    this node, or there is none."""
    with contextlib.ExitStack() as stack:
        near = None
        if folder is not None and not _is_near(folder):
            with contextlib.suppress(OSError):
                cache = stack.enter_context(_near_cache())
                near = stack.enter_context(closing_descriptor(open_working(cache, f"{kind}.{key}")))
        yield near


@contextlib.contextmanager
def _near_cache() -> Iterator[int]:
    """Open this node's own cache, below TMPDIR. Raises OSError, also if that is not local."""
    with closing_descriptor(open_folder(tempfile.gettempdir())) as above:
        if not _is_near(above):
            raise OSError(errno.EXDEV, "TMPDIR is not on this node")
        with (
            closing_descriptor(open_working(above, user_folder(), marked=False)) as user,
            closing_descriptor(open_working(user, "index")) as cache,
        ):
            yield cache


def _is_near(folder: int) -> bool:
    """True if an open folder is on a file system of this node's own."""
    device = os.fstat(folder).st_dev
    if device not in _near:
        _near[device] = is_local(os.readlink(path_of(folder)))
    return _near[device]


def fingerprint_of(kind: str, version: int, *parts: str | bytes | npt.NDArray[np.generic]) -> str:
    """Return 32 hex digits that change when any part does."""
    digest = xxhash.xxh3_128(f"{kind} {version}".encode())
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"|{part.dtype.str}{part.shape}|".encode())
            for window in _windows(part):
                digest.update(window)
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


@contextlib.contextmanager
def open_local_cache() -> Iterator[int]:
    """Open this user's cache if it is on this node, otherwise this node's own. Raises OSError."""
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(open_cache())
        yield cache if _is_near(cache) else stack.enter_context(_near_cache())


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
    with contextlib.suppress(OSError), open_cache() as cache:
        return _entries_of(cache)
    return []


def _entries_of(cache: int) -> list[CacheEntry]:
    entries = []
    for name in sorted(os.listdir(cache)):
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=cache, follow_symlinks=False)
            is_index = stat.S_ISDIR(status.st_mode)
            size = _bytes_below(cache, name) if is_index else status.st_size
            entries.append(CacheEntry(name, size, status.st_mtime, is_index))
    return entries


def clean_cache(older_s: float = 0.0) -> tuple[int, int]:
    """Remove indexes from this user's cache that have not changed for some time.

    Only folders that dlio has marked as its own are removed, also of the copies of this node.
    Processes that use an index keep it. Returns the number of indexes that were removed, and their
    bytes.
    """
    removed = size = 0
    now = time.time()
    for opened in (open_cache, _near_cache):
        with contextlib.suppress(OSError), opened() as cache:
            for entry in _entries_of(cache):
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
        try:
            cache = stack.enter_context(open_cache())
            folder = stack.enter_context(closing_descriptor(open_working(cache, name)))
        except OSError as error:
            _tell_unkept(error)
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


def _save(folder: int | None, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Write the arrays of an index; False if they cannot be written."""
    if folder is None:
        return False
    temporary = temporary_name(name)
    try:
        with closing_descriptor(open_working(folder, temporary, marked=False)) as inside:
            head = {}
            for each, values in arrays.items():
                plain, digest = np.ascontiguousarray(values), xxhash.xxh3_64()
                with open_new(inside, f"{each}.npy", 0o600) as file:
                    # As np.save, which does not say why the system has not written all.
                    about = np.lib.format.header_data_from_array_1_0(plain)
                    np.lib.format.write_array_header_1_0(file, about)
                    for window in _windows(plain):
                        digest.update(window)
                        file.write(window)
                head[each] = [plain.dtype.str, list(plain.shape), digest.hexdigest()]
            text = json.dumps(head).encode()
            write_whole_at(inside, _HEAD, lambda file: file.write(text))
        remove_entry(folder, name)
        rename(temporary, name, folder, folder)
        # Indexes of earlier states of the files.
        empty_folder(folder, keep=(_LOCK, MARK, name))
    except OSError as error:
        remove_entry(folder, temporary)
        _tell_unkept(error)
        return False
    return True


def _tell_unkept(error: OSError) -> None:
    """Say once that the cache keeps no indexes."""
    reason = error.strerror or str(error)
    tell_once(
        f"the cache {cache_folder()} cannot be written ({reason}): data sets are listed anew each "
        "time; free space or make it writable there, or name another folder in DLIO_CACHE"
    )


def _load(folder: int | None, name: str, *, says: bool = True) -> Arrays | None:
    """Return the arrays of an index, None if they are missing or damaged, which it `says`."""
    if folder is None:
        return None
    arrays = None
    try:
        with closing_descriptor(open_below(folder, name)) as inside:
            arrays = _loaded(inside)
    except FileNotFoundError:
        if not os.path.lexists(f"{path_of(folder)}/{name}"):
            return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, CorruptBlock):
        pass
    if arrays is None and says:
        shown = os.readlink(path_of(folder))
        log_warning("%s/%s: this cached index is damaged, and is built again", shown, name)
    return arrays


def _loaded(folder: int) -> Arrays | None:
    head = json.loads(read_small(folder, _HEAD, _MOST_HEAD))
    may_map = _is_near(folder)
    arrays: Arrays = {}
    for name, (dtype, shape, digest) in head.items():
        file = f"{os.path.basename(name)}.npy"
        values = _read_array(folder, file, dtype, tuple(shape), digest, may_map)
        if values is None:
            return None
        arrays[name] = values
    return arrays


def _read_array(
    folder: int, name: str, dtype: str, shape: tuple[int, ...], digest: str, may_map: bool
) -> npt.NDArray[Any] | None:
    """Return the array of a .npy file, mapped if it is large and may be; None if it has another
    type, shape or checksum, or is cut off."""
    with os.fdopen(open_file(folder, name, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Before memory is taken: a damaged file may claim to have any size.
        if size > math.prod(shape) * np.dtype(dtype).itemsize + _MOST_HEAD:
            return None
        memory: mmap.mmap | bytearray
        if may_map and size >= _MAPPED:
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        else:
            memory = bytearray(size)
            if file.readinto(memory) != size:
                return None
    head = read_npy_head(memoryview(memory), size)
    is_whole = head.offset + head.nbytes == size
    if (head.descr, head.shape) != (dtype, shape) or head.fortran or not is_whole:
        return None
    values = np.ndarray(shape, dtype, memory, head.offset)
    return values if _digest(values) == digest else None


def let_go(values: npt.NDArray[np.generic]) -> None:
    """Take the pages of a mapped file out of this process's memory, until they are needed again."""
    memory: object = values
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if isinstance(memory, mmap.mmap):
        memory.madvise(mmap.MADV_DONTNEED)


def _digest(values: npt.NDArray[Any]) -> str:
    digest = xxhash.xxh3_64()
    for window in _windows(values):
        digest.update(window)
    return digest.hexdigest()


def _windows(values: npt.NDArray[Any]) -> Iterator[memoryview]:
    """Yield the bytes of an array, some at a time; those of a mapped file do not stay in memory."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for at in range(0, len(data), _WINDOW):
        yield data[at : at + _WINDOW]
        let_go(values)

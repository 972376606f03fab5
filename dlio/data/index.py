"""Indexes of data sets: built once, kept in a cache, mapped into memory.

    <cache>/<kind>-<files>/<state of the files>/head.json, <array>.npy

The cache is DLIO_CACHE, or dlio below XDG_CACHE_HOME or ~/.cache. Its contents are used only if
their shapes and checksums are right. A cache that cannot be written is not used, without an error.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.util.files import take_lock
from dlio.util.settings import settings

__all__ = [
    "Arrays",
    "Names",
    "Stamped",
    "cache_folder",
    "cached_index",
    "fingerprint_of",
    "forget_index",
    "kept_index",
]

Arrays = dict[str, npt.NDArray[Any]]
"""Arrays of an index by name; text is stored as uint8."""
_CHECKED_BYTES = 32 << 20
"""The checksums of larger arrays are not verified, which would mean to read all of them."""
_WAIT_S = 600.0
_HEAD = "head.json"


class Stamped(Protocol):
    """A file or folder whose `stamp` changes when its contents do."""

    @property
    def url(self) -> str:
        """Its path or URL."""

    @property
    def stamp(self) -> str:
        """Text such as size and time of change."""


class Names:
    """Many strings in two arrays, decoded one at a time.

    Args:
        blob: bytes of all strings, one after another; shape (bytes,).
        ends: end of each string in `blob`; shape (strings,).
    """

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
    kind: str, version: int, files: Sequence[Stamped], build: Callable[[], Arrays]
) -> Arrays:
    """Return the index of some files, from the cache if they are unchanged, otherwise built.

    Several processes that want the same index at once wait for the first to build it.

    Args:
        kind: word that names the kind of index.
        version: number of its layout; an index of another version is built anew.
        files: the files that the index describes.
        build: makes the arrays.

    Returns arrays that may be mapped from files and must not be written to.
    """
    urls, states = xxhash.xxh3_64(), xxhash.xxh3_128(f"{kind} {version}".encode())
    for file in files:
        urls.update(f"{file.url}\n".encode("utf-8", "surrogateescape"))
        states.update(f"{file.url}\n{file.stamp}\n".encode("utf-8", "surrogateescape"))
    folder = os.path.join(cache_folder(), f"{kind}-{urls.hexdigest()}")
    place = os.path.join(folder, states.hexdigest())
    index = _load(place)
    if index is not None:
        return index
    with _alone(folder):
        index = _load(place)
        if index is None:
            arrays = build()
            _save(place, arrays)
            index = _load(place) or arrays
    return index


def kept_index(
    kind: str,
    version: int,
    url: str,
    good: Callable[[Arrays], bool],
    build: Callable[[], tuple[Arrays, bool]],
) -> Arrays:
    """Return an index that can be validated by its contents, such as a listing of folders.

    Args:
        kind: word that names the kind of index.
        version: number of its layout.
        url: path or URL that the index describes.
        good: True if an index is still valid.
        build: returns the arrays, and True if they may be kept.
    """
    key = xxhash.xxh3_64_hexdigest(f"{version} {url}".encode("utf-8", "surrogateescape"))
    folder = os.path.join(cache_folder(), f"{kind}-{key}")
    place = os.path.join(folder, "kept")
    index = _load(place)
    if index is not None and good(index):
        return index
    with _alone(folder):
        index = _load(place)
        if index is None or not good(index):
            index, keep = build()
            if keep:
                _save(place, index)
                index = _load(place) or index
            else:
                shutil.rmtree(place, ignore_errors=True)
    return index


def forget_index(kind: str, version: int, url: str) -> None:
    """Have `kept_index` build its index anew, because it has turned out to be wrong."""
    key = xxhash.xxh3_64_hexdigest(f"{version} {url}".encode("utf-8", "surrogateescape"))
    shutil.rmtree(os.path.join(cache_folder(), f"{kind}-{key}", "kept"), ignore_errors=True)


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
def _alone(folder: str) -> Iterator[None]:
    """Keep other processes from building the same index, if the file system supports locks."""
    descriptor = -1
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        take_lock(descriptor, fcntl.LOCK_EX, _WAIT_S)
    except OSError:
        pass  # Without a lock every process builds its own.
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _save(place: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    parent = os.path.dirname(place)
    temporary = f"{place}.{secrets.token_hex(4)}"
    try:
        os.makedirs(temporary, mode=0o700)
        head = {}
        for name, array in arrays.items():
            plain = np.ascontiguousarray(array)
            head[name] = [plain.dtype.str, list(plain.shape), _digest(plain)]
            np.save(os.path.join(temporary, f"{name}.npy"), plain, allow_pickle=False)
        with open(os.path.join(temporary, _HEAD), "w", encoding="utf-8") as file:
            json.dump(head, file)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(temporary, place)
        # Indexes of earlier states of the files. Processes that still map them keep the memory.
        for name in os.listdir(parent):
            if name not in ("lock", os.path.basename(place)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(place: str) -> Arrays | None:
    """Read the arrays of an index, None if they are missing or damaged."""
    try:
        with open(os.path.join(place, _HEAD), encoding="utf-8") as file:
            head = json.load(file)
        arrays: Arrays = {}
        for name, (dtype, shape, digest) in head.items():
            path = os.path.join(place, f"{os.path.basename(name)}.npy")
            # An array of no bytes cannot be mapped.
            array = np.load(path, mmap_mode="r" if all(shape) else None, allow_pickle=False)
            if array.dtype.str != dtype or list(array.shape) != shape:
                return None
            if array.nbytes <= _CHECKED_BYTES and _digest(array) != digest:
                return None
            arrays[name] = np.asarray(array)
    except (OSError, ValueError, TypeError, AttributeError, EOFError):
        return None
    return arrays


def _digest(array: npt.NDArray[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(array))


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

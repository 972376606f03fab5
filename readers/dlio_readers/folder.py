"""Class folders of images, in the order of torchvision's ImageFolder."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import SourceError
from dlio.order import Order
from dlio.reader import cut_blocks
from dlio.schema import IMAGE_LABEL, LABEL
from dlio.source import Entry, Source
from dlio.storage.shard import SUFFIX

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_STORAGE_SEED = 0xD110
"""Class folders are sorted by class; blocks are cut along this order, so that they mix classes."""
_INDEX_VERSION = 1
_LISTING_THREADS = 8
_SETTLED_S = 2.0
"""A folder changed within this time of its listing may change again under the same time stamp."""


@dataclass(frozen=True, slots=True)
class _Index:
    classes: list[str]
    labels: npt.NDArray[np.int64]
    file_sizes: npt.NDArray[np.int64]
    modified_ns: npt.NDArray[np.int64]
    names: bytes
    """Paths below the root, UTF-8, one after another."""
    name_ends: npt.NDArray[np.int64]
    folders: dict[str, int]
    """Every folder that was listed, and when it had changed last."""


class FolderReader:
    """Reads `<class>/**/*.jpg` and the like; a sample is an image file's bytes and its label.

    The listing is kept in a cache (DLIO_CACHE, or XDG_CACHE_HOME/dlio) and used again as long as
    no folder has changed.

    Raises SourceError when there are no class folders, or one of them has no images.
    """

    format = "folder"
    objects = True
    fallback = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.schema = IMAGE_LABEL
        self._source = Source(path)
        self._cache = _cache_file(self._source)
        index = _load(self._cache, self._source) or _list(self._source, self._cache)
        self._index = index
        self.classes = index.classes
        self.labels = index.labels
        self.sizes = index.file_sizes + self.schema.overhead
        self.layout = cut_blocks(self.sizes, Order(len(self.sizes), _STORAGE_SEED, shuffled=True))
        self.fingerprint = _fingerprint(index, self.layout.starts)

    @staticmethod
    def recognises(path: str) -> str | None:
        source = Source(path)
        if not source.is_folder():
            return "is no folder"
        entries = source.listing()
        if any(entry.name.endswith(SUFFIX) for entry in entries):
            return "holds native shards"
        if not any(entry.folder for entry in entries):
            images = sum(entry.name.lower().endswith(EXTENSIONS) for entry in entries)
            found = f"{images} images and" if images else "nothing to read and"
            return f"holds {found} no class folders: sort images into one folder a class"
        return None

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, sample: int) -> str:
        ends = self._index.name_ends
        start = int(ends[sample - 1]) if sample else 0
        return os.fsdecode(self._index.names[start : int(ends[sample])])

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return [self._read(int(sample)) for sample in samples]

    def close(self) -> None:
        pass

    def _read(self, sample: int) -> bytes | memoryview:
        name, size = self.name(sample), int(self._index.file_sizes[sample])
        label = LABEL.pack(int(self.labels[sample]))
        if self._source.local:
            payload = self._read_local(name, size, label)
            if payload is not None:
                return payload
        else:
            data = self._source.read(name)
            if len(data) == size:
                return label + data
        self._forget()
        raise SourceError(
            f"{self._source.path(name)} is no longer the {size} bytes that were listed: the data "
            "set has changed; run again (its listing is made anew)"
        )

    def _read_local(self, name: str, size: int, label: bytes) -> memoryview | None:
        """One copy, from the file into the payload; None when the size is another now."""
        path = self._source.path(name)
        memory = bytearray(len(label) + size)
        memory[: len(label)] = label
        left, beyond = memoryview(memory)[len(label) :], bytearray(1)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = os.preadv(descriptor, [left, beyond], 0)
                while 0 < done < size:
                    more = os.preadv(descriptor, [left[done:], beyond], done)
                    if not more:
                        break
                    done += more
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error
        return memoryview(memory) if done == size else None

    def _forget(self) -> None:
        if self._cache is not None:
            with contextlib.suppress(OSError):  # It is gone, or cannot be written anyway.
                os.unlink(self._cache)


def _list(source: Source, cache: str | None) -> _Index:
    started = time.time()
    top = source.listing()
    classes = [entry.name for entry in top if entry.folder]
    folders = {"": source.modified_ns()}
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        listings = list(pool.map(lambda name: sorted(_walk(source, name)), classes))
    names: list[str] = []
    rows: list[tuple[int, int, int]] = []
    for label, listing in enumerate(listings):
        before = len(names)
        for folder, modified_ns, entries in listing:
            folders[folder] = modified_ns
            for entry in entries:
                if not entry.folder and entry.name.lower().endswith(EXTENSIONS):
                    names.append(f"{folder}/{entry.name}")
                    rows.append((label, entry.size, entry.modified_ns))
        if len(names) == before:
            raise SourceError(
                f"{source.path(classes[label])} is a class folder without images "
                f"({', '.join(EXTENSIONS)}): fill it, or remove it"
            )
    encoded = [os.fsencode(name) for name in names]
    table = np.array(rows, np.int64).reshape(-1, 3)
    index = _Index(
        classes,
        np.ascontiguousarray(table[:, 0]),
        np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]),
        b"".join(encoded),
        np.cumsum([len(name) for name in encoded], dtype=np.int64),
        folders,
    )
    settled_ns = int((started - _SETTLED_S) * 1e9)
    if cache is not None and all(when < settled_ns for when in folders.values()):
        _save(cache, index)
    return index


def _walk(source: Source, folder: str) -> Iterator[tuple[str, int, list[Entry]]]:
    modified_ns = source.modified_ns(folder)
    entries = source.listing(folder)
    yield folder, modified_ns, entries
    for entry in entries:
        if entry.folder:
            yield from _walk(source, f"{folder}/{entry.name}")


def _fingerprint(index: _Index, starts: npt.NDArray[np.int64]) -> str:
    digest = xxhash.xxh3_128()
    digest.update(f"folder {_INDEX_VERSION} {_STORAGE_SEED} {json.dumps(index.classes)}".encode())
    for array in (index.labels, index.file_sizes, index.modified_ns, index.name_ends, starts):
        digest.update(array.astype("<i8").tobytes())
    digest.update(index.names)
    return digest.hexdigest()


def _cache_file(source: Source) -> str | None:
    """Where the listing of a local folder is kept; None for others, whose folders have no date."""
    if not source.local:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get("DLIO_CACHE") or os.path.join(home, "dlio")
    key = xxhash.xxh3_128_hexdigest(os.fsencode(os.path.realpath(source.root)))
    return os.path.join(folder, f"folder-{key}.npz")


def _save(cache: str, index: _Index) -> None:
    """Keep the listing; a cache that cannot be written is no error."""
    temporary = f"{cache}.{os.getpid()}"
    head = {
        "version": _INDEX_VERSION,
        "classes": index.classes,
        "folders": index.folders,
    }
    try:
        os.makedirs(os.path.dirname(cache), mode=0o700, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(
                file,
                head=np.frombuffer(json.dumps(head).encode(), np.uint8),
                labels=index.labels,
                file_sizes=index.file_sizes,
                modified_ns=index.modified_ns,
                names=np.frombuffer(index.names, np.uint8),
                name_ends=index.name_ends,
            )
        os.replace(temporary, cache)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _load(cache: str | None, source: Source) -> _Index | None:
    """The kept listing, if it is whole and no folder has changed since."""
    if cache is None:
        return None
    try:
        with np.load(cache, allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            index = _Index(
                list(head["classes"]),
                file["labels"].astype(np.int64),
                file["file_sizes"].astype(np.int64),
                file["modified_ns"].astype(np.int64),
                file["names"].tobytes(),
                file["name_ends"].astype(np.int64),
                dict(head["folders"]),
            )
    except Exception:
        return None
    count = len(index.labels)
    same = {len(index.file_sizes), len(index.modified_ns), len(index.name_ends)} == {count}
    if head.get("version") != _INDEX_VERSION or not count or not same:
        return None
    if int(index.name_ends[-1]) != len(index.names):
        return None
    unchanged = all(source.modified_ns(name) == when for name, when in index.folders.items())
    return index if unchanged else None

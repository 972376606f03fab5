"""Files of a data set as they were when it was listed: listed, compared and read.

For readers whose samples are files of their own.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.identity import content_sample, sampled_of, spread
from dlio.data.index import Arrays, fingerprint_of, forget_index, kept_index
from dlio.data.index_memory import Names
from dlio.data.links import OpenFolder, links_followed
from dlio.data.reader_contract import IN_FOLDER, NAMED_FILE
from dlio.data.requests import are_observed, request
from dlio.data.source import ReadErrors, Source, failed
from dlio.data.splits import split_of
from dlio.errors import SourceError
from dlio.image.native.listed_files import (
    files_a_look,
    look_at_files,
    looks_together,
    read_files,
)
from dlio.plan.layout import Layout
from dlio.storage.block import MAX_SAMPLE_BYTES
from dlio.util.limits import check_regular
from dlio.util.memory import new_memory
from dlio.util.parallel import each_of
from dlio.util.printable import tell_once
from dlio.util.units import counted

# Data sets of two folders side by side, with a file in the second for each picture in the first
#
#     root/images/a.jpg              root/images/train/a.jpg        root/train/images/a.jpg
#     root/labels/a.txt              root/labels/train/a.txt        root/train/labels/a.txt
#
# They are opened by the root, by the root and a split (`train`), or by the folder of pictures.

_IMAGES: Final = "images"


@dataclass(frozen=True, slots=True)
class SideFolders:
    """Where the files of a data set lie."""

    root: str
    """Folder that both lie below; a path or URL."""
    images: str
    """Folder of pictures, below the root."""
    others: str
    """Folder of the files that belong to them, below the root."""

    def other(self, picture: str, extension: str) -> str:
        """Return the name of the file that belongs to a picture."""
        start = len(self.images) + 1 if self.images else 0
        name = f"{os.path.splitext(picture[start:])[0]}{extension}"
        return f"{self.others}/{name}" if self.others else name


def find_sides(path: str, wanted: Sequence[str]) -> list[tuple[str, SideFolders]]:
    """Return (split, its folders) of the data set at a path; split is "" where there is one.

    The second folder has one of the names `wanted`.

    Raises SourceError when a folder cannot be listed.
    """
    source = Source(path)
    if not source.is_folder():
        return []
    folders = source.folders()
    sides: list[tuple[str, SideFolders]] = []
    other = next((name for name in wanted if name in folders), None)
    if _IMAGES in folders and other is not None:
        rows = source.names(_IMAGES)
        splits = [name for name, folder in rows if folder]
        if any(name.lower().endswith(PICTURES) for name, folder in rows if not folder):
            splits = []  # Pictures next to them would be lost.
        beside = source.folders(other)
        both = [name for name in splits if name in beside]
        if both:
            return [
                (name, SideFolders(path, f"{_IMAGES}/{name}", f"{other}/{name}")) for name in both
            ]
        return [("", SideFolders(path, _IMAGES, other))]
    for name in folders:
        if not split_of(name, folder=True):
            continue
        inside = source.folders(name)
        other = next((each for each in wanted if each in inside), None)
        if _IMAGES in inside and other is not None:
            sides.append((name, SideFolders(path, f"{name}/{_IMAGES}", f"{name}/{other}")))
    if sides:
        return sides
    return _by_pictures(path, wanted)


def _by_pictures(path: str, wanted: Sequence[str]) -> list[tuple[str, SideFolders]]:
    """Return the folders of a data set that is named by its folder of pictures."""
    parts = os.path.abspath(path).split("/") if Source(path).local else path.split("/")
    parts = [part for k, part in enumerate(parts) if part or k < 3]
    for depth in (1, 2):
        if len(parts) <= depth or parts[-depth] != _IMAGES:
            continue
        root = "/".join(parts[:-depth]) or "/"
        inside = "/".join(parts[len(parts) - depth + 1 :])
        for other in wanted:
            folder = f"{other}/{inside}" if inside else other
            if Source(root).is_folder(folder):
                images = f"{_IMAGES}/{inside}" if inside else _IMAGES
                return [("", SideFolders(root, images, folder))]
    return []


# Files of a listing

_THREADS: Final = 32
_FEW_THREADS: Final = 8
_CHECKED: Final = 2048
"""Files whose attributes are compared with a listing."""
_A_TASK: Final = 64
"""Of these, those that a thread compares at a time."""
_DEEPEST: Final = 32
_COARSE_NS: Final = 100_000_000
"""Times of files lag behind the clock by some milliseconds."""
_SETTLED_S: Final = 2.0
"""A folder changed this recently may change again without a new modification time."""
# fmt: off
PICTURES: Final = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"
)
# fmt: on
"""Suffixes of image files."""
_OTHER_PICTURES: Final = (
    *(".gif", ".jfif", ".jpe", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".j2k", ".tga", ".ico"),
    *(".psd", ".svg", ".exr", ".hdr", ".cr2", ".nef", ".arw", ".dng"),
)
"""Suffixes of pictures that are left out, as by torchvision's ImageFolder."""
_OTHER_SAMPLES: Final = (
    *(".wav", ".mp3", ".flac", ".ogg", ".m4a", ".mp4", ".avi", ".mov", ".mkv", ".webm", ".nii"),
    *(".nii.gz", ".dcm", ".h5", ".part", ".partial", ".crdownload", ".download", ".aria2"),
)
"""Suffixes of sound, films, scans and unfinished downloads, which are left out where pictures are
read."""


class FileSet:
    """Files below a source, in the order of a listing. Thread-safe.

    `index` has the arrays of `listing`, whose names have the prefix; its sizes may be `overhead`
    bytes more than the files'.
    """

    def __init__(
        self, source: Source, index: Arrays, prefix: str = "", *, overhead: int = 0
    ) -> None:
        self._source, self._overhead = source, overhead
        self.names = Names(index[f"{prefix}names"], index[f"{prefix}name_ends"])
        self.sizes: npt.NDArray[np.int64] = index[f"{prefix}sizes"]
        self._times, self._changed = index[f"{prefix}times"], index[f"{prefix}changed"]
        self._opened_ns = time.time_ns() - _COARSE_NS

    @staticmethod
    def listing(source: Source, names: Sequence[str], prefix: str = "") -> Arrays:
        """Return the arrays of some files: names, sizes and times.

        Raises SourceError that names the first files that are missing, or too large.
        """
        rows = np.zeros((len(names), 3), np.int64)
        lost: list[int] = []
        if source.local:
            runs: list[tuple[str, int, int]] = []  # Names one after another in the same folder.
            step = files_a_look()
            for folder, own in groupby(names, lambda name: name.rpartition("/")[0]):
                begin = runs[-1][2] if runs else 0
                end = begin + sum(1 for _ in own)
                runs += [(folder, k, min(k + step, end)) for k in range(begin, end, step)]

            def look(run: tuple[str, int, int]) -> None:
                folder, begin, end = run
                own = [name.rpartition("/")[2] for name in names[begin:end]]
                rows[begin:end] = look_at(source, folder, own)

            each_of(look, runs, _THREADS, source.path(""))
            lost = np.flatnonzero(rows[:, 0] < 0).tolist()
        else:
            listed = {}
            for folder in {name.rpartition("/")[0] for name in names}:
                inside = folder + "/" if folder else ""
                listed.update({inside + each.name: each for each in source.listing(folder)})
            for k, name in enumerate(names):
                if name not in listed or listed[name].folder:
                    lost.append(k)
                else:
                    rows[k, :2] = listed[name].known_size(), listed[name].modified_ns
        source.check_dangling(len(names) - len(lost))
        if lost:
            shown = ", ".join(names[k] for k in lost[:3])
            raise SourceError(
                f"{source.path()} lacks {len(lost)} of {counted(len(names), 'file')} that its "
                "annotations "
                f"name, such as {shown}: copy them, or correct the names"
            )
        large = np.flatnonzero(rows[:, 0] > MAX_SAMPLE_BYTES // 2)
        if len(large):
            raise SourceError(
                f"{names[large[0]]} of {rows[large[0], 0]} bytes is too large for a sample"
            )
        blob = Names.of(names)
        return {
            f"{prefix}names": blob.blob,
            f"{prefix}name_ends": blob.ends,
            f"{prefix}sizes": rows[:, 0].copy(),
            f"{prefix}times": rows[:, 1].copy(),
            f"{prefix}changed": rows[:, 2].copy(),
        }

    def __len__(self) -> int:
        return len(self.sizes)

    def size_of(self, number: int) -> int:
        """Return the bytes of a file, as it was listed."""
        return int(self.sizes[number]) - self._overhead

    def path(self, number: int) -> str:
        """Return the full path of a file."""
        return self._source.path(self.names[number])

    def read(self, number: int, head: bytes = b"") -> bytes | memoryview | None:
        """Return `head` and the bytes of a file; None if it is not the one that was listed.

        Raises SourceError when it cannot be read.
        """
        size = self.size_of(number)
        if self._source.local:
            with request():
                return self._read_local(number, size, head)
        data = self._source.read(self.names[number])
        return head + data if len(data) == size else None

    def read_many(
        self, numbers: npt.NDArray[np.int64], heads: npt.NDArray[np.uint8]
    ) -> list[memoryview | None]:
        """Return payloads of some files: a head, of `heads` of shape (n, bytes), and its bytes.

        None for files that are to be read by `read`, which tells the reason: without the C library
        it reads them all.
        """
        nothing: list[memoryview | None] = [None] * len(numbers)
        located = None if are_observed() else self._named(numbers)
        if located is None:
            return nothing
        sizes, head = self.sizes[numbers] - self._overhead, heads.shape[1]
        ends = np.cumsum(sizes + head)
        begins = ends - sizes
        memory = np.frombuffer(new_memory(int(ends[-1])), np.uint8)
        for k in range(head):
            memory[begins - head + k] = heads[:, k]
        read = read_files(located[0], sizes, begins, memory)
        whole, at = memory.data, (begins - head).tolist()
        return [
            whole[begin:end] if was_read else None
            for begin, end, was_read in zip(at, ends.tolist(), read.tolist(), strict=True)
        ]

    def locate(
        self, numbers: npt.NDArray[np.int64], parts: npt.NDArray[np.void]
    ) -> list[object] | None:
        """Have `parts` of type PART, of shape (n,), be the files of these numbers; return what
        their addresses belong to. None where files are not opened by the system."""
        located = self._named(numbers)
        if located is None:
            return None
        files, _ = located
        parts["descriptor"] = IN_FOLDER
        parts["offset"] = files.ctypes.data + np.arange(len(files)) * files.itemsize
        parts["bytes"] = self.sizes[numbers] - self._overhead
        return [*located, self.names.blob]

    def _named(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.void], OpenFolder] | None:
        """Return files of type NAMED_FILE, and the folder that they refer to."""
        opened = self._source.names_below()
        if opened is None:
            return None
        folder, follows = opened
        ends = np.asarray(self.names.ends)
        begins = np.where(numbers > 0, ends[numbers - 1], 0)
        files = np.zeros(len(numbers), NAMED_FILE)
        files["folder"], files["follows"] = folder.number, follows
        files["name"] = self.names.blob.ctypes.data + begins
        files["name_bytes"] = ends[numbers] - begins
        files["changed_ns"] = self._changed[numbers]
        return files, folder

    def is_unchanged(self) -> bool:
        """True if files have the attributes of the listing: all, or some of very many."""

        def same(numbers: list[int]) -> bool:
            try:
                for number in numbers:
                    status = os.stat(self.path(number))
                    now = status.st_mtime_ns, status.st_ctime_ns
                    if now != (self._times[number], self._changed[number]):
                        return False
            except OSError:
                return False
            return True

        chosen = spread(len(self), _CHECKED)
        parts = [chosen[k : k + _A_TASK] for k in range(0, len(chosen), _A_TASK)]
        return all(each_of(same, parts, min(len(parts), _THREADS), self._source.path("")))

    def content_samples(self) -> list[str]:
        """Return hashes of parts of some of the local files. Raises SourceError."""
        if not self._source.local:
            return []

        def sample(number: int) -> str:
            path = self.path(number)
            with ReadErrors(path):
                return content_sample(path, 3, self._source.open_regular)

        return each_of(sample, sampled_of(len(self)), _THREADS, self._source.path(""))

    def _read_local(self, number: int, size: int, head: bytes) -> memoryview | None:
        """Read a local file without extra copies; None if it has been replaced."""
        memory = bytearray(len(head) + size)
        memory[: len(head)] = head
        left, beyond = memoryview(memory)[len(head) :], bytearray(1)
        path = self._source.path(self.names[number])
        try:
            descriptor = self._source.open(path)
            try:
                done = os.preadv(descriptor, [left, beyond], 0)
                while 0 < done < size:
                    more = os.preadv(descriptor, [left[done:], beyond], done)
                    if not more:
                        break
                    done += more
                status = os.fstat(descriptor)
                check_regular(status, path)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failed(path, error) from error
        if done != size:
            return None
        # One whose permissions were changed before this opening has another ctime than a kept
        # listing has, and would be listed as the same file.
        is_listed = status.st_ctime_ns == self._changed[number] or (
            status.st_ctime_ns < self._opened_ns and status.st_mtime_ns == self._times[number]
        )
        return memoryview(memory) if is_listed else None


def listing_threads() -> int:
    """Return how many threads list folders: fewer where the kernel looks at files in parallel."""
    return _FEW_THREADS if looks_together() else _THREADS


def by_look(names: Sequence[str]) -> list[Sequence[str]]:
    """Cut the names of a folder's files into those that one call of `look_at` gets."""
    step = files_a_look()
    return [names[k : k + step] for k in range(0, len(names), step)]


def look_at(source: Source, folder: str, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return (size, times of the last change of the contents and of all) of files of a local
    folder, shape (n, 3); the size is -1 for those that are not there, which `Source.entry` notes.

    Raises SourceError, also if one is not a regular file, or a link out of the root.
    """
    rows = np.full((len(names), 3), -1, np.int64)
    rest: Iterable[int] = range(len(names))
    # A name with a slash could lead over links.
    if names and not any("/" in name for name in names):
        try:
            opened, follows = source.folder_of(folder)
        except SourceError:
            pass  # The first file tells.
        else:
            text = Names.of(names)
            known = look_at_files(opened.number, follows, text.blob, text.ends)
            rows[:] = known[:, :3]
            rest = np.flatnonzero(known[:, 3] == 0).tolist()
    for k in rest:
        entry = source.entry(folder, names[k])
        rows[k] = -1 if entry is None else (entry.size, entry.modified_ns, entry.changed_ns)
    return rows


class ListedReader:
    """Base class of readers whose samples are files of their own, listed once and kept in an index.

    A subclass sets the class attributes, calls `_open`, and lists and reads.
    """

    objects = True
    format: str
    version: int
    """Of the index; one of another version is built again."""
    prefixes: Sequence[str] = ("",)
    """Of the names of the sets of files in the index; see `FileSet`."""
    classes: Sequence[str]
    fingerprint: str
    sizes: npt.NDArray[np.int64]
    layout: Layout

    def _list(self) -> tuple[Arrays, bool]:
        """List the files; see `_listed`."""
        raise NotImplementedError

    def _read(self, sample: int) -> bytes | memoryview:
        """Return the payload of a sample. Raises SourceError."""
        raise NotImplementedError

    def _open(self, source: Source, kind: str) -> tuple[Arrays, dict[str, Any]]:
        """Return the index, from the cache if it is still valid, and its head.

        `kind` names it, with the options that it depends on.
        """
        self._source, self._kind = source, kind
        index = kept_index(kind, self.version, source.root, self._holds, self._list)
        head = json.loads(index["head"].tobytes())
        self.classes, self.fingerprint = head["classes"], head["fingerprint"]
        if head["left_out"]:
            tell_once(f"{source.path()} {head['left_out']}")
        self._sets = [FileSet(source, index, prefix) for prefix in self.prefixes]
        self._files = self._sets[0]
        return index, head

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, sample: int) -> str:
        return self._files.names[sample]

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return [self._read(int(sample)) for sample in samples]

    def close(self) -> None:
        self._source.close()

    def _content(self, files: FileSet, number: int, head: bytes = b"") -> bytes | memoryview:
        """Return `head` and the bytes of a file. Raises SourceError, and forgets the cached index,
        if it is not the one that was listed.
        """
        what = ""
        try:
            content = files.read(number, head)
        except SourceError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            content, what = None, "is gone"
        if content is not None:
            return content
        what = what or (
            f"is no longer the {files.size_of(number)} bytes that were listed, or has other times"
        )
        if self._source.local:
            forget_index(self._kind, self.version, self._source.root)
        raise SourceError(
            f"{files.path(number)} {what}: the data set has changed; run again to list it anew"
        )

    def _holds(self, index: Arrays) -> bool:
        """True if a kept index is valid: folders and files are those that were listed."""
        if not self._source.local:
            return False
        try:
            head = json.loads(index["head"].tobytes())
            return (
                "left_out" in head
                and self._fits(index, head)
                and all(FileSet(self._source, index, each).is_unchanged() for each in self.prefixes)
                and self._times_of(list(head["folders"])) == list(head["folders"].values())
            )
        except (SourceError, KeyError, ValueError, TypeError, AttributeError, RecursionError):
            return False

    def _fits(self, index: Arrays, head: dict[str, Any]) -> bool:
        """True if the arrays of an index are of one data set."""
        return True

    def _times_of(self, folders: Sequence[str]) -> list[list[int]]:
        # In parallel, because each is a request to a remote file system.
        source = self._source
        return each_of(source.times_ns, folders, min(len(folders), _THREADS), source.path(""))

    def _listed(
        self, started: float, index: Arrays, head: dict[str, Any], *parts: Any
    ) -> tuple[Arrays, bool]:
        """Return an index, and True if it may be kept.

        Listing began at `started`. The head has `classes`, and `folders` with their times of
        change; `parts` are those of the fingerprint.
        """
        head["fingerprint"] = fingerprint_of(self.format, self.version, *parts)
        head["left_out"] = _left_out(self._source)
        index["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        settled_ns = int((started - _SETTLED_S) * 1e9)
        return index, self._source.local and all(
            w < settled_ns for w, _ in head["folders"].values()
        )


def index_kind(format_: str, *options: object) -> str:
    """Return the name of an index that depends on options; links are followed or not."""
    text = repr((options, links_followed())).encode("utf-8", "surrogateescape")
    return f"{format_}-{xxhash.xxh3_64_hexdigest(text)}"


def _left_out(source: Source) -> str:
    names = sorted(name for name in source.left_out if name.lower().endswith(_OTHER_PICTURES))
    others = sorted(source.left_out.difference(names))
    words = []
    if names:
        words.append(
            f"leaves out {counted(len(names), 'picture')}, such as {names[0]}: of the suffixes of "
            f"pictures only {', '.join(PICTURES)} are read; convert or rename them"
        )
    if others:
        words.append(
            f"leaves out {counted(len(others), 'file')} next to its pictures, such as {others[0]}"
        )
    return "; ".join(words)


def note_others(source: Source, folder: str, names: Iterable[str]) -> None:
    """Note those of a folder's files that are pictures with other suffixes than `PICTURES`, or
    samples of other kinds."""
    for name in names:
        if name.lower().endswith((*_OTHER_PICTURES, *_OTHER_SAMPLES)):
            source.left_out.add(f"{folder}/{name}" if folder else name)


def files_in(source: Source, folder: str, extensions: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of files with one of some extensions at and below a folder, sorted.

    Raises SourceError.
    """
    stack = [(folder, 0)]
    while stack:
        here, depth = stack.pop()
        if depth > _DEEPEST:
            raise SourceError(f"{source.path(here)} lies too deep: move its files further up")
        below = []
        for name, is_folder in source.names(here):
            inside = f"{here}/{name}" if here else name
            if is_folder:
                below.append((inside, depth + 1))
            elif name.lower().endswith(extensions):
                yield inside
            elif extensions == PICTURES:
                note_others(source, here, [name])
        stack += reversed(below)

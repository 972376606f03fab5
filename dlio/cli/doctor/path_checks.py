"""Tiers and the source: file systems, free space, speed, stripes, time of a request."""

import os
import stat
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np

from dlio.cli.doctor.findings import Finding, FindingTopic
from dlio.data.reader import Reader, open_reader
from dlio.data.source import local_path
from dlio.errors import DlioError, redact
from dlio.storage.file_system_kind import FileSystemKind, file_system_of
from dlio.storage.tier_spec import TierSpec
from dlio.util.folders import open_private, remove_bare, unlink
from dlio.util.memory import new_memory
from dlio.util.mount_points import holding, read_mounts
from dlio.util.shared_folders import user_folder
from dlio.util.trusted_files import closing_descriptor, open_file, temporary_name
from dlio.util.units import counted, format_bytes, format_seconds

_TIERS: Final = FindingTopic("tiers")
_SOURCE: Final = FindingTopic("source")
_PROBE: Final = 64 << 20
"""Bytes that are written and read to measure a tier."""
_PIECE: Final = 4 << 20
_MOST_S: Final = 2.0
_SAMPLES: Final = 16
"""Samples that are read to measure the source's time of a request."""
_LARGE: Final = 1 << 30
"""Files from this size on gain by several stripes."""
_SLOW_S: Final = 0.005
_RESTRIPE: Final = {
    "lustre": "lfs migrate -c -1 -S 4M FILE, or lfs setstripe -c -1 on a folder and copy the files "
    "there",
    "beegfs": "beegfs-ctl --setpattern --numtargets=4 --chunksize=1m on a folder (BeeGFS 8: beegfs "
    "entry set --num-targets=4), and copy the files there",
}


def check_tier(spec: TierSpec, measure: bool = True) -> Iterator[Finding]:
    """Yield whether a tier can be used, its space, its file system and its speed."""
    subject = str(spec)
    if spec.kind == "ram":
        return  # `check_shared_memory` looks at all of them together.
    try:
        status = os.stat(spec.root)
    except OSError as problem:
        yield _TIERS.error(
            subject,
            f"{spec.root}: {problem.strerror}",
            "create the folder on each node, or name another one in --tiers",
        )
        return
    place = file_system_of(spec.root)
    held = f"{place.filesystem} at {place.mount}"
    if not stat.S_ISDIR(status.st_mode):
        yield _TIERS.error(subject, "is not a folder", "name a folder in --tiers")
        return
    try:
        # Made as a run would make it, and removed if nothing is in it.
        folder = open_private(spec.root, user_folder(), marked=1)
    except DlioError as problem:
        said, _, remedy = str(problem).rpartition(": ")
        yield _TIERS.error(subject, f"{said} ({held})", remedy)
        return
    try:
        yield from _usable(spec, place, held, folder if measure else None)
    finally:
        os.close(folder)
        with closing_descriptor(open_private(spec.root)) as root:
            remove_bare(root, user_folder())


def _usable(
    spec: TierSpec, place: FileSystemKind, held: str, folder: int | None
) -> Iterator[Finding]:
    """Yield the state of a tier; measured in its `folder`, unless that is None."""
    subject = str(spec)
    status = os.statvfs(spec.root)
    free = status.f_frsize * status.f_bavail
    text = f"{held}, {format_bytes(free)} free"
    if place.network and place.kind != "beegfs":
        yield _TIERS.warning(
            subject,
            f"{text}: a network's file system",
            "name a disk of the node: such a tier is hardly faster than the source",
        )
    if free < spec.capacity:
        yield _TIERS.warning(
            subject,
            f"{text}, less than its {format_bytes(spec.capacity)}",
            "free space there, or lower its size in --tiers",
        )
        return
    if folder is not None:
        try:
            writes, reads = measure_folder(folder)
        except OSError as problem:
            yield _TIERS.error(
                subject,
                f"{text}: writing failed ({problem.strerror})",
                "check the disk, or name another folder in --tiers",
            )
            return
        text += f", writes {format_bytes(round(writes))}/s, reads {format_bytes(round(reads))}/s"
    if place.network:
        return
    yield _TIERS.ok(subject, text)


def measure_folder(folder: int, count: int = _PROBE) -> tuple[float, float]:
    """Return the bytes per second with which a file in a folder of dlio is written, and read again;
    it is removed then. Raises OSError.

    Past the page cache where the file system allows that (O_DIRECT); otherwise its pages there
    are dropped before it is read.
    """
    descriptor = _open_nameless(folder)
    try:
        piece = new_memory(_PIECE)  # Begins with a page, as O_DIRECT wants it.
        piece[:] = os.urandom(1 << 16) * (_PIECE >> 16)
        began = time.perf_counter()
        written = 0
        while written < count and time.perf_counter() - began < _MOST_S:
            written += os.pwrite(descriptor, piece, written)
        os.fdatasync(descriptor)
        write = written / (time.perf_counter() - began)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        done = 0
        while done < written and time.perf_counter() - began < _MOST_S:
            if not (got := os.preadv(descriptor, [piece], done)):
                break
            done += got
        return write, done / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def _open_nameless(folder: int) -> int:
    name = temporary_name("doctor")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        descriptor = open_file(folder, name, flags | os.O_DIRECT)
    except OSError:
        with suppress(OSError):
            unlink(folder, name)  # Some file systems make the file, and then refuse to open it.
        descriptor = open_file(folder, name, flags)
    unlink(folder, name)
    return descriptor


def check_source(path: str) -> Iterator[Finding]:
    """Yield the size of a data set, its file system, and the time of a request."""
    shown = redact(path)
    try:
        reader = open_reader(path)
    except DlioError as problem:
        yield _SOURCE.error(shown, str(problem), "give a data set that `dlio ls` can show")
        return
    try:
        size = int(reader.sizes.sum())
        yield _SOURCE.ok(shown, f"{counted(len(reader), 'sample')}, {format_bytes(size)}")
        place = file_system_of(path)
        yield from check_place(shown, place, _largest_file(path))
        yield from _requests(shown, reader, place)
    finally:
        close = getattr(reader, "close", None)
        if close is not None:
            close()


def check_place(shown: str, place: FileSystemKind, largest: int) -> Iterator[Finding]:
    """Yield the file system of a source, `shown`, whose largest file has `largest` bytes."""
    mounted = None if place.kind == "remote" else holding(place.mount, read_mounts())
    options = "" if mounted is None else f" ({mounted.options})"
    text = f"{place.filesystem} at {place.mount}{options}"
    text += f", {place.stripes}" if place.stripes else ""
    if place.kind in _RESTRIPE and place.stripe_count == 1 and largest >= _LARGE:
        yield _SOURCE.warning(
            f"stripes of {shown}",
            f"{text}; its largest file has {format_bytes(largest)}",
            f"{_RESTRIPE[place.kind]}: one server serves all ranks now",
        )
        return
    yield _SOURCE.ok(f"file system of {shown}", text)


def _requests(shown: str, reader: Reader, place: FileSystemKind) -> Iterator[Finding]:
    count = min(_SAMPLES, len(reader))
    numbers = [len(reader) * k // count for k in range(count)] if count else []
    seconds: list[float] = []
    for number in numbers:
        began = time.perf_counter()
        try:
            reader.read(np.array([number]))
        except DlioError as problem:
            yield _SOURCE.error(shown, str(problem), f"dlio verify {shown} finds all such samples")
            return
        seconds.append(time.perf_counter() - began)
    if not seconds:
        return
    median = statistics.median(seconds)
    text = f"{format_seconds(median)} a sample, {format_seconds(max(seconds))} at most"
    subject = f"requests to {shown}"
    if median > _SLOW_S and not place.network:
        yield _SOURCE.warning(subject, text, "give the job tiers, or pack the data: dlio pack")
    else:
        yield _SOURCE.ok(subject, text)


def _largest_file(path: str, most: int = 10_000) -> int:
    """Return the bytes of the largest of the first files of a data set."""
    local = local_path(path)
    if local is None:
        return 0
    if os.path.isfile(local):
        return os.stat(local).st_size
    largest = seen = 0
    for folder, _, names in os.walk(local):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.lstat(os.path.join(folder, name)).st_size)
            seen += 1
            if seen >= most:
                return largest
    return largest

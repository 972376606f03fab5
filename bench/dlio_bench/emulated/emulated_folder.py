"""The file system's answers to FUSE: those of the folder below, when the profile says."""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from dlio_bench.emulated.profile import Profile

# When requests are answered: latency, tail, and shares of bandwidth and of rates

_WHOLE: Final = float(2**64)


class Share:
    """A rate, or none, that all requests share, in the order in which they come. Thread-safe."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def until(self, now: float, count: float) -> float:
        """Take `count` units, and return when they are through."""
        if self._rate is None or not count:
            return now
        with self._lock:
            self._free_at = max(self._free_at, now) + count / self._rate
            return self._free_at


class RequestPace:
    """Requests of one kind: answered after the latency, and after their share of the rates."""

    def __init__(self, latency_s: float, *shares: Share) -> None:
        self._latency_s = latency_s
        self._shares = shares

    def wait(self, count: float = 0, times: float = 1.0, own: Share | None = None) -> None:
        """Come back when a request for `count` units is answered.

        In the tail the latency is taken several times. An open file may have a share of its own.
        """
        now = time.monotonic()
        until = now + self._latency_s * times
        for share in self._shares if own is None else (*self._shares, own):
            until = max(until, share.until(now, count))
        time.sleep(max(0.0, until - time.monotonic()))


def _drawn(seed: int, *what: object) -> float:
    """Return a number between 0 and 1 that depends on the seed and on `what`, the same in each run
    with the same requests."""
    text = " ".join(map(str, (seed, *what)))
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape")) / _WHOLE


STATS: Final = ".slowfs-stats"
"""File in the top folder that counts the requests so far."""
_STATS_BYTES: Final = 4096
_HANG_S: Final = 3600.0
_KINDS: Final = (
    *("bytes", "reads", "opens", "attributes", "listings"),
    *("written", "writes", "syncs", "changes"),
)


@dataclass(slots=True)
class _OpenFile:
    number: int
    """Number of the file's opening, from 0: the tail is drawn anew."""
    share: Share | None


class EmulatedFolder:
    """A folder that answers as a profile says. Thread-safe.

    The methods are those of FUSE, but `read` and `write` take the memory of a request.
    """

    use_ns = True

    def __init__(self, root: str, profile: Profile, *, writable: bool = False) -> None:
        self._root = os.path.realpath(root)
        self._profile, self._writable = profile, writable
        metadata = Share(profile.metadata_rate)
        self._read = RequestPace(profile.latency_s, Share(profile.bandwidth))
        self._write = RequestPace(profile.write_latency_s, Share(profile.write_bandwidth))
        self._open = RequestPace(profile.open_latency_s, metadata)
        self._metadata = RequestPace(profile.metadata_latency_s, metadata)
        self._sync = RequestPace(profile.sync_latency_s)
        self._lock = threading.Lock()
        self._asked = dict.fromkeys(_KINDS, 0)
        self._files: dict[int, _OpenFile] = {}
        self._opened: dict[str, int] = {}

    # Reading.

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if path == f"/{STATS}":
            return {"st_mode": 0o100444, "st_nlink": 1, "st_size": _STATS_BYTES}
        # The kernel asks again, of an open file, for its attributes.
        if fh is None:
            self._answer(self._metadata, "attributes", path)
        status = os.lstat(self._path(path))
        keys = ("mode", "nlink", "uid", "gid", "size", "blocks", "ino")
        attributes: dict[str, int] = {f"st_{key}": getattr(status, f"st_{key}") for key in keys}
        for key in ("atime", "mtime", "ctime"):
            attributes[f"st_{key}"] = getattr(status, f"st_{key}_ns")
        return attributes

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        self._answer(self._metadata, "listings", path)
        with os.scandir(self._path(path)) as rows:
            # With their types, as parallel file systems give them.
            return [(row.name, {"st_mode": _type(row)}, 0) for row in rows]

    def readlink(self, path: str) -> str:
        self._answer(self._metadata, "attributes", path)
        return os.readlink(self._path(path))

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._path(path))
        keys = ("bavail", "bfree", "blocks", "bsize", "files", "ffree", "frsize", "namemax")
        return {f"f_{key}": getattr(status, f"f_{key}") for key in keys}

    def open(self, path: str, flags: int) -> int:
        if path == f"/{STATS}":
            return os.open(os.devnull, os.O_RDONLY)
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._check_writable()
        self._answer(self._open, "opens", path)
        # Reads at offsets, and appends where the kernel says.
        kept = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        return self._register(os.open(self._path(path), kept), path)

    def read(self, path: str, memory: memoryview, offset: int, fh: int) -> int:
        """Read into `memory`; return the number of bytes."""
        if path == f"/{STATS}":
            with self._lock:
                text = json.dumps(self._asked).encode().ljust(_STATS_BYTES)
            part = text[offset : offset + len(memory)]
            memory[: len(part)] = part
            return len(part)
        profile, file = self._profile, self._files[fh]
        if profile.error_share or profile.hang_share:
            drawn = _drawn(profile.seed, path, offset)
            if drawn < profile.error_share:
                self._read.wait()
                raise OSError(errno.EIO, "injected")
            if drawn > 1 - profile.hang_share:
                time.sleep(_HANG_S)
        count = os.preadv(fh, [memory], offset)
        self._count("reads")
        self._count("bytes", count)
        self._read.wait(count, self._times("read", path, offset, file.number), file.share)
        return count

    def release(self, path: str, fh: int) -> int:
        self._files.pop(fh, None)
        os.close(fh)
        return 0

    # Writing.

    def create(self, path: str, mode: int, flags: int) -> int:
        self._check_writable()
        self._answer(self._open, "opens", path)
        kept = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_EXCL)
        return self._register(os.open(self._path(path), kept | os.O_CREAT, mode), path)

    def write(self, path: str, memory: memoryview, offset: int, fh: int) -> int:
        """Write `memory`; return the number of bytes."""
        count = os.pwritev(fh, [memory], offset)
        self._count("writes")
        self._count("written", count)
        self._write.wait(count, self._times("write", path, offset, self._files[fh].number))
        return count

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._answer(self._sync, "syncs", path)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return self.fsync(path, datasync, fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._change(path, os.truncate, length)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only whole ranges are reserved")
        self._change(path, lambda _: os.posix_fallocate(fh, offset, size))
        return 0

    def mkdir(self, path: str, mode: int) -> None:
        self._change(path, os.mkdir, mode)

    def unlink(self, path: str) -> None:
        self._change(path, os.unlink)

    def rmdir(self, path: str) -> None:
        self._change(path, os.rmdir)

    def rename(self, old: str, new: str) -> None:
        self._change(old, os.rename, self._path(new))

    def link(self, target: str, source: str) -> None:
        self._change(target, lambda made: os.link(self._path(source), made))

    def symlink(self, target: str, source: str) -> None:
        self._change(target, lambda made: os.symlink(source, made))

    def chmod(self, path: str, mode: int) -> None:
        self._change(path, os.chmod, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._change(path, os.lchown, uid, gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._change(path, os.utime, None, ns=times or (time.time_ns(), time.time_ns()))

    def _check_writable(self) -> None:
        if not self._writable:
            raise OSError(errno.EROFS, "read only")

    def _change(self, path: str, call: Callable[..., object], *arguments: Any, **more: Any) -> None:
        """Answer a change of names or attributes: a call of the path in the folder below."""
        self._check_writable()
        self._answer(self._metadata, "changes", path)
        call(self._path(path), *arguments, **more)

    def _answer(self, pace: RequestPace, kind: str, path: str) -> None:
        """Count a request without bytes, and wait until it is answered."""
        self._count(kind)
        times = 1.0
        if self._profile.tail_share:
            times = self._times(kind, path, self._asked[kind])
        pace.wait(1, times)

    def _times(self, *request: object) -> float:
        """Return the factor of a request's latency."""
        profile = self._profile
        if profile.tail_share and _drawn(profile.seed, *request) < profile.tail_share:
            return profile.tail_times
        return 1.0

    def _register(self, descriptor: int, path: str) -> int:
        each = self._profile.each_bandwidth
        with self._lock:
            number = self._opened.get(path, 0)
            if self._profile.tail_share:
                self._opened[path] = number + 1
            share = None if each is None else Share(each)
            self._files[descriptor] = _OpenFile(number, share)
        return descriptor

    def _path(self, path: str) -> str:
        return self._root + path

    def _count(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self._asked[kind] += count


def _type(row: os.DirEntry[str]) -> int:
    if row.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if row.is_dir() else stat.S_IFREG

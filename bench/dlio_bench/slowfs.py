"""slowfs: a folder, as a slow parallel file system would give it. A FUSE pass-through, read only.

    python -m dlio_bench.slowfs /data /mnt/slow --latency-ms 5 --bandwidth 200MiB

Each read takes the latency, however many are under way at a time; so do opening a file, asking for
its attributes and listing a folder. The bandwidth limits all readers together.
Nothing is cached in the kernel: the second pass is as slow as the first. A seed decides which files
fail with EIO, or hang, and at which reads. `.slowfs-stats` in the top folder counts the requests.

Needs libfuse (Debian: fuse3) and mfusepy (`pip install mfusepy`).
"""

import errno
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final

import xxhash

from dlio.cli.app import run_function
from dlio.errors import UsageError
from dlio.util.options import Option, check
from dlio.util.threads import Workers
from dlio.util.units import parse_bytes

__all__ = ["STATS", "Pace", "SlowFolder", "SlowMount", "main", "slow_mount", "stats", "why_not"]

STATS: Final = ".slowfs-stats"
_START_TIMEOUT_S: Final = 20.0
_END_TIMEOUT_S: Final = 10.0
_HANG_S: Final = 3600.0
_THREADS: Final = 256
_POLL_S: Final = 0.02


class Pace:
    """When a request is answered: after the latency, and after its share of the bandwidth."""

    def __init__(self, latency_s: float, bandwidth: float | None) -> None:
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int = 0) -> None:
        """Come back when a request for `count` bytes is answered."""
        now = time.monotonic()
        until = now + self._latency_s
        if self._bandwidth is not None and count:
            with self._lock:
                self._free_at = max(self._free_at, now) + count / self._bandwidth
                until = max(until, self._free_at)
        time.sleep(max(0.0, until - time.monotonic()))


class SlowFolder:
    """The file system's answers to FUSE."""

    use_ns = True

    def __init__(
        self,
        root: str,
        pace: Pace,
        open_pace: Pace,
        eio_rate: float = 0.0,
        hang_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._root = os.path.realpath(root)
        self._pace, self._open_pace = pace, open_pace
        self._eio_rate, self._hang_rate, self._seed = eio_rate, hang_rate, seed
        self._lock = threading.Lock()
        self._asked = dict.fromkeys(("bytes", "reads", "opens", "attributes", "listings"), 0)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if path == f"/{STATS}":
            return {"st_mode": 0o100444, "st_nlink": 1, "st_size": 4096}
        # The kernel asks again, of an open file, for its attributes.
        if fh is None:
            self._count("attributes")
            self._pace.wait()
        status = os.lstat(self._path(path))
        keys = ("mode", "nlink", "uid", "gid", "size", "blocks", "ino")
        attributes: dict[str, int] = {f"st_{key}": getattr(status, f"st_{key}") for key in keys}
        for key in ("atime", "mtime", "ctime"):
            attributes[f"st_{key}"] = getattr(status, f"st_{key}_ns")
        return attributes

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        self._count("listings")
        self._pace.wait()
        with os.scandir(self._path(path)) as rows:
            # With their types, as parallel file systems give them.
            return [(row.name, {"st_mode": _type(row)}, 0) for row in rows]

    def readlink(self, path: str) -> str:
        self._pace.wait()
        return os.readlink(self._path(path))

    def open(self, path: str, flags: int) -> int:
        if path == f"/{STATS}":
            return os.open("/dev/null", os.O_RDONLY)
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "read only")
        self._count("opens")
        self._open_pace.wait()
        return os.open(self._path(path), os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if path == f"/{STATS}":
            with self._lock:
                return json.dumps(self._asked).encode().ljust(4096)[offset : offset + size]
        drawn = xxhash.xxh3_64_intdigest(f"{self._seed} {path} {offset}".encode()) / 2**64
        if drawn < self._eio_rate:
            self._pace.wait()
            raise OSError(errno.EIO, "injected")
        if drawn > 1 - self._hang_rate:
            time.sleep(_HANG_S)
        data = os.pread(fh, size, offset)
        self._count("reads")
        self._count("bytes", len(data))
        self._pace.wait(len(data))
        return data

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._path(path))
        keys = ("bavail", "bfree", "blocks", "bsize", "files", "ffree", "frsize", "namemax")
        return {f"f_{key}": getattr(status, f"f_{key}") for key in keys}

    def _path(self, path: str) -> str:
        return self._root + path

    def _count(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self._asked[kind] += count


def _type(row: os.DirEntry[str]) -> int:
    if row.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if row.is_dir() else stat.S_IFREG


def why_not() -> str | None:
    """The reason why FUSE is missing here, in words; None if it is there."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened by this user"
    try:
        _fuse()
    except (ImportError, OSError, AttributeError) as error:
        return f"{error}: install fuse3 (Debian: apt install fuse3) and mfusepy"
    return None


@contextmanager
def slow_mount(
    source: str,
    *,
    latency_s: float = 0.0,
    open_latency_s: float | None = None,
    bandwidth: float | None = None,
    eio_rate: float = 0.0,
    hang_rate: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """A folder where `source` lies behind slowfs, for as long as the `with` lasts.

    A process of its own serves it, and ends, unmounting, when this one does, however it does.

    Args:
        latency_s: of a request; `open_latency_s` of opening a file, by default the same.
        bandwidth: bytes a second, of all readers together.
        eio_rate, hang_rate: share of reads that fail, or hang, drawn from `seed`.

    Raises UsageError where FUSE is missing.
    """
    reason = why_not()
    if reason is not None:
        raise UsageError(f"slowfs cannot be mounted: {reason}")
    mountpoint = tempfile.mkdtemp(prefix="slowfs-")
    open_s = latency_s if open_latency_s is None else open_latency_s
    argv = [sys.executable, "-m", "dlio_bench.slowfs", source, mountpoint]
    argv += ["--latency-ms", str(1e3 * latency_s), "--open-latency-ms", str(1e3 * open_s)]
    argv += ["--eio-rate", str(eio_rate), "--hang-rate", str(hang_rate), "--seed", str(seed)]
    if bandwidth is not None:
        argv += ["--bandwidth", f"{int(bandwidth)}B"]
    # When the pipe closes, this process is gone.
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [*argv, "--until-eof"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stderr is not None
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not os.path.ismount(mountpoint):
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    raise UsageError(f"slowfs cannot be mounted: {server.stderr.read().strip()}")
                time.sleep(_POLL_S)
            yield mountpoint
        finally:
            server.stdin.close()
            try:
                server.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _unmount(mountpoint)
                server.kill()
            _unmount(mountpoint)
            with suppress(OSError):
                os.rmdir(mountpoint)


def stats(mountpoint: str) -> dict[str, int]:
    """Requests to a slowfs so far: `bytes`, `reads`, `opens`, `attributes`, `listings`."""
    with open(os.path.join(mountpoint, STATS), encoding="utf-8") as file:
        counts: dict[str, int] = json.loads(file.read(4096))
    return counts


@dataclass(frozen=True, slots=True)
class SlowMount:
    """The options of `python -m dlio_bench.slowfs`."""

    source: Annotated[str, Option("Folder to pass through.", positional=True, metavar="SRC")]
    mountpoint: Annotated[str, Option("Empty folder.", positional=True, metavar="MOUNTPOINT")]
    latency_ms: Annotated[
        float, Option("Latency of each request.", unit="milliseconds", least=0)
    ] = 5.0
    open_latency_ms: Annotated[
        float | None,
        Option(
            "Latency of opening a file.",
            unit="milliseconds",
            least=0,
            default_text="as --latency-ms",
        ),
    ] = None
    bandwidth: Annotated[
        str | None,
        Option("Bandwidth of all readers together, such as 200MiB.", unit="per second"),
    ] = None
    eio_rate: Annotated[float, Option("Share of reads that fail.", least=0, most=1)] = 0.0
    hang_rate: Annotated[float, Option("Share of reads that hang.", least=0, most=1)] = 0.0
    seed: Annotated[int, Option("Seed for the choice of reads that fail or hang.")] = 0
    until_eof: Annotated[bool, Option("Unmount when standard input is closed.", hidden=True)] = (
        False
    )

    def __post_init__(self) -> None:
        check(self)


def main(options: SlowMount) -> None:
    """Mount SRC, read-only, as a slow parallel file system would present it. Ctrl-C unmounts."""
    latency_s, open_s = options.latency_ms / 1e3, options.open_latency_ms
    open_s = latency_s if open_s is None else open_s / 1e3
    rate = None
    if options.bandwidth is not None:
        rate = float(parse_bytes(options.bandwidth.removesuffix("/s")))
    folder = SlowFolder(
        options.source,
        Pace(latency_s, rate),
        Pace(open_s, None),
        options.eio_rate,
        options.hang_rate,
        options.seed,
    )
    mountpoint = options.mountpoint
    if options.until_eof:
        stopped, stop = os.pipe()
        Workers(
            "dlio-slowfs-owner",
            lambda _: _end_with_owner(mountpoint, stopped),
            wake=lambda: os.write(stop, b"x"),
        ).start()
    _fuse().FUSE(
        folder,
        mountpoint,
        foreground=True,
        ro=True,
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        max_threads=_THREADS,
        default_permissions=True,
    )


def _end_with_owner(mountpoint: str, stopped: int) -> None:
    """End this process at the end of its standard input; return when `stopped` is readable."""
    source = sys.stdin.fileno()
    while True:
        ready = select.select([source, stopped], [], [])[0]
        if stopped in ready:
            return
        if not os.read(source, 4096):
            break
    _unmount(mountpoint)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_TIMEOUT_S)
    os._exit(1)


def _unmount(mountpoint: str) -> None:
    tools = [["umount", "-l"], ["fusermount3", "-uz"], ["fusermount", "-uz"]]
    for tool in tools:
        if os.path.ismount(mountpoint) and shutil.which(tool[0]):
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*tool, mountpoint], capture_output=True, timeout=10, check=False)


def _fuse() -> Any:
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    return mfusepy


if __name__ == "__main__":
    run_function("slowfs", main, sys.argv[1:])

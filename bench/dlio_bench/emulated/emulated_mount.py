"""A folder behind emulated storage while a `with` lasts, served by a process of its own."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final

from dlio.comm.comm_protocol import Communicator
from dlio.errors import UsageError
from dlio.util.extras import how_to_install
from dlio.util.options import Option, check
from dlio.util.units import counted
from dlio_bench.emulated.emulated_folder import STATS, EmulatedFolder
from dlio_bench.emulated.profile import Profile, parse_profile

_START_TIMEOUT_S: Final = 20.0
_END_TIMEOUT_S: Final = 10.0
_THREADS: Final = 256
_POLL_S: Final = 0.02
_REMEMBERED_S: Final = 30
"""Seconds for which the kernel remembers names and attributes, as the clients of NFS (acdirmin) and
of parallel file systems do: otherwise each folder of a path would cost a request at each open."""


def why_not() -> str | None:
    """All that FUSE lacks here, in words with the remedies; None if nothing."""
    lacks = []
    if not os.path.exists("/dev/fuse"):
        lacks.append("/dev/fuse (modprobe fuse; of a container: --device /dev/fuse)")
    elif not os.access("/dev/fuse", os.R_OK | os.W_OK):
        lacks.append("permission for this user to open /dev/fuse")
    if find_library("fuse3") is None:
        lacks.append("libfuse 3 (Debian: apt install fuse3)")
    if find_spec("mfusepy") is None:
        lacks.append(f"mfusepy ({how_to_install('bench', 'mfusepy')})")
    if lacks:
        return f"this machine lacks {' and '.join(lacks)}"
    try:
        _fuse()
    except (ImportError, OSError, AttributeError) as error:
        return str(error)
    return None


@contextmanager
def emulated(
    folder: str, profile: str | Profile = "none", *, writable: bool = True
) -> Iterator[str]:
    """The path where `folder` lies behind storage of a profile; `folder` itself for `none`.

    A process of its own serves it, and ends, unmounting, when this one does, however it does.

    Args:
        profile: as `parse_profile` takes it.
        writable: pass writes on to `folder`, or refuse them.

    Raises UsageError where FUSE is missing, and for profiles that cannot be parsed.
    """
    profile = parse_profile(profile) if isinstance(profile, str) else profile
    if profile.emulates:
        with _mounted(folder, profile, writable) as mounted:
            yield mounted
    else:
        yield folder


@contextmanager
def slow_mount(
    source: str,
    *,
    latency_s: float = 0.0,
    bandwidth: float | None = None,
    eio_rate: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """`emulated` of figures, read-only, and mounted also if none of them is slow.

    Opening a file has the latency of other requests. The bandwidth is that of all readers together;
    reads that fail are drawn from the seed.

    Raises UsageError where FUSE is missing.
    """
    profile = Profile(
        latency_s=latency_s,
        metadata_latency_s=latency_s,
        open_latency_s=latency_s,
        bandwidth=bandwidth,
        error_share=eio_rate,
        seed=seed,
    )
    with _mounted(source, profile, False) as mounted:
        yield mounted


def stats(mountpoint: str) -> dict[str, int]:
    """Requests to emulated storage so far.

    `bytes`, `reads`, `opens`, `attributes`, `listings`, `written` (bytes), `writes`, `syncs`,
    `changes` (of names and attributes).
    """
    with open(os.path.join(mountpoint, STATS), encoding="utf-8") as file:
        counts: dict[str, int] = json.loads(file.read(4096))
    return counts


def serve(folder: str, mountpoint: str, profile: Profile, *, writable: bool) -> None:
    """Mount, and answer requests until it is unmounted."""
    answers = {operation: _on_memory(operation) for operation in ("read", "write")}
    kind = type("Served", (_fuse().FUSE,), answers)
    os.umask(0)  # Modes are those that the kernel passes on.
    kind(
        EmulatedFolder(folder, profile, writable=writable),
        mountpoint,
        foreground=True,
        ro=not writable,
        direct_io=True,
        attr_timeout=_REMEMBERED_S,
        entry_timeout=_REMEMBERED_S,
        negative_timeout=0,
        max_threads=_THREADS,
        max_idle_threads=_THREADS,
        default_permissions=True,
    )


def unmount(mountpoint: str) -> None:
    """Unmount, also while files are open."""
    tools = [["umount", "-l"], ["fusermount3", "-uz"], ["fusermount", "-uz"]]
    for tool in tools:
        if os.path.ismount(mountpoint) and shutil.which(tool[0]):
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*tool, mountpoint], capture_output=True, timeout=10, check=False)


@contextmanager
def _mounted(source: str, profile: Profile, writable: bool) -> Iterator[str]:
    reason = why_not()
    if reason is not None:
        raise UsageError(f"storage cannot be emulated: {reason}")
    mountpoint = tempfile.mkdtemp(prefix="slowfs-")
    argv = [sys.executable, "-m", "dlio_bench.slowfs", source, mountpoint]
    argv += ["--owned", *(["--writable"] if writable else [])]
    # When the pipe closes, this process is gone.
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stderr is not None
        try:
            with suppress(BrokenPipeError):
                server.stdin.write(json.dumps(asdict(profile)) + "\n")
                server.stdin.flush()
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
                unmount(mountpoint)
                server.kill()
            unmount(mountpoint)
            with suppress(OSError):
                os.rmdir(mountpoint)


def _on_memory(operation: str) -> Callable[..., int]:
    """Answer a read by filling the request's own memory, and a write out of it."""

    def answer(self: Any, path: bytes, buffer: Any, size: int, offset: int, file: Any) -> int:
        address = ctypes.cast(buffer, ctypes.c_void_p).value
        assert address is not None
        memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        name = path.decode(self.encoding, self.errors)
        count: int = getattr(self.operations, operation)(name, memory, offset, file.contents.fh)
        return count

    return answer


def _fuse() -> Any:
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    return mfusepy


# `--emulate` of the benchmarks


@dataclass(frozen=True, slots=True)
class Emulation:
    """Storage that a benchmark's files are put behind."""

    emulate: Annotated[
        str,
        Option(
            "Storage to emulate with FUSE on this machine: none, lustre-busy, s3, nfs, or parts "
            "joined by +, such as latency(20ms,open=5ms)+bandwidth(150MiB).",
            metavar="PROFILE",
        ),
    ] = "none"

    def __post_init__(self) -> None:
        check(self)
        parse_profile(self.emulate)

    @property
    def profile(self) -> Profile:
        """The parsed profile."""
        return parse_profile(self.emulate)

    @contextmanager
    def mounted(self, path: str, comm: Communicator, *, writable: bool = True) -> Iterator[str]:
        """The path at which all ranks of a machine find a folder behind the storage, which rank 0
        mounts for all of them. Collective."""
        with ExitStack() as stack:
            mounted = ""
            if comm.rank == 0:
                mounted = stack.enter_context(emulated(path, self.profile, writable=writable))
            yield comm.tell(mounted)
            comm.barrier()

    def check_possible(self, nodes: int = 1) -> None:
        """Raise UsageError where this machine cannot emulate storage, or other nodes take part."""
        if not self.profile.emulates:
            return
        if nodes > 1:
            raise UsageError(
                f"--emulate {self.emulate}: storage is emulated for the ranks of one machine, and "
                f"the job has {counted(nodes, 'node')}: start it on one, or leave the option out "
                "to measure "
                "the storage that the nodes share"
            )
        reason = why_not()
        if reason is not None:
            raise UsageError(f"--emulate {self.emulate}: {reason}")

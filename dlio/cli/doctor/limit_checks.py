"""Limits of this process: descriptors, processes, memory, shared memory."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dlio.cli.doctor.findings import Finding, FindingTopic
from dlio.util.machine_memory import meminfo, memory_limit
from dlio.util.shared_folders import SHARED_MEMORY
from dlio.util.units import format_bytes

_TOPIC: Final = FindingTopic("limits")
_DESCRIPTORS: Final = 1024
"""Fewest that a rank should have: each format keeps some dozens of files open."""
_FEWEST: Final = 256
"""Below this many descriptors, loading fails."""
_PROCESSES: Final = 512
_LOCKED: Final = 64 << 20
_SHARED: Final = 64 << 20
"""Bytes of shared memory with which ranks of one node can exchange messages."""


def check_limits(infiniband: bool | None = None) -> Iterator[Finding]:
    """Yield limits of this process; those of locked memory where the machine has InfiniBand, which
    needs it (None: look).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(soft)} (at most {_number(hard)})"
    if _is_below(soft, _DESCRIPTORS):
        say = _TOPIC.error if _is_below(soft, _FEWEST) else _TOPIC.warning
        remedy = f"ulimit -n {_number(hard)} in the job's script"
        if _is_below(hard, _DESCRIPTORS):
            remedy = "ask the administrator to raise nofile in limits.conf, for Slurm also in "
            remedy += "slurmd's unit"
        yield say("open files", text, remedy)
    else:
        yield _TOPIC.ok("open files", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if _is_below(soft, _PROCESSES):
        yield _TOPIC.warning(
            "processes and threads",
            _number(soft),
            f"ulimit -u {_number(hard)} in the job's script: a rank has some dozens of threads",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield _TOPIC.warning(
            "address space",
            format_bytes(soft),
            "ulimit -v unlimited: mapped files count there, which take no memory",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has = Path("/sys/class/infiniband").is_dir() if infiniband is None else infiniband
    if has and _is_below(soft, _LOCKED):
        yield _TOPIC.warning(
            "locked memory",
            format_bytes(soft),
            "ulimit -l unlimited: InfiniBand falls back to slower messages, or fails",
        )


def check_memory() -> Iterator[Finding]:
    """Yield the memory of this machine and of the job."""
    total, limit = meminfo("MemTotal"), memory_limit()
    if limit is None or limit >= total:
        yield _TOPIC.ok("memory", f"{format_bytes(meminfo('MemAvailable'))} available")
        return
    yield _TOPIC.ok(
        "memory",
        f"{format_bytes(limit)} for this job (its control group), of {format_bytes(total)}",
    )


def check_shared_memory(wanted: int, ranks: int, path: str = SHARED_MEMORY) -> Iterator[Finding]:
    """Yield the space in shared memory at `path`, of which this node's tiers in RAM may take
    `wanted` bytes.
    """
    try:
        status = os.statvfs(path)
    except OSError as problem:
        yield _TOPIC.error(
            path,
            f"cannot be used ({problem.strerror})",
            f"mount a tmpfs there: mount -t tmpfs tmpfs {path}",
        )
        return
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    text = f"{format_bytes(free)} free of {format_bytes(size)}"
    grow = f"docker run --shm-size=16g, or as root mount -o remount,size=50% {path}"
    if not os.access(path, os.W_OK | os.X_OK):
        yield _TOPIC.error(path, f"{text}, not writable", f"as root: chmod 1777 {path}")
    elif free < _SHARED * max(1, ranks):
        yield _TOPIC.error(path, text, f"{grow}; or remove files of dead jobs there")
    elif free < wanted:
        yield _TOPIC.warning(
            path,
            f"{text}; the tiers in RAM may take {format_bytes(wanted)}",
            f"lower ram: in --tiers; or {grow}",
        )
    else:
        yield _TOPIC.ok(path, text)


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit}"

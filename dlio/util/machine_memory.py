"""Memory that this process may use: of the machine, of its control groups, of its own limits."""

import re
import resource
from itertools import chain
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60


def usable_memory() -> int:
    """Return the bytes that this process may have in all: of the machine, or of a lower limit."""
    limit = memory_limit()
    most = meminfo("MemTotal") or _UNLIMITED
    most = most if limit is None else min(most, limit)
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            most = min(most, max(0, soft - _kilobytes("/proc/self/status", used)))
    return most


def memory_limit(root: Path = _CGROUPS) -> int | None:
    """Return the bytes that this process's control groups allow it; None for no limit.

    Of version 2 and of version 1, which have the least of all groups above.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [_limit(folder / name) for folder in control_groups("memory", root) for name in names]
    return min(chain(*limits), default=None)


def control_groups(controller: str, root: Path = _CGROUPS) -> list[Path]:
    """Return the folders of this process's control groups that may limit something, such as `cpu`,
    and of all above them.
    """
    try:
        text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return []
    folders = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree, without names of controllers.
        folder = root / controller if controllers else root
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [folder.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _limit(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() and int(text) < _UNLIMITED else []


def meminfo(name: str) -> int:
    """Return a row of the kernel's table in bytes, such as `MemAvailable`; 0 if it is not there."""
    return _kilobytes("/proc/meminfo", name)


def _kilobytes(path: str, name: str) -> int:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return 0
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return 0 if match is None else 1024 * int(match[1])

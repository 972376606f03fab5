"""The mounted file systems of this process, from /proc/self/mountinfo."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# fmt: off
_LOCAL: Final = frozenset((
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs",
    "ramfs", "overlay",
))
# fmt: on
"""File systems, as the kernel names them, whose files no other node can change."""


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A mounted file system."""

    mountpoint: str
    type: str
    """As the kernel names it, such as `ext4`, `nfs4`, `fuse.sshfs`."""
    source: str
    """Device or server."""
    device: str
    """Number of its device, `major:minor`; of no block device where major is 0."""
    options: str
    """Options of the mount and of the file system, separated by commas, as in the file."""


def read_mounts() -> list[MountPoint]:
    """Return the mounts in their order. Raises OSError."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        return parse_mounts(table.read())


def parse_mounts(text: str) -> list[MountPoint]:
    """Parse the text of mountinfo."""
    rows = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 6 and len(tail) >= 2:
            options = ",".join([fields[5], *tail[2:3]])
            rows.append(
                MountPoint(unescaped(fields[4]), tail[0], unescaped(tail[1]), fields[2], options)
            )
    return rows


def holding(path: str, mounts: Iterable[MountPoint]) -> MountPoint | None:
    """Return the mount that holds an absolute path without links; None if there is none.

    The last of several mounts on a folder hides the others.
    """
    best: MountPoint | None = None
    for each in mounts:
        inside = path == each.mountpoint or path.startswith(each.mountpoint.rstrip("/") + "/")
        if inside and (best is None or len(each.mountpoint) >= len(best.mountpoint)):
            best = each
    return best


def is_local(path: str) -> bool:
    """True if an absolute path without links is on a file system that is known to be this node's
    own."""
    try:
        held = holding(path, read_mounts())
    except OSError:
        return False
    return held is not None and held.type in _LOCAL


def unescaped(text: str) -> str:
    """Decode the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

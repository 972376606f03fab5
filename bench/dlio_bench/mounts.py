"""The file system that a path lies on, from /proc/self/mountinfo."""

import os
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["FileSystem", "file_system_of"]

_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_REMOTE: Final = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs"),
    *("orangefs", "pvfs2", "afs", "glusterfs", "panfs", "wekafs", "daos"),
)
_MOUNTS: Final = "/proc/self/mountinfo"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system."""

    mountpoint: str
    type: str
    """As mountinfo has it, such as `ext4`, `nfs4`, `fuse.sshfs`."""
    source: str
    """Device or server."""
    device: str
    """Number of its device, `major:minor`; of no block device where major is 0."""
    options: str = ""
    upper: str = ""
    """Folder that an overlay writes to."""

    @property
    def in_memory(self) -> bool:
        """True if its files are memory, without storage below."""
        return self.type in _MEMORY

    @property
    def remote(self) -> bool:
        """True if servers, or the host of a virtual machine, hold the data."""
        return self.type in _REMOTE

    @property
    def fuse(self) -> bool:
        """True if a process serves it."""
        return self.type.split(".")[0] in ("fuse", "fuseblk")


def file_system_of(path: str, mounts: str | None = None) -> FileSystem:
    """Return the file system that holds an existing path.

    Args:
        mounts: text of mountinfo; None to read this process's.
    """
    if mounts is None:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            mounts = file.read()
    real = os.path.realpath(path)
    best = FileSystem("/", "unknown", "", "0:0")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        columns, kind = left.split(), right.split()
        if len(columns) < 6 or len(kind) < 2:
            continue
        mountpoint = _unescaped(columns[4])
        inside = real == mountpoint or real.startswith(mountpoint.rstrip("/") + "/")
        # The last of several mounts on a folder hides the others.
        if inside and len(mountpoint) >= len(best.mountpoint):
            options = ",".join([columns[5], *kind[2:3]])
            upper = re.search(r"(?:^|,)upperdir=([^,]*)", options)
            best = FileSystem(
                mountpoint=mountpoint,
                type=kind[0],
                source=_unescaped(kind[1]),
                device=columns[2],
                options=options,
                upper=_unescaped(upper[1]) if upper else "",
            )
    return best


def _unescaped(text: str) -> str:
    """Decode the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

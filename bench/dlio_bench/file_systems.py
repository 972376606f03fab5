"""The file system that a path lies on, from /proc/self/mountinfo."""

import os
import re
from dataclasses import asdict, dataclass
from typing import Final

from dlio.errors import UsageError
from dlio.util.mount_points import MountPoint, holding, parse_mounts, read_mounts, unescaped
from dlio.util.whole_files import check_folder as check_writable_folder

_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_REMOTE: Final = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs"),
    *("orangefs", "pvfs2", "afs", "glusterfs", "panfs", "wekafs", "daos"),
)


@dataclass(frozen=True, slots=True)
class FileSystem(MountPoint):
    """A mounted file system, and the caches of its kind."""

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
    """Return the file system that holds an existing path, by a text of mountinfo or this
    process's own."""
    rows = read_mounts() if mounts is None else parse_mounts(mounts)
    held = holding(os.path.realpath(path), rows)
    if held is None:
        return FileSystem("/", "unknown", "", "0:0")
    upper = re.search(r"(?:^|,)upperdir=([^,]*)", held.options)
    return FileSystem(**asdict(held), upper=unescaped(upper[1]) if upper else "")


def check_folder(path: str) -> None:
    """Raise UsageError unless a path is a folder whose storage can be measured."""
    if not os.path.isdir(path):
        raise UsageError(f"{path} is not a folder: name one on the storage to measure")


def check_scratch(path: str) -> None:
    """Raise UsageError unless a path is a folder in which files to be measured can be made."""
    check_folder(path)
    check_writable_folder(path)

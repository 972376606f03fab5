"""The file system that a path is on, and the number of requests in flight that suits it."""

import os
import re
from dataclasses import dataclass
from typing import Final

from dlio.data.source import is_remote
from dlio.storage.stripes import Stripes, find_stripes
from dlio.util.mount_points import MountPoint, holding, read_mounts

NETWORK: Final = ("lustre", "beegfs", "nfs", "gpfs", "cifs", "fuse", "ceph", "remote")
"""Kinds of places that are reached over a network."""
_KINDS: Final = (
    ("beegfs", "beegfs"),
    ("beeond", "beegfs"),
    ("lustre", "lustre"),
    ("nfs", "nfs"),
    ("gpfs", "gpfs"),
    ("cifs", "cifs"),
    ("smb", "cifs"),
    ("ceph", "ceph"),
    ("tmpfs", "memory"),
    ("ramfs", "memory"),
    ("fuse", "fuse"),
)
_CANDIDATES: Final = (
    "SLURM_TMPDIR",
    "LOCAL_SCRATCH",
    "JOBFS",
    "PBS_JOBFS",
    "BEEOND_DIR",
    "TMPDIR",
)
_USUAL: Final = ("/mnt/beeond", "/beeond", "/local/scratch", "/localscratch", "/scratch/local")
_UNKNOWN: Final = MountPoint("/", "unknown", "", "0:0", "")
_FEW, _SOME, _MANY = 4, 32, 64


@dataclass(frozen=True, slots=True)
class FileSystemKind:
    """A folder and the file system that it is on."""

    path: str
    kind: str
    """One of NETWORK, `memory`, `pmem` (mounted with dax), or `disk`."""
    filesystem: str
    """The kernel's name for it: ext4, lustre, ...; `beeond` for a BeeGFS On Demand."""
    mount: str
    stripe_count: int = 1
    stripe_bytes: int = 0
    """See `Stripes`."""

    @property
    def network(self) -> bool:
        """True if requests go over a network."""
        return self.kind in NETWORK

    @property
    def stripes(self) -> str:
        """A phrase about the stripes of a file, in the file system's own words; may be empty."""
        return Stripes(self.stripe_count, self.stripe_bytes).describe(self.kind)

    def requests(self, objects: bool) -> int:
        """Return the number of requests in flight that suits the place.

        Args:
            objects: each request is for a small file, so that latency counts and not bandwidth.
        """
        if not self.network:
            return _FEW
        return _MANY if objects else max(_SOME, min(_MANY, 4 * self.stripe_count))


def file_system_of(path: str) -> FileSystemKind:
    """Return the place of `path`, or of the first folder above it that exists."""
    if is_remote(path):
        return FileSystemKind(path, "remote", path.split("://")[0], path)
    real = os.path.realpath(os.path.expanduser(path))
    held = holding(real, _mounts()) or _UNKNOWN
    filesystem, options = held.type, held.options
    kind = next((name for word, name in _KINDS if word in filesystem.lower()), "disk")
    if kind == "disk" and re.search(r"\bdax(=always)?\b", options) and "dax=never" not in options:
        kind = "pmem"
    if kind == "beegfs" and re.search("beeond|ondemand", f"{held.source} {held.mountpoint}"):
        filesystem = "beeond"
    stripes = find_stripes(kind, real, options)
    return FileSystemKind(path, kind, filesystem, held.mountpoint, stripes.count, stripes.bytes)


def scratch_folders() -> dict[str, FileSystemKind]:
    """Return the node-local scratch folders that exist, by the name of a variable or by path."""
    places = {}
    for name in _CANDIDATES:
        folder = os.environ.get(name)
        if folder and os.path.isdir(folder):
            places[f"${name}"] = file_system_of(folder)
    for folder in _USUAL:
        if os.path.isdir(folder):
            places[folder] = file_system_of(folder)
    for mount in _mounts():
        place = file_system_of(mount.mountpoint)
        if place.kind == "pmem":
            places[mount.mountpoint] = place
    return places


def _mounts() -> list[MountPoint]:
    """List the mounts; none where the system does not show them."""
    try:
        return read_mounts()
    except OSError:
        return []

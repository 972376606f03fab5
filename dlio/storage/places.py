"""The file system that a path is on, and the number of requests in flight that suits it."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from dlio.data.source import is_remote
from dlio.util.mounts import Mounted, holding, read_mounts

__all__ = ["NETWORK", "Place", "find_place", "parse_stripes", "scratch_places"]

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
_LFS_TIMEOUT_S: Final = 10.0
_CANDIDATES: Final = (
    "SLURM_TMPDIR",
    "LOCAL_SCRATCH",
    "JOBFS",
    "PBS_JOBFS",
    "BEEOND_DIR",
    "TMPDIR",
)
_USUAL: Final = ("/mnt/beeond", "/beeond", "/local/scratch", "/localscratch", "/scratch/local")
_UNKNOWN: Final = Mounted("/", "unknown", "", "0:0", "")
_FEW, _SOME, _MANY = 4, 32, 64


@dataclass(frozen=True, slots=True)
class Place:
    """A folder and the file system that it is on."""

    path: str
    kind: str
    """One of NETWORK, `memory`, `pmem` (mounted with dax), or `disk`."""
    filesystem: str
    """The kernel's name for it: ext4, lustre, ..."""
    mount: str
    stripe_count: int = 1
    stripe_bytes: int = 0
    """Stripe size of a Lustre file or folder, 0 where it is unknown."""

    @property
    def network(self) -> bool:
        """True if requests go over a network."""
        return self.kind in NETWORK

    def requests(self, objects: bool) -> int:
        """Return the number of requests in flight that suits the place.

        Args:
            objects: each request is for a small file, so that latency counts and not bandwidth.
        """
        if not self.network:
            return _FEW
        return _MANY if objects else max(_SOME, min(_MANY, 4 * self.stripe_count))


def find_place(path: str) -> Place:
    """Return the place of `path`, or of the first folder above it that exists."""
    if is_remote(path):
        return Place(path, "remote", path.split("://")[0], path)
    real = os.path.realpath(os.path.expanduser(path))
    held = holding(real, _mounts()) or _UNKNOWN
    filesystem, options = held.type, held.options
    kind = next((name for word, name in _KINDS if word in filesystem.lower()), "disk")
    if kind == "disk" and re.search(r"\bdax(=always)?\b", options) and "dax=never" not in options:
        kind = "pmem"
    stripes = _stripes(real) if kind == "lustre" else (1, 0)
    return Place(path, kind, filesystem, held.mountpoint, *stripes)


def scratch_places() -> dict[str, Place]:
    """Return the node-local scratch folders that exist, by the name of a variable or by path."""
    places = {}
    for name in _CANDIDATES:
        folder = os.environ.get(name)
        if folder and os.path.isdir(folder):
            places[f"${name}"] = find_place(folder)
    for folder in _USUAL:
        if os.path.isdir(folder):
            places[folder] = find_place(folder)
    for mount in _mounts():
        place = find_place(mount.mountpoint)
        if place.kind == "pmem":
            places[mount.mountpoint] = place
    return places


def _mounts() -> list[Mounted]:
    """List the mounts; none where the system does not show them."""
    try:
        return read_mounts()
    except OSError:
        return []


def _stripes(path: str) -> tuple[int, int]:
    """Return (stripe count, stripe bytes) of a Lustre path; (1, 0) where `lfs` gives none."""
    lfs = shutil.which("lfs")
    if lfs is None:
        return 1, 0
    try:
        done = subprocess.run(
            [lfs, "getstripe", "-d" if os.path.isdir(path) else "-q", "-c", "-S", path],
            capture_output=True,
            text=True,
            timeout=_LFS_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1, 0
    return parse_stripes(done.stdout)


def parse_stripes(text: str) -> tuple[int, int]:
    """Parse the output of `lfs getstripe -c -S`, labelled or bare numbers.

    Returns (stripe count, stripe bytes).
    """
    count = re.search(r"stripe_count:?\s+(-?\d+)", text)
    size = re.search(r"stripe_size:?\s+(\d+)", text)
    if count is None or size is None:
        bare = re.findall(r"-?\d+", text)
        if len(bare) < 2:
            return 1, 0
        return max(1, int(bare[0])), max(0, int(bare[1]))
    return max(1, int(count[1])), int(size[1])

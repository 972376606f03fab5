"""What a path lies on: Lustre, BeeGFS, NFS, a local disk, memory; and what follows from it."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from dlio.data.source import is_remote

NETWORK: Final = ("lustre", "beegfs", "nfs", "gpfs", "cifs", "fuse", "ceph", "remote")
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
_FEW, _SOME, _MANY = 4, 32, 64


@dataclass(frozen=True, slots=True)
class Place:
    """A folder and the file system that it lies on."""

    path: str
    kind: str
    """One of NETWORK, `memory`, `pmem` (mounted with dax), or `disk`."""
    filesystem: str
    """As the kernel calls it: ext4, lustre, ..."""
    mount: str
    stripe_count: int = 1
    stripe_bytes: int = 0
    """Of a Lustre file or folder; 0 where that is not told."""

    @property
    def network(self) -> bool:
        return self.kind in NETWORK

    def requests(self, objects: bool) -> int:
        """How many requests in flight suit it.

        Args:
            objects: each for a small file of its own, where latency counts and not bandwidth.
        """
        if not self.network:
            return _FEW
        return _MANY if objects else max(_SOME, min(_MANY, 4 * self.stripe_count))


def find_place(path: str) -> Place:
    """What `path`, or the first folder above it that is there, lies on."""
    if is_remote(path):
        return Place(path, "remote", path.split("://")[0], path)
    real = os.path.realpath(os.path.expanduser(path))
    best = ("/", "unknown", "", "")
    for mount, kind, source, options in _mounts():
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind, source, options)
    mount, filesystem, source, options = best
    kind = next((name for word, name in _KINDS if word in filesystem.lower()), "disk")
    if kind == "disk" and re.search(r"\bdax(=always)?\b", options) and "dax=never" not in options:
        kind = "pmem"
    stripes = _stripes(real) if kind == "lustre" else (1, 0)
    return Place(path, kind, filesystem, mount, *stripes)


def scratch_places() -> dict[str, Place]:
    """Node-local scratch that is there to be used, by what names it: a variable, or its path."""
    found = {}
    for name in _CANDIDATES:
        folder = os.environ.get(name)
        if folder and os.path.isdir(folder):
            found[f"${name}"] = find_place(folder)
    for folder in _USUAL:
        if os.path.isdir(folder):
            found[folder] = find_place(folder)
    for mount, _, _, _ in _mounts():
        place = find_place(mount)
        if place.kind == "pmem":
            found[mount] = place
    return found


def _mounts() -> list[tuple[str, str, str, str]]:
    """(mount point, file system, source, options) of each mount."""
    rows = []
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            for line in table:
                left, _, right = line.partition(" - ")
                fields, tail = left.split(), right.split()
                if len(fields) < 6 or len(tail) < 3:
                    continue
                mount = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])
                rows.append((mount, tail[0], tail[1], f"{fields[5]},{tail[2]}"))
    except OSError:
        return []
    return rows


def _stripes(path: str) -> tuple[int, int]:
    """(stripe count, stripe bytes) of a Lustre path; (1, 0) where `lfs` does not tell."""
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
    """Read what `lfs getstripe -c -S` prints: labelled, or bare numbers."""
    count = re.search(r"stripe_count:?\s+(-?\d+)", text)
    size = re.search(r"stripe_size:?\s+(\d+)", text)
    if count is None or size is None:
        bare = re.findall(r"-?\d+", text)
        if len(bare) < 2:
            return 1, 0
        return max(1, int(bare[0])), max(0, int(bare[1]))
    return max(1, int(count[1])), int(size[1])

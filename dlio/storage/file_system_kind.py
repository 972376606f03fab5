"""The file system that a path is on, and the number of requests in flight that suits it."""

import os
import re
import shutil
from dataclasses import dataclass
from typing import Final

from dlio.data.source import local_path
from dlio.util.child_processes import printed_by
from dlio.util.mount_points import MountPoint, holding, read_mounts
from dlio.util.units import counted, format_bytes

# Stripes
_TIMEOUT_S: Final = 10.0
_GPFS_DISKS: Final = 16
"""Disks that a GPFS is taken to have: its blocks are on all of them, and nobody but root may ask
how many there are."""
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WORDS: Final = {
    "lustre": ("stripe", ""),
    "beegfs": ("storage target", ", chunks"),
    "gpfs": ("all disks", ", blocks"),
    "nfs": ("connection", ", requests"),
}


@dataclass(frozen=True, slots=True)
class Stripes:
    """The servers, disks or connections that a file's requests go to."""

    count: int = 1
    bytes: int = 0
    """Of a stripe, chunk or block; of the largest request over NFS. 0 where it is unknown."""

    def describe(self, kind: str) -> str:
        """Return a phrase such as `4 stripes of 1 MiB`, in the file system's own words."""
        if kind not in _WORDS:
            return ""
        noun, parts = _WORDS[kind]
        size = f"{parts} of {format_bytes(self.bytes)}" if self.bytes else ""
        return f"{noun if kind == 'gpfs' else counted(self.count, noun)}{size}"


def find_stripes(kind: str, path: str, options: str) -> Stripes:
    """Return the stripes of a file, or those that new files of a folder get. `path` is absolute,
    without links, and need not exist; `options` are those of the mount."""
    if kind == "lustre":
        # A folder is asked for its own default layout, not for that of its first entry.
        folder = "-d" if os.path.isdir(path) else "-q"
        return parse_lustre(_output("lfs", "getstripe", folder, "-c", "-S", path))
    if kind == "beegfs":
        text = _output("beegfs-ctl", "--getentryinfo", path)
        return parse_beegfs(text or _output("beegfs", "entry", "info", path, "--retro"))
    if kind == "gpfs":
        try:
            return Stripes(_GPFS_DISKS, os.stat(path).st_blksize)
        except OSError:
            return Stripes(_GPFS_DISKS)
    return parse_nfs(options) if kind == "nfs" else Stripes()


def parse_lustre(text: str) -> Stripes:
    """Parse the output of `lfs getstripe -c -S`, labelled or bare numbers.

    A count of -1, all servers, is 1 until the file is written.
    """
    count = re.search(r"stripe_count:?\s+(-?\d+)", text)
    size = re.search(r"stripe_size:?\s+(\d+)", text)
    if count is None or size is None:
        bare = re.findall(r"-?\d+", text)
        if len(bare) < 2:
            return Stripes()
        return Stripes(max(1, int(bare[0])), max(0, int(bare[1])))
    return Stripes(max(1, int(count[1])), int(size[1]))


def parse_beegfs(text: str) -> Stripes:
    """Parse the output of `beegfs-ctl --getentryinfo` or `beegfs entry info --retro`."""
    size = re.search(r"Chunksize:\s*(\d+)\s*([KMG]?)", text, re.IGNORECASE)
    # A folder has a desired number only; a file the actual one, too.
    counts = re.findall(r"(?:desired|actual):\s*(\d+)", text)
    targets = max(1, int(counts[-1])) if counts else 1
    return Stripes(targets, int(size[1]) * _UNITS[size[2].upper()] if size else 0)


def parse_nfs(options: str) -> Stripes:
    """Parse the options of an NFS mount, separated by commas."""
    given = dict(option.partition("=")[::2] for option in options.split(","))
    count, size = (given.get(name, "") for name in ("nconnect", "rsize"))
    return Stripes(
        max(1, int(count)) if count.isdecimal() else 1, int(size) if size.isdecimal() else 0
    )


def _output(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    return printed_by([program, *command[1:]], _TIMEOUT_S)[0]


# File systems
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
        """Return the number of requests in flight that suits the place. With `objects` each request
        is for a small file, so that latency counts and not bandwidth."""
        if not self.network:
            return _FEW
        return _MANY if objects else max(_SOME, min(_MANY, 4 * self.stripe_count))


def file_system_of(path: str) -> FileSystemKind:
    """Return the place of `path`, or of the first folder above it that exists. `path` may name
    fields (`a.h5::x`), and be a URL."""
    local = local_path(path)
    if local is None:
        return FileSystemKind(path, "remote", path.split("://")[0], path)
    real = os.path.realpath(local)
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

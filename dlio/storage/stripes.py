"""How a parallel file system spreads a file over its servers.

| file system | from | count | bytes |
|---|---|---|---|
| Lustre | `lfs getstripe` | stripes | of a stripe |
| BeeGFS 7 | `beegfs-ctl --getentryinfo` | storage targets | of a chunk |
| BeeGFS 8, BeeOND | `beegfs entry info` | storage targets | of a chunk |
| GPFS | `stat` | all of its disks | of a block |
| NFS | the mount's options | connections (`nconnect`) | of the largest request (`rsize`) |
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from dlio.util.units import format_bytes

_TIMEOUT_S: Final = 10.0
_GPFS_DISKS: Final = 16
"""Disks that a GPFS is taken to have: its blocks are on all of them, and nobody but root may ask
how many there are."""
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WORDS: Final = {
    "lustre": "stripe(s)",
    "beegfs": "storage target(s), chunks",
    "gpfs": "all disks, blocks",
    "nfs": "connection(s), requests",
}


@dataclass(frozen=True, slots=True)
class Stripes:
    """The servers, disks or connections that a file's requests go to."""

    count: int = 1
    bytes: int = 0
    """Of a stripe, chunk or block; of the largest request over NFS. 0 where it is unknown."""

    def describe(self, kind: str) -> str:
        """Return a phrase such as `4 stripe(s) of 1 MiB`, in the file system's own words."""
        if kind not in _WORDS:
            return ""
        count = "" if kind == "gpfs" else f"{self.count} "
        size = f" of {format_bytes(self.bytes)}" if self.bytes else ""
        return f"{count}{_WORDS[kind]}{size}"


def find_stripes(kind: str, path: str, options: str) -> Stripes:
    """Return the stripes of a file, or those that new files of a folder get.

    Args:
        kind: of file system, see `places.Place`.
        path: absolute, without links; need not exist.
        options: of the mount.
    """
    if kind == "lustre":
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
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout

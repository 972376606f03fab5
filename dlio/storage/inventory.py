"""The data sets in a node's disk tiers, the jobs that use them, and their eviction.

    <root>/dlio-<uid>/lock                          locked while this list is changed
    <root>/dlio-<uid>/.dlio                         marks it, and each data set's folder, as dlio's
    <root>/dlio-<uid>/<data set>/about.json         the data set's source and format
                                 lease.<job>.<pid>  locked as long as that process lives
                                 pinned             exists if the data set must not be evicted
                                 hits               number of samples read from here
                                 <node>/            blocks, see `tier`

A lease is a lock, which the kernel releases with its process: the lease of a dead job expires by
itself, and its file shows which job used the data last. Eviction renames the folder and then
removes it; the next eviction removes the remains of one that was killed.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from dlio.data.index import open_cache
from dlio.errors import TierError
from dlio.launch.node.lock_keeper import keep
from dlio.util.folders import (
    file_sizes,
    is_marked,
    open_below,
    open_private,
    remove_entry,
    remove_marked,
    rename,
)
from dlio.util.owned_descriptors import OwnedDescriptors
from dlio.util.shared_folders import user_folder
from dlio.util.trusted_files import UntrustedFile, closing_descriptor, open_file, read_small
from dlio.util.user_folders import open_folder
from dlio.util.whole_files import not_written, take_lock, write_whole_at

_NAME: Final = re.compile(r"tier-[0-9a-f]{16}\.json")
_MOST: Final = 1000


def remember_root(root: str) -> None:
    """Note the folder of a disk tier. Nothing happens if the cache cannot be written."""
    name = f"tier-{xxhash.xxh3_64_hexdigest(os.fsencode(root))}.json"
    text = json.dumps({"root": root}).encode()
    with contextlib.suppress(OSError), open_cache() as cache:
        if name not in os.listdir(cache):
            write_whole_at(cache, name, lambda file: file.write(text))


def known_roots() -> list[str]:
    """Return the folders that were noted, sorted; those that are gone too."""
    roots = []
    # A list of our own: looking for folders on all file systems would wait for network mounts.
    with contextlib.suppress(OSError), open_cache() as cache:
        names = [name for name in os.listdir(cache) if _NAME.fullmatch(name)]
        for name in sorted(names)[:_MOST]:
            root = _read_json(cache, name).get("root")
            if isinstance(root, str) and os.path.isabs(root):
                roots.append(root)
    return sorted(roots)


_JOB_VARIABLES: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID")
_LEASE: Final = "lease."
_EVICTED: Final = ".evicted."
_PINNED: Final = "pinned"
_MAX_FILE: Final = 1 << 16
_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class DatasetLease:
    """One process's use of a data set: a running one, or the last of a job that is over."""

    job: str
    """The batch system's job id, or `-`."""
    pid: int
    host: str
    alive: bool
    since: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """A data set in a disk tier."""

    root: str
    fingerprint: str
    source: str
    """Path that it was staged from; empty when unknown."""
    bytes: int
    blocks: int
    nodes: tuple[str, ...]
    created: float
    used: float
    """Time of the last change of a lease; seconds since 1970."""
    hits: int
    """Samples that were read from here."""
    pinned: bool
    leases: tuple[DatasetLease, ...]

    @property
    def in_use(self) -> bool:
        """True if a live process has a lease."""
        return any(lease.alive for lease in self.leases)

    @property
    def path(self) -> str:
        """The data set's folder."""
        return os.path.join(self.root, user_folder(), self.fingerprint)


class DatasetUse:
    """This process's lease on a data set in a disk tier. Owner: the mount, which closes it."""

    def __init__(self, root: str, fingerprint: str, about: Mapping[str, object]) -> None:
        """Raises TierError if the tier's folder cannot be used."""
        self._owned = OwnedDescriptors(self)
        self._name = f"{_LEASE}{job_id()}.{os.getpid()}.{secrets.token_hex(4)}"
        with _locked(root, fcntl.LOCK_SH):
            folder = open_private(root, user_folder(), fingerprint, marked=2)
            self._folder = self._owned.take(folder)
            try:
                lock = open_file(self._folder, self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                self._lock = self._owned.take(lock)
            except OSError as error:
                self._owned.close()
                raise TierError(not_written(root, error)) from error
            # A lock, not a process id: it ends with its process, however that ends, and ids are
            # used again.
            with contextlib.suppress(OSError):  # A file system without locks.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                keep(self._lock)
        holder = {"host": socket.gethostname(), "since": time.time()}
        try:
            os.write(self._lock, json.dumps(holder).encode())
            if "about.json" not in os.listdir(self._folder):
                text = json.dumps(about).encode()
                write_whole_at(self._folder, "about.json", lambda file: file.write(text))
            self._forget_the_dead()
        except OSError as error:
            self.close()
            raise TierError(not_written(root, error)) from error

    def add_hits(self, count: int) -> None:
        """Add to the count of samples read from here; without effect where it cannot be written."""
        if count and self._folder >= 0:
            flags = os.O_RDWR | os.O_CREAT
            with (
                contextlib.suppress(OSError),
                closing_descriptor(open_file(self._folder, "hits", flags)) as file,
            ):
                fcntl.flock(file, fcntl.LOCK_EX)
                before = _number(os.pread(file, 64, 0))
                os.pwrite(file, f"{before + count:<20d}\n".encode(), 0)

    def close(self) -> None:
        """Give the lease back. Its file stays, with the time."""
        if self._folder < 0:
            return
        with contextlib.suppress(OSError):
            # The time of the last use decides which data set is evicted first.
            os.utime(self._lock)
        self._owned.close()
        self._folder = -1

    def _forget_the_dead(self) -> None:
        """Remove all but one lease file of each finished job; `evict --job` needs that one."""
        newest: dict[str, tuple[float, str]] = {}
        for name in os.listdir(self._folder):
            # The files of finished jobs would add up, and each is looked at by `dlio status`.
            if not name.startswith(_LEASE) or _is_held(self._folder, name):
                continue
            with contextlib.suppress(FileNotFoundError):  # Another process removed it.
                this = (os.stat(name, dir_fd=self._folder).st_mtime, name)
                job = name.split(".")[1]
                older, newest[job] = sorted([newest.get(job, (0.0, "")), this])
                if older[1]:
                    remove_entry(self._folder, older[1])


def job_id() -> str:
    """Return the batch system's id of this job, `-` outside of a job."""
    name = next((os.environ[each] for each in _JOB_VARIABLES if os.environ.get(each)), "-")
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name)[:64] or "-"


def stored_data(root: str) -> list[StoredDataset]:
    """List the data sets in this user's disk tier below `root`, the least recently used first.

    Folders that this user's dlio has not made are left out.
    """
    entries: list[StoredDataset] = []
    with contextlib.suppress(OSError), _opened(root) as base:
        for name in sorted(os.listdir(base)):
            if not name.startswith("."):
                with contextlib.suppress(OSError):  # Evicted meanwhile, or not dlio's.
                    entries.append(_look(root, base, name))
    return sorted(entries, key=lambda each: each.used)


@contextlib.contextmanager
def _opened(root: str) -> Iterator[int]:
    """Open this user's folder below `root`, if dlio has made it. Raises OSError."""
    with (
        closing_descriptor(open_folder(root, to_list=False)) as above,
        closing_descriptor(open_below(above, user_folder())) as base,
    ):
        if not is_marked(base):
            raise UntrustedFile(f"{user_folder()} was not made by dlio")
        yield base


def holds_data(root: str) -> bool:
    """True if this user's dlio has a disk tier below `root`."""
    try:
        with _opened(root):
            return True
    except OSError:
        return False


def evict(root: str, fingerprint: str, *, pinned: bool = False) -> int:
    """Remove a data set from a disk tier and return the bytes of its blocks. With `pinned` it is
    removed even if it is pinned.

    Raises TierError when it is in use, pinned, or not in the tier.
    """
    with _locked(root, fcntl.LOCK_EX) as base:
        for name in os.listdir(base):
            if name.startswith(_EVICTED):  # The remains of an eviction that was killed.
                remove_marked(base, name)
        entry = next((e for e in stored_data(root) if e.fingerprint == fingerprint), None)
        if entry is None:
            raise TierError(f"{root} holds no data set {fingerprint}: `dlio status` lists them")
        if entry.in_use:
            users = ", ".join(f"job {e.job} (pid {e.pid})" for e in entry.leases if e.alive)
            raise TierError(f"{entry.source or fingerprint} in {root} is in use by {users}")
        if entry.pinned and not pinned:
            raise TierError(
                f"{entry.source or fingerprint} in {root} is pinned: `dlio pin --remove` unpins it"
            )
        # Renamed first: a job that begins now finds no data set, rather than one that is vanishing.
        gone = f"{_EVICTED}{secrets.token_hex(4)}"
        rename(fingerprint, gone, base, base)
        remove_marked(base, gone)
    return entry.bytes


def make_room(
    root: str, wanted: int, capacity: int, keep: str, *, dry: bool = False
) -> list[StoredDataset]:
    """Evict data sets until `wanted` bytes fit into `capacity`, together with those that stay.

    The least recently used go first; those in use or pinned stay. Returns the evicted ones. `keep`
    is the fingerprint of the data set that the room is for. With `dry` none is evicted.
    """
    evicted: list[StoredDataset] = []
    others = [entry for entry in stored_data(root) if entry.fingerprint != keep]
    left = capacity - sum(entry.bytes for entry in others)
    for entry in others:
        if left >= wanted:
            break
        if not entry.in_use and not entry.pinned:
            with contextlib.suppress(TierError):  # A job began to use it meanwhile.
                left += entry.bytes if dry else evict(root, entry.fingerprint)
                evicted.append(entry)
    return evicted


def set_pinned(root: str, fingerprint: str, pinned: bool) -> None:
    """Protect a data set from eviction, or end that. Raises TierError if it is not in the tier."""
    with _locked(root, fcntl.LOCK_SH) as base:
        try:
            folder = open_below(base, fingerprint)
        except OSError as error:
            raise TierError(f"{root} holds no data set {fingerprint}") from error
        with closing_descriptor(folder):
            if pinned:
                os.close(open_file(folder, _PINNED, os.O_WRONLY | os.O_CREAT))
            else:
                remove_entry(folder, _PINNED)


def _look(root: str, base: int, name: str) -> StoredDataset:
    """Describe a data set. Raises OSError, UntrustedFile if it is not this user's dlio's."""
    with closing_descriptor(open_below(base, name)) as folder:
        if not is_marked(folder):
            raise UntrustedFile(f"{name} was not made by dlio")
        about = _read_json(folder, "about.json")
        count = size = 0
        nodes, leases = [], []
        created = used = os.fstat(folder).st_mtime
        for each in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if each.startswith(_LEASE):
                    lease = _lease(folder, each)
                    used = max(used, _status(folder, each).st_mtime)
                    leases.append(lease)
                elif stat.S_ISDIR(_status(folder, each).st_mode):
                    blocks, occupied = _blocks(folder, each)
                    nodes.append(each)
                    count, size = count + blocks, size + occupied
        hits, pinned = 0, False
        with contextlib.suppress(OSError):
            hits = _number(read_small(folder, "hits", 64))
        with contextlib.suppress(FileNotFoundError):
            pinned = bool(_status(folder, _PINNED))
        with contextlib.suppress(TypeError, ValueError):
            created = float(about.get("created", created))
    return StoredDataset(
        root=root,
        fingerprint=name,
        source=str(about.get("source", "")),
        bytes=size,
        blocks=count,
        nodes=tuple(sorted(nodes)),
        created=created,
        used=used,
        hits=hits,
        pinned=pinned,
        leases=tuple(sorted(leases, key=lambda lease: lease.since)),
    )


def _status(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _blocks(folder: int, node: str) -> tuple[int, int]:
    with closing_descriptor(open_below(folder, node)) as inside:
        sizes = file_sizes(inside, ".blk")
    return len(sizes), sum(sizes)


def _lease(folder: int, name: str) -> DatasetLease:
    holder = _read_json(folder, name)
    _, job, pid, _ = name.split(".")
    return DatasetLease(
        job=job,
        pid=int(pid),
        host=str(holder.get("host", "")),
        alive=_is_held(folder, name),
        since=_seconds(holder.get("since")),
    )


def _is_held(folder: int, name: str) -> bool:
    """True if a live process holds the lock of a lease."""
    try:
        with closing_descriptor(open_file(folder, name, os.O_RDONLY)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def _locked(root: str, how: int) -> Iterator[int]:
    """Open this user's folder below `root` and lock its list; yields the folder's descriptor."""
    base = open_private(root, user_folder(), marked=1)
    try:
        lock = open_file(base, "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        os.close(base)
        raise TierError(not_written(root, error)) from error
    try:
        try:
            ours = take_lock(lock, how, _WAIT_S)
        except OSError:
            ours = True  # A file system without locks.
        if not ours:
            raise TierError(
                f"{root}/{user_folder()}/lock was locked for {_WAIT_S:.0f} s: another dlio process "
                "hangs with it; end that process"
            )
        yield base
    finally:
        os.close(lock)
        os.close(base)


def _read_json(folder: int, name: str) -> dict[str, Any]:
    try:
        value = json.loads(read_small(folder, name, _MAX_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _seconds(value: object) -> float:
    """Return a time from JSON, 0 if it is none."""
    usable = type(value) in (int, float) and abs(float(str(value))) < 1e11
    return float(str(value)) if usable else 0.0


def _number(data: bytes) -> int:
    text = data.decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else 0

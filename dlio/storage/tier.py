"""A tier: an append-only store of blocks in one folder, shared by the ranks of a node.

    <root>/dlio-<uid>/<data set>/<node>/          a disk tier; stays for the next job
    /dev/shm/dlio-<uid>/<data set>.<node>/        a RAM tier; gone with the last job that uses it
        00000042.blk    a published block, always complete
        claims          byte b is locked by the process that is filling block b
        00000042.part   samples of a block that is not complete, see `dlio.storage.partial_blocks`

A block appears under its name only when it is complete. It is written under a temporary name:
space is reserved (touching full shared memory kills the process), the bytes are written and
synchronised on disk, and the file is renamed. A killed process leaves a temporary file, which the
next process that opens the tier removes: the locks on claims belong to the kernel and end with
their process. Every payload that is read from a tier is compared with its checksum.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.open_files import Descriptor
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, TierError, TierFull
from dlio.launch.node.lock_keeper import keep
from dlio.storage.block import (
    NO_ROOM,
    BlockInfo,
    PayloadScratch,
    check_block,
    own_scratch,
    read_exactly,
    read_info,
    write_all,
)
from dlio.storage.block_tables import BlockTables
from dlio.storage.counters import tier_remedy
from dlio.storage.tier_spec import TierSpec
from dlio.util.closable import Closable
from dlio.util.folders import open_below, open_private, remove_entry, unlink
from dlio.util.forks import new_lock
from dlio.util.limits import open_regular
from dlio.util.memory import new_memory
from dlio.util.owned_descriptors import OwnedDescriptors
from dlio.util.settings import settings
from dlio.util.shared_folders import SharedFolder, user_folder
from dlio.util.trusted_files import closing_descriptor, open_file, publish_file
from dlio.util.units import format_bytes


def lock_byte(descriptor: int, at: int, kind: int = fcntl.F_WRLCK, count: int = 1) -> bool:
    """Lock or unlock a byte of an open file, or `count` of them from there on.

    False, and nothing is locked, when another process holds the lock of one.
    """
    # Locks of the open file (OFD), not of the process: the latter end as soon as any descriptor of
    # the file is closed, such as that of another tier object for the same folder.
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, at, count, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


_BLOCK: Final = re.compile(r"([0-9]{8,12})\.blk")
_TEMPORARY: Final = re.compile(r"tmp\.([0-9]{8,12})\..*")
_SETTLED_NS: Final = 1_000_000_000
_TABLE_BYTES: Final = 64 << 20
"""Bytes of block tables that a tier keeps in memory, 24 per sample. Files, in contrast, are opened
for each read: that takes 5 µs, and a tier may have more blocks than a process may open files."""


class Tier(Closable):
    """One tier of a node, opened by one process. Thread-safe. Owner: the hierarchy.

    `dlio.testing.TierTests` checks the promises of its methods.

    `names` are private folders below `dlio-<uid>` in the root, see above; blocks of other data sets
    than that of `fingerprint` are refused.

    Raises TierError when the folder cannot be used.
    """

    def __init__(self, spec: TierSpec, *names: str, fingerprint: str | None = None) -> None:
        self.spec = spec
        self.kind = spec.kind
        self._fingerprint = fingerprint
        names = (user_folder(), *names)
        self.path = os.path.join(spec.root, *names)
        self._lock = new_lock()
        self._tables = BlockTables(_TABLE_BYTES)
        self._suspects: set[int] = set()
        """Blocks each of whose payloads is checked, whatever the share."""
        self.hits = 0
        """Samples that this process has read from here."""
        self._share = settings().checked_share
        self._claimed: set[int] = set()
        self._owned = OwnedDescriptors(self)
        self._claims_of = os.getpid()
        """The process whose claims the open file holds."""
        self._listed: tuple[int, Set[int]] = (-1, set())
        """The time of the last change of a folder in memory, and the blocks since then."""
        self._shared: SharedFolder | None = None
        if self.kind == "ram":
            self._shared = SharedFolder(names[-1])
            self.path = self._shared.path
            self.folder = os.dup(self._shared.descriptor)
            """Descriptor of the tier's folder; -1 once it is closed."""
        else:
            self.folder = open_private(spec.root, *names, marked=2)
        self.holder: Descriptor | None = Descriptor(self.folder)
        """Keeps the folder's descriptor open; whoever reads there without the tier refers to it."""
        self.writable = True
        """False for a tier on a read-only file system, whose blocks can be read."""
        self._claims = -1
        try:
            claims = open_file(self.folder, "claims", os.O_RDWR | os.O_CREAT)
            self._claims = self._owned.take(claims)
            self._remove_leftovers()
        except OSError as error:
            if error.errno == errno.EROFS:
                self.writable = False
                return
            self.close()
            raise TierError(
                f"tier {self.path} cannot be written ({error.strerror}): check the disk, or name "
                "another folder in --tiers"
            ) from error

    def keep(self) -> None:
        """Let the node's agent, if there is one, keep a RAM tier until the job ends."""
        if self._shared is not None:
            keep(self._shared.alive)

    def free_bytes(self) -> int:
        """Return the bytes that are free on the tier's file system."""
        status = os.fstatvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def blocks(self) -> Set[int]:
        """Return the numbers of the blocks that are published now."""
        if self._shared is None:
            return _blocks_in(self.folder)
        # Each pass asks, and to read a folder of memory takes 3 µs a block. Its time moves in steps
        # of some milliseconds: what is listed soon after a change may lack another one.
        now, changed = time.time_ns(), os.fstat(self.folder).st_mtime_ns
        if changed != self._listed[0]:
            listed = _blocks_in(self.folder)
            if now < changed + _SETTLED_NS:
                return listed
            self._listed = changed, listed
        return self._listed[1]

    def has(self, block: int) -> bool:
        """True if a block is published."""
        try:
            os.stat(_name(block), dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        """Return the payload at `place` of a published block, checked. It is read into `scratch`,
        or into memory of its own.

        Raises FileNotFoundError when the block is not in the tier, CorruptBlock when its bytes
        differ from those that were written.
        """
        with self._opened(block) as (descriptor, info, checked):
            return info.read(descriptor, place, scratch, checked=checked)

    def read_into(self, block: int, place: int, pieces: Sequence[memoryview]) -> None:
        """Read the payload at `place` of a published block into `pieces`, one after another.

        It is checked. Raises as `read` does; the contents of the pieces are undefined then. The
        pieces are together as long as the payload.
        """
        with self._opened(block) as (descriptor, info, checked):
            info.read_into(descriptor, place, pieces, checked=checked)

    def read_stored(self, block: int, place: int, into: memoryview) -> tuple[int, int]:
        """Read the payload at `place` of a published block as it is stored, compressed or not.

        Compressed payloads are checked by whoever decompresses them. `into` has the raw payload's
        size; the bytes are put at its beginning.

        Returns (bytes stored, xxh3_64 of the raw payload). Raises as `read` does.
        """
        with self._opened(block) as (descriptor, info, checked):
            return info.read_stored(descriptor, place, into, checked=checked)

    def locate(
        self, blocks: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.void], npt.NDArray[np.bool_]]:
        """Return where samples of published blocks lie, for reads from their files.

        Tables that are not in memory are read first. Returns (mask of the samples that are here,
        entries of their blocks' tables, mask of the reads that are to be checked), all of shape
        (n,). Those that are here count as read. Of a block that is missing or damaged no sample is
        here; the entry means nothing then.
        """

        def read(block: int) -> None:
            with closing_descriptor(self._open(block)) as descriptor:
                self._read_table(block, descriptor)

        here, entries = self._tables.find(blocks, places, read)
        count = int(np.count_nonzero(here))
        with self._lock:
            before = self.hits
            self.hits += count
        checked = here.copy()
        if self._share < 1:
            # As for single reads, see `_opened`.
            shares = (np.arange(before, before + count + 1) * self._share).astype(np.int64)
            checked[here] = shares[1:] != shares[:-1]
        if self._suspects:
            checked |= np.isin(blocks, list(self._suspects))
        return here, entries, checked

    def suspect(self, block: int) -> None:
        """Check all further reads of a block, until it is discarded, and read its table again."""
        self._suspects.add(block)
        self._tables.drop(block)

    @contextmanager
    def _opened(self, block: int) -> Iterator[tuple[int, BlockInfo, bool]]:
        """Yield (descriptor, header and table, True if this read is to be checked)."""
        in_memory = self._shared is not None
        # Keeping descriptors open was tried: with random reads of 512 blocks every second one
        # opened its file anyway. Keeping the tables, and opening for each read, is twice as fast.
        descriptor = _open_held(_name(block), self.folder) if in_memory else self._open(block)
        try:
            with self._lock:
                self.hits += 1
                # Evenly spread, not random: with a share of a half, each second read.
                checked = int(self.hits * self._share) != int((self.hits - 1) * self._share)
            checked = checked or block in self._suspects
            info = self._tables.get(block)
            if info is None:
                info = self._read_table(block, descriptor)
            yield descriptor, info, checked
        finally:
            (_close_held if in_memory else os.close)(descriptor)

    def check(self, block: int) -> BlockInfo:
        """Read and check all of a published block. Raises CorruptBlock, FileNotFoundError."""
        with closing_descriptor(self._open(block)) as descriptor:
            info = self._info(block, descriptor)
            # One by one: several threads check blocks, which may be large, at a time.
            for place in range(len(info)):
                info.read(descriptor, place, own_scratch.raw)
        return info

    def digest(self, block: int) -> int:
        """Return the xxh3_64 of a published block's header and table, from its header."""
        info = self._tables.get(block)
        if info is None:
            with closing_descriptor(self._open(block)) as descriptor:
                info = self._info(block, descriptor)
        return info.digest

    def read_whole(self, block: int) -> memoryview:
        """Return a published block, checked. Raises CorruptBlock, FileNotFoundError."""
        with closing_descriptor(self._open(block)) as descriptor:
            # Read, not mapped: mapped pages count as the process's own, and a file that is cut off
            # meanwhile kills by SIGBUS.
            memory = new_memory(os.fstat(descriptor).st_size)
            read_exactly(descriptor, memory, 0, self.path)
        self._check_own(block, check_block(memory, os.path.join(self.path, _name(block)), 0))
        return memory

    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        """Write a block; it appears complete or not at all.

        Raises TierFull when the disk or shared memory has no room, TierError when it cannot be
        written for another reason. No file is left behind then.
        """
        size = sum(len(piece) for piece in pieces)
        # A name that nobody can guess, and that says which claim protects it.
        temporary = f"tmp.{block:08d}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with closing_descriptor(open_file(self.folder, temporary, flags)) as descriptor:
                # Touching shared memory that is full kills the process by SIGBUS; reserving it is
                # an error.
                _reserve(descriptor, size)
                write_all(descriptor, pieces)
                if self.kind != "ram":
                    os.fsync(descriptor)
            publish_file(self.folder, temporary, _name(block))
        except BaseException as error:
            remove_entry(self.folder, temporary)
            if isinstance(error, OSError):
                raise self._unwritten(error, block, size) from error
            raise

    def adopt(self, block: int, name: str, descriptor: int) -> None:
        """Publish a file of the tier's folder, which holds a complete block. The file loses its
        `name`.

        Raises TierFull or TierError as `publish` does; the file stays then.
        """
        try:
            if self.kind != "ram":
                os.fsync(descriptor)
            publish_file(self.folder, name, _name(block))
        except OSError as error:
            raise self._unwritten(error, block, os.fstat(descriptor).st_size) from error

    def _unwritten(self, error: OSError, block: int, size: int) -> TierError:
        """Return the error for a block of `size` bytes that could not be written."""
        if error.errno in NO_ROOM:
            return TierFull(
                f"tier {self.path} has no room for block {block} "
                f"({format_bytes(size)}; {error.strerror}): {tier_remedy(error.errno)}"
            )
        return TierError(
            f"tier {self.path} cannot be written ({error.strerror}): check the disk, or name "
            "another folder in --tiers"
        )

    def discard(self, block: int) -> None:
        """Remove a block, for example a damaged one, so that it can be filled again.

        Raises OSError if it cannot be removed.
        """
        self._tables.drop(block)
        self._suspects.discard(block)
        with suppress(FileNotFoundError):
            unlink(self.folder, _name(block))

    def claim(self, block: int) -> bool:
        """Become the one process that fills `block`; False while another one is.

        Raises OSError if the file system cannot lock.
        """
        with self._lock:
            self._own_claims()
            # The lock is of the open file, so it does not hold between threads: they need the set.
            if block in self._claimed or not lock_byte(self._claims, block):
                return False
            self._claimed.add(block)
            return True

    def _own_claims(self) -> None:
        """Open the file of claims once more in a forked child: its locks are its parent's."""
        # A forked child shares the open file, and with it the locks: claims of its parent would be
        # its own.
        if self._claims_of == os.getpid() or self._claims < 0:
            return
        inherited = self._claims
        self._claims = self._owned.take(open_file(self.folder, "claims", os.O_RDWR))
        self._owned.close(inherited)
        self._claims_of = os.getpid()
        self._claimed.clear()

    def release(self, block: int) -> None:
        """Let other processes claim `block`."""
        with self._lock:
            self._claimed.discard(block)
            with suppress(OSError):  # The lock ends with the descriptor at last.
                lock_byte(self._claims, block, fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the tier's files. The last process that closes a RAM tier removes it."""
        with self._lock:
            if self.folder < 0:
                return
            if self._claims >= 0:
                with suppress(OSError):
                    self._owned.close(self._claims)
            # A thread that was held up by a hung source must not use another file's descriptor.
            self._claims = self.folder = -1
            self.holder = None
        if self._shared is not None:
            self._shared.close()

    def _open(self, block: int) -> int:
        return open_regular(_name(block), os.O_NOFOLLOW, dir_fd=self.folder)

    def _info(self, block: int, descriptor: int) -> BlockInfo:
        """Read a block's header and table, without keeping them as reads of samples do."""
        path = os.path.join(self.path, _name(block))
        info = read_info(descriptor, path)
        self._check_own(block, info)
        return info

    def _check_own(self, block: int, info: BlockInfo) -> None:
        """Raise CorruptBlock for a block of another number, or of another data set."""
        if info.block != block or self._fingerprint not in (None, info.fingerprint):
            raise CorruptBlock(
                f"{info.path} holds block {info.block} of data set {info.fingerprint}: remove it"
            )

    def _read_table(self, block: int, descriptor: int) -> BlockInfo:
        return self._tables.add(block, self._info(block, descriptor))

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of dead writers, whose claims are free."""
        for name in os.listdir(self.folder):
            match = _TEMPORARY.fullmatch(name)
            if match is None:
                continue
            block = int(match[1])
            if self.claim(block):
                remove_entry(self.folder, name)
                self.release(block)


def _blocks_in(folder: int) -> set[int]:
    names = os.listdir(folder)
    return {int(match[1]) for name in names if (match := _BLOCK.fullmatch(name)) is not None}


def _name(block: int) -> str:
    return f"{block:08d}.blk"


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


class TierView(Tier):
    """A disk tier that is looked at, for a plan: nothing is made, locked or removed, or read.

    Raises TierError if the tier's root cannot be opened, or its folder is not this user's dlio's.
    """

    def __init__(self, spec: TierSpec, *names: str) -> None:
        self._be(spec, os.path.join(spec.root, user_folder(), *names))
        self.writable = True
        folder = open_private(spec.root)
        status = os.fstatvfs(folder)
        self._free = status.f_bavail * status.f_frsize
        try:
            for name in (user_folder(), *names):
                with closing_descriptor(folder):
                    folder = open_below(folder, name)
            with closing_descriptor(folder):
                self._blocks |= _blocks_in(folder)
        except FileNotFoundError:
            pass  # No job has made it.
        except OSError as error:
            raise TierError(f"tier {self.path} cannot be used: {error}") from error

    def _be(self, spec: TierSpec, path: str) -> None:
        self.spec, self.kind, self.path = spec, spec.kind, path
        self.writable = False
        self.folder, self.holder = -1, None
        self.hits = self._free = 0
        self._blocks: set[int] = set()

    # Nothing is taken; there is nothing to close.

    def keep(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self._free

    def blocks(self) -> Set[int]:
        return set(self._blocks)

    def has(self, block: int) -> bool:
        return block in self._blocks

    def discard(self, block: int) -> None:
        pass

    def release(self, block: int) -> None:
        pass

    def claim(self, block: int) -> bool:
        return False

    def close(self) -> None:
        pass


class LostTier(TierView):
    """A tier that could not be opened: it holds nothing, and takes nothing."""

    def __init__(self, spec: TierSpec, path: str) -> None:
        self._be(spec, path)


# The tiers of a node


class TierTargets:
    """A node's tiers, and which of them each block belongs in.

    A block is *pinned* to one tier for the whole job, or it is *streamed*: it is in the last tier
    for as long as a pass uses its samples, or it belongs in no tier. Owns the tiers.

    Thread-safe: the mask of streamed blocks only ever grows.

    `tiers` are fastest first; `pinned` has the number of the tier that keeps each block for the
    whole job, -1 for blocks that this node does not keep; shape (blocks,).
    """

    def __init__(self, tiers: Sequence[Tier], pinned: npt.NDArray[np.int8]) -> None:
        self.tiers, self.pinned = list(tiers), pinned
        self._streamed: npt.NDArray[np.bool_] | None = None
        self._ranks = self._ranked()
        """Position of each tier in `by_speed`, then that of none; shape (tiers + 1,)."""
        self._is_over: Callable[[int], bool] = lambda _: False
        self.are_closed = False

    @property
    def can_stream(self) -> bool:
        """True if there is a tier for streamed blocks."""
        return self._streamed is not None

    def add_stream_tier(self, tier: Tier) -> None:
        """Append the tier that streamed blocks go through."""
        self.tiers.append(tier)
        self._streamed = np.zeros(len(self.pinned), np.bool_)
        self._ranks = self._ranked()

    def stream(self, blocks: npt.NDArray[np.bool_], is_over: Callable[[int], bool]) -> None:
        """Stream these blocks too, except for those that are pinned. `blocks` is a mask; `is_over`
        is true for a block that every rank of the node is done with, so that it is not read again.
        """
        assert self._streamed is not None
        self._streamed |= blocks & (self.pinned < 0)
        self._is_over = is_over

    def number(self, block: int) -> int:
        """Return the number of the tier that a block belongs in, -1 for none."""
        number = int(self.pinned[block])
        if number < 0 and self._streamed is not None and self._streamed[block]:
            return len(self.tiers) - 1
        return number

    def numbers(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `number` of each of some blocks."""
        numbers = self.pinned[blocks].astype(np.int64)
        if self._streamed is not None:
            numbers[(numbers < 0) & self._streamed[blocks]] = len(self.tiers) - 1
        return numbers

    def are_near(
        self, seen: npt.NDArray[np.int64], homes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the blocks that are in the tier that they belong in, or in a faster one.
        Arguments are numbers of tiers: in which each was seen, and in which it belongs; -1 for
        none."""
        return (seen >= 0) & (self._ranks[seen] <= self._ranks[homes])

    def is_pinned(self, block: int) -> bool:
        """True for a block that a tier keeps, False for one that is streamed or in no tier."""
        return bool(self.pinned[block] >= 0)

    def is_over(self, block: int) -> bool:
        """True for a streamed block that is not needed any more in this pass."""
        return not self.is_pinned(block) and self._is_over(block)

    @property
    def by_speed(self) -> list[int]:
        """Numbers of the tiers, fastest first: streamed blocks are in memory."""
        # Streamed blocks come last in the list, so that the numbers of the others stay, but they
        # are in memory.
        numbers = list(range(len(self.tiers)))
        return [numbers[-1], *numbers[:-1]] if self.can_stream else numbers

    def _ranked(self) -> npt.NDArray[np.int64]:
        return np.append(np.argsort(self.by_speed), len(self.tiers))

    def streamed_blocks(self) -> Set[int]:
        """Return the streamed blocks that are in their tier now."""
        return self.tiers[-1].blocks() if self.can_stream else set()

    def close(self) -> None:
        """Close the tiers."""
        self.are_closed = True
        for tier in self.tiers:
            tier.close()


# Calls that keep the interpreter's lock
#
# Opening a file in shared memory takes two microseconds and never waits. With many threads, taking
# the lock again after it takes ten times as long: all others that wait for the lock come first.

_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_LIBC: Final = ctypes.PyDLL(None, use_errno=True)
_LIBC.openat.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int
_LIBC.close.argtypes = (ctypes.c_int,)


def _open_held(name: str, folder: int) -> int:
    """Open a file for reading, in a folder of shared memory that nobody else can write to.

    Close it with `_close_held`. Raises OSError.
    """
    descriptor: int
    while (descriptor := _LIBC.openat(folder, os.fsencode(name), _OPEN_FLAGS)) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), name)
    return descriptor


def _close_held(descriptor: int) -> None:
    _LIBC.close(descriptor)

"""Blocks that are not complete yet, in a tier's folder, which a node's processes fill together.

    00000042.part   block 42 with those of its samples that have been read
    samples         byte s is locked by the process that is reading sample s from the source;
                    byte 2^40 + b by the one that adds samples to block b

A part is laid out as its block is going to be (FORMAT.md): room for a header and a table, then the
payloads, each in its place. With its last sample it becomes the block: it gets its header and its
name, and no payload is copied. Until then its header counts the samples, and a sample is there if
its entry in the table is not zero. Where sizes are estimates, places are not known: payloads follow
one another as they come, and the block is rewritten from them.

Payloads are written first, then the header, then the entries, under the block's lock. Of a process
that is killed in between remain bytes that no entry refers to, or a header that counts samples
which are not there: whoever completes the block notices that, and they are added again. All others
of the node use the samples that one process has read, and so do later jobs where the tier is a
disk.
"""

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader_contract import Reader, abilities_of
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, TierError
from dlio.storage.block import (
    ALIGN,
    ENTRY,
    HEADER,
    MAGIC,
    MAGIC_PART,
    MAX_SAMPLE_BYTES,
    VERSION,
    aligned,
    complete_head,
    read_exactly,
    table_offset,
    write_all,
)
from dlio.storage.tier import Tier, lock_byte
from dlio.util.folders import unlink
from dlio.util.forks import new_lock
from dlio.util.memory import new_memory
from dlio.util.trusted_files import closing_descriptor, open_file

_BLOCKS_AT: Final = 1 << 40
_STRIPES: Final = 64
_POLL_S: Final = 0.001
_LOCK_TIMEOUT_S: Final = 10.0
_PLANS: Final = 1 << 12
"""Blocks whose layout is kept in memory."""
_SIZES: Final = ("stored", "raw")
_Table = npt.NDArray[np.void]


class PartialBlocks:
    """Samples of a tier's incomplete blocks. Thread-safe. Owner: the fetcher, which closes it. The
    tier is writable, and not owned."""

    def __init__(self, tier: Tier, reader: Reader) -> None:
        self.tier = tier
        self._layout, self._schema, self._sizes = reader.layout, reader.schema, reader.sizes
        self._hex = reader.fingerprint
        self._is_exact = not abilities_of(reader).sizes_are_estimates
        # A plan has 16 bytes a sample: for a data set of millions they would add up.
        self._plan = lru_cache(_PLANS)(self._find_plan)
        """Returns where the samples of a block go; None if their sizes are not known."""
        self._schema_bytes = len(reader.schema.to_json().encode())
        self._table_at = table_offset(self._schema_bytes)
        self._folder = os.dup(tier.folder)
        self._locks = open_file(self._folder, "samples", os.O_RDWR | os.O_CREAT)
        self._lock = new_lock()
        self._stripes = [new_lock() for _ in range(_STRIPES)]

    def claim(self, samples: Sequence[int]) -> list[int]:
        """Become the one process that reads these samples from the source.

        Returns those that no other process is reading. One thread of a process at a time may claim
        a sample.
        """
        first, count = samples[0], len(samples)
        # One system call for a run: after each one a thread waits for the interpreter's lock,
        # behind as many others as read.
        follow = count > 1 and list(samples) == list(range(first, first + count))
        if follow and lock_byte(self._locks, first, count=count):
            return list(samples)
        return [sample for sample in samples if lock_byte(self._locks, sample)]

    def release(self, samples: Sequence[int]) -> None:
        """Let other processes read the samples."""
        with suppress(OSError):  # The locks end with the descriptor at last.
            for first, last in _runs(samples):
                lock_byte(self._locks, first, fcntl.F_UNLCK, last - first)

    def places(self, block: int, among: Collection[int] | None = None) -> set[int]:
        """Return the places of a block whose samples are here. `among` are the places that matter;
        None for all."""
        if among is None:
            first, last = 0, self._count(block)
        else:
            first, last = min(among), max(among) + 1
        with self._reading(block) as descriptor:
            table = None if descriptor is None else self._entries(descriptor, block, first, last)
        if table is None:
            return set()
        here = set((np.flatnonzero(table["offset"]) + first).tolist())
        return here if among is None else here.intersection(among)

    def read(self, block: int, place: int) -> memoryview | None:
        """Return the payload of a sample that is here, checked; None if it is not, or damaged."""
        with self._reading(block) as descriptor:
            if descriptor is None:
                return None
            table = self._entries(descriptor, block, place, place + 1)
            if table is None or not table[0]["offset"]:
                return None
            payload = _payload(descriptor, table[0])
        if payload is None:
            self._forget(block, place)
        return payload

    def add(self, block: int, samples: Mapping[int, Buffer]) -> bool:
        """Keep samples until their block is complete; True if it may be complete now. `samples` has
        payloads by place in the block.

        Raises OSError when the tier has no room or cannot be written, SourceError for a sample
        that has another size than the source said.
        """
        for place, payload in samples.items():
            if len(payload) > MAX_SAMPLE_BYTES:
                raise ValueError(f"sample {place} of block {block} has {len(payload)} bytes")
        with self._locked(block):
            descriptor = open_file(self._folder, _name(block), os.O_RDWR | os.O_CREAT)
            with closing_descriptor(descriptor):
                return self._append(descriptor, block, samples)

    def publish(self, block: int, put: Callable[[Sequence[Buffer]], None]) -> bool:
        """Make a block of its samples and publish it; False if they are not all here.

        The caller has claimed the block in the tier. `put` publishes a block of payloads, where it
        has to be rewritten.

        Raises OSError.
        """
        with self._locked(block), self._reading(block, os.O_RDWR) as descriptor:
            if descriptor is None:
                return False
            table = self._entries(descriptor, block, 0, self._count(block))
            if table is None or not table["offset"].all():
                return False
            plan = self._plan(block)
            # A part of an earlier job may have outlived a loss of power, which not all of its bytes
            # did. Shared memory does not outlive that.
            is_trusted = self.tier.kind == "ram" and plan is not None
            payloads = [] if is_trusted else [_payload(descriptor, each) for each in table]
            sound = [payload for payload in payloads if payload is not None]
            if len(sound) < len(payloads) or not (plan is None or plan.is_of(table)):
                self._remove(block)
                return False
            if plan is None:
                put(sound)
                self._remove(block)
                return True
            # The block becomes whole where it is. As records of their own, copied into a block at
            # the end, samples took a fifth more processor time in the first epoch.
            head = complete_head(
                table, block=block, length=plan.length, fingerprint=self._hex, schema=self._schema
            )
            os.ftruncate(descriptor, plan.length)
            os.pwrite(descriptor, head, 0)
            self.tier.adopt(block, _name(block), descriptor)
            return True

    def remove(self, block: int) -> None:
        """Forget the samples of a block, which is in its tier."""
        with self._locked(block):
            self._remove(block)

    def close(self) -> None:
        """Close the files; the samples stay."""
        with self._lock:
            if self._folder < 0:
                return
            for descriptor in (self._locks, self._folder):
                with suppress(OSError):
                    os.close(descriptor)
            self._locks = self._folder = -1

    def _count(self, block: int) -> int:
        starts = self._layout.starts
        return int(starts[block + 1] - starts[block])

    @contextmanager
    def _locked(self, block: int) -> Iterator[None]:
        """Hold the lock of a block. Raises TierError when another process never lets go of it."""
        with self._stripes[block % _STRIPES]:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while not lock_byte(self._locks, _BLOCKS_AT + block):
                if time.monotonic() > deadline:
                    raise TierError(
                        f"tier {self.tier.path}: another process has held block {block} for "
                        f"{_LOCK_TIMEOUT_S:.0f} s: end or continue it"
                    )
                time.sleep(_POLL_S)
            try:
                yield
            finally:
                with suppress(OSError):
                    lock_byte(self._locks, _BLOCKS_AT + block, fcntl.F_UNLCK)

    @contextmanager
    def _reading(self, block: int, flags: int = os.O_RDONLY) -> Iterator[int | None]:
        """Yield a descriptor of a part, None if there is none."""
        try:
            descriptor = open_file(self._folder, _name(block), flags)
        except FileNotFoundError:
            yield None
            return
        with closing_descriptor(descriptor):
            yield descriptor

    def _head(self, block: int, here: int, end: int) -> bytes:
        """Return the header of a part that has `here` samples, which end at `end`."""
        return HEADER.pack(
            MAGIC_PART,
            VERSION,
            0,
            self._count(block),
            block,
            end,
            bytes.fromhex(self._hex),
            self._schema_bytes,
            here,
            0,
        )

    def _progress(self, descriptor: int, block: int) -> tuple[int, int] | None:
        """Return (samples that a part has, end of the last one); None if it is not a part of this
        block."""
        head = os.pread(descriptor, HEADER.size, 0)
        if len(head) < HEADER.size:
            return None
        fields = HEADER.unpack(head)
        magic, end, here = fields[0], fields[5], fields[8]
        if magic == MAGIC:  # It is being published, or whoever did so was killed.
            here = self._count(block)
        first = self._table_at + ENTRY.itemsize * self._count(block)
        own = HEADER.unpack(self._head(block, here, end))
        if magic not in (MAGIC, MAGIC_PART) or fields[1:8] != own[1:8]:
            return None
        if end < first or end % ALIGN:
            return None
        return here, end

    def _entries(self, descriptor: int, block: int, first: int, last: int) -> _Table | None:
        """Return a part of the table, in which the samples that are not here have zeros; None if
        the file is not a part of this block."""
        if self._progress(descriptor, block) is None:
            return None
        return self._table(descriptor, first, last)

    def _table(self, descriptor: int, first: int, last: int) -> _Table:
        """Return some of the entries, writable; zeros where none were written yet."""
        size = ENTRY.itemsize * (last - first)
        data = os.pread(descriptor, size, self._table_at + ENTRY.itemsize * first)
        return np.frombuffer(bytearray(data.ljust(size, b"\0")), ENTRY)

    def _append(self, descriptor: int, block: int, samples: Mapping[int, Buffer]) -> bool:
        """Add the samples that are not here; True if all of the block may be."""
        count, plan = self._count(block), self._plan(block)
        progress = self._progress(descriptor, block)
        if progress is None:
            os.ftruncate(descriptor, 0)  # New, torn, or of something else.
            progress = 0, self._table_at + ENTRY.itemsize * count
        here, end = progress
        first, last = min(samples), max(samples) + 1
        table = self._table(descriptor, first, last)
        runs: list[tuple[int, list[Buffer]]] = []
        """Buffers that follow one another in the file, from an offset on."""
        behind = -1
        for place in sorted(samples):
            payload = samples[place]
            if table[place - first]["offset"]:
                continue
            begin = end if plan is None else int(plan.offsets[place])
            if plan is not None and len(payload) != plan.sizes[place]:
                raise SourceError(
                    f"sample {place} of block {block} has {len(payload)} bytes, not the "
                    f"{plan.sizes[place]} that the source said: it has changed, open it again"
                )
            digest = xxhash.xxh3_64_intdigest(payload)
            table[place - first] = (begin, len(payload), len(payload), digest)
            if begin != behind:
                runs.append((begin, []))
            gap = -len(payload) % ALIGN
            runs[-1][1].extend((payload, bytes(gap)))
            behind = begin + len(payload) + gap
            end = max(end, behind)
            here += 1
        # Payloads first: an entry that a killed process left behind must not refer to bytes that
        # were never written.
        for begin, buffers in runs:
            write_all(descriptor, buffers, begin)
        if runs:
            os.pwrite(descriptor, self._head(block, here, end), 0)
            os.pwrite(descriptor, table.tobytes(), self._table_at + ENTRY.itemsize * first)
        return here >= count

    def _forget(self, block: int, place: int) -> None:
        """Take a damaged sample's entry out of the table, so that it can be added again."""
        with self._locked(block), self._reading(block, os.O_RDWR) as descriptor:
            if descriptor is not None and self._progress(descriptor, block) is not None:
                at = self._table_at + ENTRY.itemsize * place
                os.pwrite(descriptor, bytes(ENTRY.itemsize), at)

    def _find_plan(self, block: int) -> "_PartialLayout | None":
        # Estimated sizes, as of images that are encoded when they are read: payloads lie in the
        # order in which they came, and the block is written again from them.
        if not self._is_exact:
            return None
        sizes = np.asarray(self._sizes[self._layout.samples_of(block)], np.int64)
        ends = self._table_at + ENTRY.itemsize * len(sizes) + np.cumsum(aligned(sizes))
        return _PartialLayout(ends - aligned(sizes), sizes, int(ends[-1]))

    def _remove(self, block: int) -> None:
        with suppress(FileNotFoundError):
            unlink(self._folder, _name(block))


@dataclass(frozen=True, slots=True)
class _PartialLayout:
    """Where the payloads of a block go."""

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    length: int
    """Bytes of the block."""

    def is_of(self, table: _Table) -> bool:
        """True if all entries of a table are as planned."""
        planned = np.array_equal(table["offset"], self.offsets)
        return planned and all(np.array_equal(table[name], self.sizes) for name in _SIZES)


def _payload(descriptor: int, entry: np.void) -> memoryview | None:
    """Return a payload, checked; None if it is missing or damaged."""
    offset, size, raw, digest = entry.item()
    if not offset or size != raw or size > MAX_SAMPLE_BYTES:
        return None
    if offset + size > os.fstat(descriptor).st_size:
        return None
    memory = new_memory(size)
    try:
        read_exactly(descriptor, memory, offset, "a part")
    except CorruptBlock:
        return None
    return memory if xxhash.xxh3_64_intdigest(memory) == digest else None


def _runs(samples: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the runs of numbers that follow one another."""
    start = 0
    for k in range(1, len(samples) + 1):
        if k == len(samples) or samples[k] != samples[k - 1] + 1:
            yield samples[start], samples[k - 1] + 1
            start = k


def _name(block: int) -> str:
    return f"{block:08d}.part"

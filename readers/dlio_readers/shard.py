"""The native format: a folder of shards, as `dlio pack` writes it."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlio.errors import CorruptBlock, SourceError
from dlio.order import Order
from dlio.reader import Layout
from dlio.source import Source
from dlio.storage.block import BlockInfo, read_exactly, read_info
from dlio.storage.shard import SUFFIX, Footer, read_footer

_KEPT_TABLES = 1024
"""Block tables kept in memory, about 24 bytes a sample each."""


class ShardReader:
    """Reads native shards. Samples are numbered as they are stored.

    Args:
        path: a folder of `*.dlio` files, all of one data set, or the one file of a small one.

    Raises SourceError when shards are missing or do not belong together, CorruptBlock when one
    is damaged.
    """

    format = "shard"
    objects = False

    def __init__(self, path: str) -> None:
        self.path = path
        self._files = _shard_files(path)
        footers = [_footer(file) for file in self._files]
        footers = _in_order(path, self._files, footers)
        first = footers[0]
        self.schema = first.schema
        self.classes: Sequence[str] = first.classes
        self.fingerprint = first.fingerprint
        self.labels = np.concatenate([footer.labels for footer in footers]).astype(np.int64)
        self.sizes = np.concatenate([footer.sizes for footer in footers]).astype(np.int64)
        counts = np.concatenate([footer.counts for footer in footers]).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.layout = Layout(starts, Order(len(self.sizes), 0, shuffled=False))
        self._names = [footer.names for footer in footers]
        self._name_ends = [footer.name_ends for footer in footers]
        self._firsts = np.array([footer.first for footer in footers], np.int64)
        self._offsets = [footer.offsets.astype(np.int64) for footer in footers]
        blocks = [len(footer.counts) for footer in footers]
        self._first_blocks = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self._tables: OrderedDict[int, BlockInfo] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def recognises(path: str) -> str | None:
        if "://" in path or "::" in path:
            return "native shards are read from local paths"
        if os.path.isfile(path):
            return None if path.endswith(SUFFIX) else f"is a file that does not end in {SUFFIX}"
        names = os.listdir(path)
        return None if any(name.endswith(SUFFIX) for name in names) else f"holds no *{SUFFIX} file"

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, sample: int) -> str:
        shard = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        place = sample - int(self._firsts[shard])
        ends = self._name_ends[shard]
        start = int(ends[place - 1]) if place else 0
        return self._names[shard][start : int(ends[place])].decode("utf-8", "replace")

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Payloads, checked against their checksums; neighbours are read in one go.

        Raises SourceError for a file that cannot be read, CorruptBlock for one that is damaged.
        """
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        blocks, places = self.layout.locate(np.asarray(samples, np.int64))
        for block in np.unique(blocks):
            here = np.flatnonzero(blocks == block)
            here = here[np.argsort(places[here], kind="stable")]
            self._read_block(int(block), here, places[here], payloads)
        return payloads

    def close(self) -> None:
        with self._lock:
            self._tables.clear()

    def file_of(self, block: int) -> tuple[str, int, int]:
        """(file, offset, length) of a block."""
        shard = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        k = block - int(self._first_blocks[shard])
        offsets = self._offsets[shard]
        return self._files[shard], int(offsets[k]), int(offsets[k + 1] - offsets[k])

    def _read_block(
        self,
        block: int,
        slots: npt.NDArray[np.intp],
        places: npt.NDArray[np.int64],
        payloads: list[bytes | memoryview],
    ) -> None:
        file, start, length = self.file_of(block)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{file} cannot be opened: {error.strerror}") from error
        try:
            info = self._info(block, descriptor, file, start, length)
            if places[-1] >= len(info):
                raise CorruptBlock(f"{file}: block {block} has fewer samples than its index says")
            run: list[int] = []
            for k in range(len(places)):
                run.append(k)
                if k + 1 == len(places) or places[k + 1] > places[k] + 1:
                    self._read_run(info, descriptor, slots[run], places[run], payloads)
                    run = []
        except OSError as error:
            raise SourceError(f"{file} cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _read_run(
        self,
        info: BlockInfo,
        descriptor: int,
        slots: npt.NDArray[np.intp],
        places: npt.NDArray[np.int64],
        payloads: list[bytes | memoryview],
    ) -> None:
        table = info.table
        first, last = table[places[0]], table[places[-1]]
        begin = int(first["offset"])
        memory = memoryview(bytearray(int(last["offset"]) + int(last["stored"]) - begin))
        where = f"{info.path}, block {info.block}"
        read_exactly(descriptor, memory, info.start + begin, where)
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            at = int(table[place]["offset"]) - begin
            stored = memory[at : at + int(table[place]["stored"])]
            payloads[slot] = info.check(stored, place)

    def _info(self, block: int, descriptor: int, file: str, start: int, length: int) -> BlockInfo:
        with self._lock:
            info = self._tables.get(block)
        if info is None:
            info = read_info(descriptor, file, start, length)
            if info.fingerprint != self.fingerprint or info.block != block:
                raise CorruptBlock(
                    f"{file}: holds a block of another data set where block {block} should be"
                )
            with self._lock:
                self._tables[block] = info
                while len(self._tables) > _KEPT_TABLES:
                    self._tables.popitem(last=False)
        return info


def _shard_files(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    names = [entry.name for entry in Source(path).listing() if entry.name.endswith(SUFFIX)]
    return [os.path.join(path, name) for name in names]


def _footer(file: str) -> Footer:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{file} cannot be opened: {error.strerror}") from error
    try:
        return read_footer(descriptor, file)
    finally:
        os.close(descriptor)


def _in_order(path: str, files: list[str], footers: list[Footer]) -> list[Footer]:
    """The footers by shard number (files likewise, in place). Raises SourceError if one lacks."""
    if len({footer.fingerprint for footer in footers}) != 1:
        raise SourceError(f"{path}: shards of several data sets: keep each in a folder of its own")
    count = footers[0].shards
    numbers = [footer.shard for footer in footers]
    if sorted(numbers) != list(range(count)):
        missing = sorted(set(range(count)) - set(numbers))
        raise SourceError(
            f"{path}: {len(missing)} of {count} shards missing (number {missing[:5]}): restore "
            "them, or pack the data set again"
        )
    by_number = sorted(range(count), key=numbers.__getitem__)
    files[:] = [files[k] for k in by_number]
    ordered = [footers[k] for k in by_number]
    firsts = np.cumsum([0, *(len(footer.sizes) for footer in ordered)])
    if [footer.first for footer in ordered] != firsts[:-1].tolist() or firsts[-1] != footers[
        0
    ].total:
        raise SourceError(f"{path}: its shards do not add up: pack the data set again")
    return ordered

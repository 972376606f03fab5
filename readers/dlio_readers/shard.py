"""The reader of dlio's native format: a folder of shards, as `dlio pack` writes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from dlio.data.boxes import by_name, total_of
from dlio.data.open_files import Descriptor, PersistentFile, open_file
from dlio.data.reader_contract import Abilities, FileLocations
from dlio.data.source import File, FilePlace, Source, expand, failed, files_below, own_name
from dlio.errors import CorruptBlock, SourceError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.storage.block import (
    BlockInfo,
    DescriptorlessFile,
    check_block,
    read_exactly,
    read_info,
)
from dlio.storage.block_tables import BlockTables
from dlio.storage.shard_file import SUFFIX, ShardIndex, read_footer
from dlio.util.memory import new_memory
from dlio.util.parallel import each_of
from dlio.util.units import counted
from dlio_readers.path_reader import PathReader, neighbours

_OPENED_AT_A_TIME = 16
_NAMES = 1024
"""Names of neighbours that are read together."""
_TABLE_BYTES = 16 << 20
"""Bytes of block tables kept in memory, 24 per sample."""
_LOCATED_FILES = 64
"""Files that are kept open for a batch, beyond those that the process keeps open anyway."""


class ShardReader(PathReader):
    """Read native shards. Samples are numbered in storage order.

    Indexes of samples stay in local files, and are read from there when they are needed, such that
    a data set of any size takes little memory. No file is mapped.

    Args:
        path: a folder of `*.dlio` files of one data set, a pattern, a list, or a single file.

    Raises SourceError if shards are missing or belong to different data sets, CorruptBlock if a
    shard is damaged.
    """

    format = "shard"

    def __init__(self, path: str | Sequence[str]) -> None:
        files, threads = files_below(path, SUFFIX), _OPENED_AT_A_TIME
        opened = partial(FilePlace.opened_as, kind=PersistentFile)
        self._files = each_of(opened, files, threads, self.path)
        footers = each_of(_footer, self._files, threads, self.path)
        footers = _in_order(self.path, self._files, footers)
        self._footers = footers
        first = footers[0]
        self.schema = first.schema
        self.classes: Sequence[str] = first.classes
        self.fingerprint = first.fingerprint
        counts = np.concatenate([footer.counts for footer in footers])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.layout = Layout(starts, Order(int(starts[-1]), 0, shuffled=False))
        self._firsts = np.array([footer.first for footer in footers], np.int64)
        self._shards = np.repeat(np.arange(len(footers)), [len(each.counts) for each in footers])
        """Number of the shard of each block; shape (blocks,)."""
        offsets = [footer.offsets.astype(np.int64) for footer in footers]
        self._begins = np.concatenate([each[:-1] for each in offsets])
        """Offset of each block in its shard; shape (blocks,)."""
        self.block_bytes = np.concatenate([np.diff(each) for each in offsets])
        """Stored bytes of each block, which tiers copy unchanged; shape (blocks,)."""
        self._data_bytes = sum(each.payload_bytes for each in footers)
        self._tables = BlockTables(_TABLE_BYTES)
        self._names: tuple[int, int, list[bytes]] = (-1, 0, [])
        """Shard, first sample and names of those that were asked for last; none at first."""

    @property
    def abilities(self) -> Abilities:
        locate = None if self._files[0].local_path is None else self._locate
        # Shards of earlier versions do not say how many boxes they hold.
        known = all(footer.boxes is not None for footer in self._footers)
        counts = self._box_counts if known else None
        return Abilities(data_bytes=self._data_bytes, locate=locate, box_counts=counts)

    def _box_counts(self) -> dict[str, int]:
        return by_name(self.classes, total_of(footer.boxes or () for footer in self._footers))

    @staticmethod
    def recognises(path: str) -> str | None:
        first = expand(path)[0]
        if own_name(first).endswith(SUFFIX):
            return None
        source = Source(first)
        if not source.is_folder():
            return f"is a file that does not end in {SUFFIX}"
        has = any(name.endswith(SUFFIX) for name, _ in source.names())
        return None if has else f"holds no *{SUFFIX} file"

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.concatenate([footer.sizes[:] for footer in self._footers]).astype(np.int64)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        return np.concatenate([footer.labels[:] for footer in self._footers]).astype(np.int64)

    def name(self, sample: int) -> str:
        shard = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        place = sample - int(self._firsts[shard])
        chunk = place - place % _NAMES
        index, known = self._footers[shard], self._names
        try:
            if known[:2] != (shard, chunk):
                # The next one may lie elsewhere, as in a shuffled order.
                self._names = (shard, chunk, [])
                return str(index.names_of(place, place + 1)[0], "utf-8", "replace")
            if not known[2]:
                names = index.names_of(chunk, min(chunk + _NAMES, len(index.sizes)))
                self._names = known = (shard, chunk, names)
        except (SourceError, CorruptBlock):  # The shard was truncated, or removed.
            return f"sample {sample} of {self._files[shard].name}"
        return str(known[2][place - chunk], "utf-8", "replace")

    def stored_at(self, block: int) -> int:
        return self.file_of(block)[1]

    def read_stored(self, block: int, into: memoryview, at: int = 0) -> None:
        """Read len(into) bytes of a block as stored, from its byte `at` on."""
        file, start, _ = self.file_of(block)
        file.read_into(start + at, into)

    def check_stored(self, block: int, stored: memoryview) -> None:
        """Verify a whole block that `read_stored` has read. Raises CorruptBlock."""
        file, start, _ = self.file_of(block)
        info = check_block(stored, file.name, start)
        self._check_info(block, info, file)

    def _check_info(self, block: int, info: BlockInfo, file: File) -> None:
        """Raise CorruptBlock if a block is another one, or has other sizes than in the index."""
        if info.fingerprint != self.fingerprint or info.block != block:
            raise _foreign(file, block)
        shard = int(self._shards[block])
        first = int(self.layout.starts[block] - self._firsts[shard])
        count = int(self.layout.starts[block + 1] - self.layout.starts[block])
        sizes = self._footers[shard].sizes[first : first + count]
        if not np.array_equal(sizes, info.table["raw"]):
            raise CorruptBlock(f"{file.name}: block {block} has other sizes than its index says")

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Read payloads and verify their checksums; neighbours are read together.

        Raises SourceError if a file cannot be read, CorruptBlock if it is damaged.
        """
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        blocks, places = self.layout.locate(np.asarray(samples, np.int64))
        for block in np.unique(blocks):
            here = np.flatnonzero(blocks == block)
            self._read_block(int(block), here, places[here], payloads)
        return payloads

    def close(self) -> None:
        self._tables.clear()
        for file in self._files:
            file.close()

    def file_of(self, block: int) -> tuple[PersistentFile, int, int]:
        """Return (file, offset, length) of a block."""
        file = self._files[int(self._shards[block])]
        return file, int(self._begins[block]), int(self.block_bytes[block])

    def _read_block(
        self,
        block: int,
        slots: npt.NDArray[np.intp],
        places: npt.NDArray[np.int64],
        payloads: list[bytes | memoryview],
    ) -> None:
        file, start, length = self.file_of(block)
        with _opened(file) as opened:
            info = self._info(block, opened, file, start, length)
            if places.max() >= len(info):
                raise CorruptBlock(
                    f"{file.name}: block {block} has fewer samples than its index says"
                )
            for _, _, run in neighbours(places):
                self._read_run(info, opened, slots[run], places[run], payloads)

    def _read_run(
        self,
        info: BlockInfo,
        opened: int | DescriptorlessFile,
        slots: npt.NDArray[np.intp],
        places: npt.NDArray[np.int64],
        payloads: list[bytes | memoryview],
    ) -> None:
        table = info.table
        first, last = table[places[0]], table[places[-1]]
        begin = int(first["offset"])
        memory = new_memory(int(last["offset"]) + int(last["stored"]) - begin)
        where = f"{info.path}, block {info.block}"
        read_exactly(opened, memory, info.start + begin, where)
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            at = int(table[place]["offset"]) - begin
            stored = memory[at : at + int(table[place]["stored"])]
            payloads[slot] = info.check(stored, place)

    def _info(
        self, block: int, opened: int | DescriptorlessFile, file: File, start: int, length: int
    ) -> BlockInfo:
        info = self._tables.get(block)
        if info is None:
            info = read_info(opened, file.name, start, length)
            self._check_info(block, info, file)
            info = self._tables.add(block, info)
        return info

    def _locate(
        self,
        samples: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> FileLocations:
        """Return where samples lie in local shards; see `Abilities.locate`."""
        shards = self._shards[blocks]
        opened = self._descriptors(np.flatnonzero(np.bincount(shards)).tolist())
        numbers = np.full(len(self._files), -1, np.int64)
        for shard, descriptor in opened.items():
            numbers[shard] = descriptor.number
        descriptors = numbers[shards]

        def read(block: int) -> None:
            number = int(numbers[self._shards[block]])
            if number >= 0:
                file, start, length = self.file_of(block)
                self._info(block, number, file, start, length)

        known, entries = self._tables.find(blocks, places, read)
        return FileLocations(
            known=known & (descriptors >= 0),
            descriptor=descriptors,
            offset=self._begins[blocks] + entries["offset"].astype(np.int64),
            stored=entries["stored"].astype(np.int64),
            raw=entries["raw"].astype(np.int64),
            digest=entries["xxh3"].astype(np.uint64),
            files=list(opened.values()),
        )

    def _descriptors(self, shards: Sequence[int]) -> dict[int, Descriptor]:
        """Open those of some shards that are local, and as many as may be."""
        opened: dict[int, Descriptor] = {}
        for shard in shards[:_LOCATED_FILES]:
            file = open_file(self._files[shard])
            if file is not None:
                opened[shard] = file
        return opened


def _foreign(file: File, block: int) -> CorruptBlock:
    return CorruptBlock(
        f"{file.name}: holds a block of another data set where block {block} should be"
    )


@contextmanager
def _opened(file: PersistentFile) -> Iterator[int | DescriptorlessFile]:
    """Yield a file descriptor if the file is local, otherwise the file itself."""
    if file.local_path is None:
        yield file
        return
    try:
        opened = file.descriptor()
        yield opened.number
    except SourceError:
        raise
    except OSError as error:
        file.close()  # The next read opens it again.
        raise failed(file.url, error) from error


def _footer(file: File) -> ShardIndex:
    return read_footer(file, file.name, left_in_file=file.local_path is not None)


def _in_order(
    path: str, files: list[PersistentFile], footers: list[ShardIndex]
) -> list[ShardIndex]:
    """Sort footers and (in place) files by shard number. Raises SourceError if one is missing."""
    if len({footer.fingerprint for footer in footers}) != 1:
        raise SourceError(f"{path}: shards of several data sets: keep each in its own folder")
    count = footers[0].shards
    numbers = [footer.shard for footer in footers]
    here = set(numbers)
    if len(here) != len(numbers) or max(numbers) >= count:
        raise SourceError(f"{path}: its shards are numbered wrongly: pack the data set again")
    if len(numbers) < count:
        missing = list(islice((k for k in range(count) if k not in here), 5))
        raise SourceError(
            f"{path}: {count - len(numbers)} of {counted(count, 'shard')} missing (number "
            f"{missing}): restore "
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

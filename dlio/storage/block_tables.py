"""Tables of many blocks as one array, so that the entries of a batch are found by indexing."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import CorruptBlock, SourceError
from dlio.storage.block import ENTRY, BlockInfo
from dlio.util.forks import new_lock

_LEAST: Final = 1 << 10
"""Entries that there is room for at first."""


class BlockTables:
    """Headers and tables of blocks that were read and checked. Thread-safe.

    The tables lie one after another in one array, of which `table` of each block is a part. At most
    `most_bytes` of them are kept, but always the last one: all others go when there are more.

    Invariants: entries are written before they are counted, and are not overwritten, so that
    whoever has the array, or is forked meanwhile, finds them whole. Beyond the greatest block,
    `_counts` has at least one 0.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes // ENTRY.itemsize
        self._lock = new_lock()
        self._infos: dict[int, BlockInfo] = {}
        self._entries = np.empty(_LEAST, ENTRY)
        self._used = 0
        self._firsts = np.zeros(1, np.int64)
        """Position of each block's first entry; meaningless for those that are not here."""
        self._counts = np.zeros(1, np.int64)
        """Entries of each block, 0 for those that are not here."""

    def get(self, block: int) -> BlockInfo | None:
        """Return a block's header and table, if they are here."""
        return self._infos.get(block)

    def add(self, block: int, info: BlockInfo) -> BlockInfo:
        """Keep the header and table of a block, in place of those that were here. Returns them with
        the table in the array."""
        with self._lock:
            self._drop(block)
            if self._used and self._used + len(info) > self._most:
                self._clear()
            self._grow(block, self._used + len(info))
            first, self._used = self._used, self._used + len(info)
            self._entries[first : self._used] = info.table
            self._infos[block] = info = self._placed(info, first)
            self._firsts[block] = first
            self._counts[block] = len(info)
        return info

    def drop(self, block: int) -> None:
        """Forget a block."""
        with self._lock:
            self._drop(block)

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._clear()

    def find(
        self,
        blocks: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        read: Callable[[int], object],
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.void]]:
        """Return (mask of the samples whose entries are here, entries of dtype ENTRY); all of shape
        (n,). Where the mask is False, the entry means nothing.

        `read` is called for each block that is not here, and adds it; or it raises OSError,
        SourceError or CorruptBlock, and the block's samples are left out.
        """
        here, entries = self._find(blocks, places)
        if not here.all():
            for block in np.unique(blocks[~here]).tolist():
                # Whoever reads the sample meets the error again, and deals with it.
                with suppress(OSError, SourceError, CorruptBlock):
                    read(block)
                    # At once: the next block may need the room.
                    rows = np.flatnonzero(blocks == block)
                    here[rows], entries[rows] = self._find(blocks[rows], places[rows])
        return here, entries

    def _find(
        self, blocks: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.void]]:
        # A block that no array reaches is clipped to the last one, which is never here.
        with self._lock:
            entries = self._entries
            at = self._firsts.take(blocks, mode="clip")
            counts = self._counts.take(blocks, mode="clip")
        at += places
        return places < counts, entries.take(at, mode="clip")

    def _drop(self, block: int) -> None:
        if self._infos.pop(block, None) is not None:
            self._counts[block] = 0

    def _clear(self) -> None:
        # Positions first: a child that is forked in between must find none in the other array.
        self._counts[:] = 0
        self._infos = {}
        # Another array: entries of this one may be in use.
        self._entries, self._used = np.empty(_LEAST, ENTRY), 0

    def _grow(self, block: int, entries: int) -> None:
        """Make room for a block, and for so many entries."""
        if entries > len(self._entries):
            grown = np.empty(max(entries, min(self._most, 2 * len(self._entries))), ENTRY)
            grown[: self._used] = self._entries[: self._used]
            self._entries = grown
            firsts = self._firsts
            # Otherwise the tables would keep the smaller array in memory.
            self._infos = {
                each: self._placed(info, int(firsts[each])) for each, info in self._infos.items()
            }
        size = len(self._counts)
        if block + 2 > size:
            more = np.zeros(max(block + 2, 2 * size) - size, np.int64)
            self._firsts = np.append(self._firsts[:size], more)
            self._counts = np.append(self._counts, more)

    def _placed(self, info: BlockInfo, first: int) -> BlockInfo:
        """Return a header whose table is the part of the array from `first` on."""
        table = self._entries[first : first + len(info)]
        table.flags.writeable = False
        return replace(info, table=table)

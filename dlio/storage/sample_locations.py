"""Where the samples of a batch lie, as arrays: for a reader outside of Python.

What a row says holds until the block is removed or rewritten, by whichever process. Who reads finds
no file then, or a payload of another checksum, and takes `Hierarchy.read` instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import FileLocations
from dlio.storage.block_fetcher import BlockFetcher, Fetcher
from dlio.storage.tier import TierTargets

_I64 = npt.NDArray[np.int64]
IN_PLACE: Final = 2
"""Value of `kept` for files that lie in memory."""
COLUMNS: Final = (
    *("descriptor", "block", "regular", "kept", "offset", "stored", "raw", "digest", "checked"),
    "tier",
)
"""Rows of `SampleLocations.table`."""
_ROW: Final = {name: number for number, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True)
class SampleLocations:
    """Where the samples of a batch lie in the files of a node.

    Samples that are not `known`, shape (n,), have to be read by `Hierarchy.read`, and their other
    values mean nothing. Whoever reads the others counts their bytes: as those of the tier's kind,
    or as `source` and `single_bytes` where `tier` is -1.

    The `table` of shape (len(COLUMNS), n) has, for each sample, the number of an open file, or of
    the folder of its block (`descriptor`); number of the `block` whose file, `%08d.blk`, has the
    sample in that folder, -1 where `descriptor` is the file; 1 where the file, once it is open, has
    to be checked for being a `regular` one; 1 where it may be `kept` open for a pass, as its tier
    keeps the block, `IN_PLACE` where it lies in memory, and may be read there; first byte
    (`offset`), bytes `stored`, fewer than the bytes of the payload (`raw`) where they are one block
    of LZ4; bits of the payload's xxh3_64 (`digest`); 1 where that has to be `checked`; number of
    the `tier`, -1 for the source.

    Files and folders are open while `files` has their holders.
    """

    known: npt.NDArray[np.bool_]
    table: _I64
    files: list[object]

    @classmethod
    def of(
        cls, known: npt.NDArray[np.bool_], files: list[object], **columns: npt.ArrayLike
    ) -> "SampleLocations":
        """Make one of columns by name; those that are not given are 0."""
        table = np.zeros((len(COLUMNS), len(known)), np.int64)
        for name, values in columns.items():
            table[_ROW[name]] = values
        return cls(known, table, files)

    def column(self, name: str) -> _I64:
        """Return a row of the table, by name."""
        row: _I64 = self.table[_ROW[name]]
        return row


class SampleLocator:
    """Finds the samples that can be read at once, from a tier or the source. Thread-safe.

    `in_source` is the reader's ability to locate samples, None if it is not to be used.
    """

    def __init__(
        self,
        targets: TierTargets,
        blocks: BlockFetcher,
        fetcher: Fetcher,
        in_source: Callable[[_I64, _I64, _I64], FileLocations] | None,
    ) -> None:
        self._targets, self._blocks, self._fetcher = targets, blocks, fetcher
        self._in_source = in_source
        self._looked = np.zeros(len(targets.pinned), np.bool_)
        """Blocks without a tier that were looked for in all of them."""

    def locate(self, samples: _I64, blocks: _I64, places: _I64) -> SampleLocations:
        """Return where samples lie; see `Hierarchy.locate`."""
        tiers = self._targets.tiers
        seen, homes = self._blocks.seen_in(blocks), self._targets.numbers(blocks)
        near = self._targets.are_near(seen, homes)
        held = self._fetcher.holds(samples)
        if held is not None:
            near &= ~held
        # Whoever reads there holds these: otherwise another file might get their numbers.
        holders: list[object] = [tier.holder for tier in tiers]
        known = np.zeros(len(samples), np.bool_)
        table = np.empty((len(COLUMNS), len(samples)), np.int64)
        located = SampleLocations(known, table, holders)
        # Of a block that was seen in none, -1, the last value.
        folders = np.array([*(tier.folder for tier in tiers), -1], np.int64)
        disks = np.array([*(tier.kind != "ram" for tier in tiers), False], np.bool_)
        # Mostly all lie in one tier, and a number does for its columns.
        alike = len(seen) > 0 and bool((seen == seen[0]).all())
        where = seen[0] if alike else seen
        for name, values in (
            ("descriptor", folders[where]),
            ("block", blocks),
            ("regular", disks[where]),
            ("kept", (self._targets.pinned[blocks] >= 0) * np.where(disks[where], 1, IN_PLACE)),
            ("tier", where),
        ):
            table[_ROW[name]] = values
        for number, tier in enumerate(tiers):
            here = near & (seen == number)
            if folders[number] >= 0 and here.any():
                # The usual case, and twice as fast without an index.
                rows = slice(None) if here.all() else np.flatnonzero(here)
                known[rows], entries, checked = tier.locate(blocks[rows], places[rows])
                for name, values in (
                    ("checked", checked),
                    ("offset", entries["offset"].view("<i8")),
                    ("stored", entries["stored"]),
                    ("raw", entries["raw"]),
                    ("digest", entries["xxh3"].view("<i8")),
                ):
                    table[_ROW[name], rows] = values
        if self._in_source is not None:
            away = (homes < 0) & (seen < 0)
            if held is not None:
                away &= ~held
            if away.any():
                self._add_from_source(located, np.flatnonzero(away), samples, blocks, places)
        return located

    def _add_from_source(
        self, located: SampleLocations, rows: _I64, samples: _I64, blocks: _I64, places: _I64
    ) -> None:
        """Add rows of samples whose blocks belong in no tier, and were seen in none."""
        assert self._in_source is not None
        # Another job may have left a block in a tier. Asked once: a file system may be slow.
        mine = blocks[rows]
        for block in np.unique(mine[~self._looked[mine]]).tolist():
            self._blocks.look(block)
            self._looked[block] = True
        rows = rows[self._blocks.seen_in(mine) < 0]
        there = self._in_source(samples[rows], blocks[rows], places[rows])
        located.known[rows] = there.known
        digest = 0 if there.digest is None else there.digest.view(np.int64)
        for name, values in (
            ("checked", there.known if there.digest is not None else 0),
            ("descriptor", there.descriptor),
            ("offset", there.offset),
            ("stored", there.stored),
            ("raw", there.raw),
            ("digest", digest),
            ("block", -1),
        ):
            located.table[_ROW[name], rows] = values
        located.files.extend(there.files)

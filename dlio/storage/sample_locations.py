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
from dlio.storage.block import ENTRY
from dlio.storage.block_fetcher import BlockFetcher, Fetcher
from dlio.storage.tier import TierTargets

_I64 = npt.NDArray[np.int64]
IN_MEMORY: Final = -2
"""The descriptor of payloads that lie at an address."""
_WHOLE: Final = np.dtype((np.void, ENTRY.itemsize))
"""An entry as bytes: assigning many field by field takes ten times as long."""


@dataclass(frozen=True, slots=True)
class SampleLocations(FileLocations):
    """Where the samples of a batch lie in the files of a node; a row for each, all of shape (n,).

    Samples that are not `known` have to be read by `Hierarchy.read`, and their other values mean
    nothing. Whoever reads the others counts their bytes: as those of the tier's kind, or as
    `source` and `single_bytes` where `tier` is -1.

    A tier's folder is open while `files` has its holder.
    """

    block: npt.NDArray[np.int64]
    """Number of the block whose file, `%08d.blk`, has the sample, in the folder `descriptor`. -1
    where `descriptor` is the file."""
    regular: npt.NDArray[np.bool_]
    """True where the file, once it is open, has to be checked for being a regular one."""
    kept: npt.NDArray[np.bool_]
    """True where the file may stay open for a pass: its block is kept by its tier."""
    checked: npt.NDArray[np.bool_]
    """True where the payload has to be compared with `digest`."""
    tier: npt.NDArray[np.int8]
    """Number of the tier; -1 for the source."""


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
        known, checked = np.zeros(len(samples), np.bool_), np.zeros(len(samples), np.bool_)
        entries = np.zeros(len(samples), _WHOLE)
        for number, tier in enumerate(tiers):
            here = near & (seen == number)
            if here.any():
                # The usual case, and twice as fast without an index.
                rows = slice(None) if here.all() else np.flatnonzero(here)
                known[rows], there, checked[rows] = tier.locate(blocks[rows], places[rows])
                entries[rows] = there.view(_WHOLE)
        table = entries.view(ENTRY)
        # Of a block that was seen in none, -1, the last value.
        folders = np.array([*(tier.folder for tier in tiers), -1], np.int64)
        disks = np.array([*(tier.kind != "ram" for tier in tiers), False], np.bool_)
        located = SampleLocations(
            known=known & (folders[seen] >= 0),
            descriptor=folders[seen],
            offset=table["offset"].astype(np.int64),
            stored=table["stored"].astype(np.int64),
            raw=table["raw"].astype(np.int64),
            digest=table["xxh3"].astype(np.uint64),
            files=holders,
            block=blocks.astype(np.int64),
            regular=disks[seen],
            kept=self._targets.pinned[blocks] >= 0,
            checked=checked,
            tier=seen.astype(np.int8),
        )
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
        located.known[rows] = located.checked[rows] = there.known
        located.descriptor[rows] = there.descriptor
        located.offset[rows] = there.offset
        located.stored[rows] = there.stored
        located.raw[rows] = there.raw
        located.digest[rows] = there.digest
        located.block[rows] = -1
        located.files.extend(there.files)

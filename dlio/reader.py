"""What a reader is, and finding the one for a path.

A reader knows one format. It never caches payloads and starts no thread: tiers and engines
do that for all formats alike. Readers plug in through the entry-point group `dlio.readers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.errors import SourceError
from dlio.order import Order
from dlio.schema import Schema
from dlio.source import Source

MAX_BLOCK_BYTES = 8 << 20
"""Blocks aim at this many payload bytes …"""
MIN_BLOCKS = 512
"""… or fewer, so that a small data set still has about this many, enough to share out evenly …"""
MIN_BLOCK_BYTES = 1 << 15
"""… but not so small that a block's file is mostly its header."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a data set's samples are cut into blocks, storage position by storage position."""

    starts: npt.NDArray[np.int64]
    """First storage position of each block, then the number of samples; shape (blocks + 1,)."""
    order: Order
    """Storage position -> sample index: sequential for containers, keyed for class folders."""

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    def block_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The block that holds each sample; same shape as `samples`."""
        return self.locate(samples)[0]

    def locate(
        self, samples: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(block, place in the block) of each sample; both of the shape of `samples`."""
        positions = self.order.positions(samples)
        blocks = np.searchsorted(self.starts, positions, side="right") - 1
        return blocks.astype(np.int64), positions - self.starts[blocks]

    def samples_of(self, block: int) -> npt.NDArray[np.int64]:
        """The sample indices of one block, in storage order."""
        return self.order.samples(np.arange(self.starts[block], self.starts[block + 1]))


@runtime_checkable
class Reader(Protocol):
    """Knows one format: how many samples, their sizes and names, and their payloads.

    All methods are thread-safe and deterministic. Sample indices are the reader's own,
    0 to len - 1.
    """

    format: str
    """The entry point's name."""
    path: str
    """What was opened, as the user wrote it."""
    schema: Schema
    classes: Sequence[str]
    """Class names; labels index them. Empty when the data set has none."""
    labels: npt.NDArray[np.int64]
    """Class number of each sample; shape (samples,)."""
    sizes: npt.NDArray[np.int64]
    """Payload bytes of each sample; shape (samples,)."""
    fingerprint: str
    """32 hex digits that change when the data set does; names its folder in a tier."""
    layout: Layout

    def __len__(self) -> int: ...

    def name(self, sample: int) -> str:
        """What a user calls the sample: its file, or its key in a container."""

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """The payloads of `samples`, in the same order.

        Reads of neighbours in storage are coalesced. Raises SourceError that names the sample.
        """

    def close(self) -> None:
        """Release files. Reading afterwards opens them again."""


class ReaderType(Protocol):
    """A reader's class, as entry points name it."""

    def __call__(self, path: str) -> Reader: ...

    def recognises(self, path: str) -> str | None:
        """None when `path` is of this format; otherwise in a few words why it is not."""


def open_reader(path: str) -> Reader:
    """Find the reader that recognises `path`, and open it.

    Raises SourceError that says what was tried when none does, or when the path does not exist.
    """
    source = Source(path)
    if not source.exists():
        raise SourceError(f"{path}: no such file or folder: check the path")
    reasons = []
    for entry in sorted(entry_points(group="dlio.readers"), key=lambda entry: entry.name):
        kind: ReaderType = entry.load()
        reason = kind.recognises(path)
        if reason is None:
            return kind(path)
        reasons.append(f"{entry.name}: {reason}")
    if not reasons:
        raise SourceError("dlio finds no readers: install it (pip install dlio) to have them")
    raise SourceError(f"{path} is no data set that dlio can read ({'; '.join(reasons)})")


def cut_blocks(sizes: npt.NDArray[np.int64], order: Order) -> Layout:
    """Cut a data set into blocks of about even bytes, along a storage order.

    Args:
        sizes: payload bytes of each sample; shape (samples,).
        order: storage position -> sample index.
    """
    total = int(sizes.sum())
    target = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, total // MIN_BLOCKS))
    count = max(1, min(len(sizes), round(total / target)))
    ends = np.cumsum(sizes[order.samples(np.arange(len(sizes), dtype=np.int64))])
    # Block k begins with the first sample that starts at or behind k/count of the bytes.
    marks = total * np.arange(1, count, dtype=np.float64) / count
    inner = np.searchsorted(ends, marks, side="left") + 1
    starts = np.unique(np.concatenate([[0], inner[inner < len(sizes)], [len(sizes)]]))
    return Layout(starts.astype(np.int64), order)

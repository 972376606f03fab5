"""Samples out of the source, large ones in parts that are read at the same time."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.data.file_ranges import ReadRange, open_ranges
from dlio.data.reader import Reader
from dlio.data.schema import Buffer
from dlio.data.source import File
from dlio.util.memory import new_memory

_Piece = tuple[ReadRange, int, memoryview]
"""A request: how its file is read, the offset, and the memory to fill."""


@runtime_checkable
class RangedSamples(Protocol):
    """A reader some of whose samples are made of ranges of files, as they are stored."""

    def ranges_of(self, sample: int) -> Sequence[tuple[File, int, int]]:
        """Return (file, offset, bytes) of a sample's ranges; none if the reader is to read it."""

    def payload_of(self, sample: int, parts: Sequence[memoryview]) -> Buffer:
        """Return the payload out of the bytes of the ranges. Raises SourceError."""


def read_samples(
    reader: Reader,
    samples: npt.NDArray[np.int64],
    piece: int,
    in_parallel: Callable[[Callable[[_Piece], None], Sequence[_Piece]], object],
) -> list[Buffer]:
    """Return the payloads of samples.

    Over a network a large file is as slow as its requests one after another. So a single sample
    that takes several requests is read by several threads, through one opening of its file.

    Args:
        piece: bytes of a request; 0 where parts are not worth it.
        in_parallel: calls a function on each of some items.

    Raises SourceError or CorruptBlock.
    """
    if piece and len(samples) == 1 and isinstance(reader, RangedSamples):
        sample = int(samples[0])
        ranges = reader.ranges_of(sample)
        if sum(size for _, _, size in ranges) > piece:
            parts = [new_memory(size) for _, _, size in ranges]
            requests: list[_Piece] = []
            with ExitStack() as stack:
                for (file, offset, size), memory in zip(ranges, parts, strict=True):
                    read = stack.enter_context(open_ranges(file))
                    requests += [
                        (read, offset + at, memory[at : at + piece]) for at in range(0, size, piece)
                    ]
                in_parallel(lambda request: request[0](request[1], request[2]), requests)
            return [reader.payload_of(sample, parts)]
    return list(reader.read(samples))

"""Samples out of the source, large ones in parts that are read at the same time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.data.held import open_ranges
from dlio.data.reader import Reader
from dlio.data.schema import Buffer
from dlio.data.source import File
from dlio.storage.block import new_memory

__all__ = ["WholeFiles", "read_samples"]


@runtime_checkable
class WholeFiles(Protocol):
    """A reader some of whose samples are made of all bytes of a file."""

    def file_of(self, sample: int) -> File | None:
        """Return the file that a sample is made of; None if the reader is to read it."""

    def payload_from(self, sample: int, data: memoryview) -> Buffer:
        """Return the payload out of the file's bytes. Raises SourceError."""


def read_samples(
    reader: Reader,
    samples: npt.NDArray[np.int64],
    piece: int,
    in_parallel: Callable[[Callable[[tuple[int, int]], None], Sequence[tuple[int, int]]], object],
) -> list[Buffer]:
    """Return the payloads of samples.

    Over a network a large file is as slow as its requests one after another. So a single sample
    that takes several requests is read by several threads, through one opening of its file.

    Args:
        piece: bytes of a request; 0 where parts are not worth it.
        in_parallel: calls a function on each of the items (start, end).

    Raises SourceError or CorruptBlock.
    """
    if piece and len(samples) == 1 and isinstance(reader, WholeFiles):
        sample = int(samples[0])
        file = reader.file_of(sample)
        if file is not None and file.size > piece:
            memory = new_memory(file.size)
            with open_ranges(file) as read:
                ends = [*range(piece, file.size, piece), file.size]
                # An error may leave requests under way: the memory is theirs as long as they last.
                in_parallel(
                    lambda part: read(part[0], memory[part[0] : part[1]]),
                    list(itertools.pairwise([0, *ends])),
                )
            return [reader.payload_from(sample, memory)]
    return list(reader.read(samples))

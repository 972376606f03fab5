"""What every engine gives the loader, and the iterator that hands it to the user."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from dlio.loader.stats import Stats


@dataclass(slots=True)
class Fed:
    """A batch, or the exception that is raised in its place."""

    data: Any
    samples: int
    indices: Sequence[Any] | npt.NDArray[np.int64] | None = None
    error: BaseException | None = None


Feed = Generator[Fed | None, None, None]
"""Batches in order. It begins with a None, when work ahead is under way."""


class LoaderIterator:
    """One pass, as the user sees it. An exception in place of a batch does not end it."""

    def __init__(
        self, feed: Feed, stats: Stats, length: int | None, handed: Callable[[Fed | None], None]
    ) -> None:
        """
        Args:
            feed: already begun.
            length: batches, where that is known.
            handed: is told of each batch when it is handed out, and None at the end.
        """
        self._feed = feed
        self._stats = stats
        self._length = length
        self._handed = handed

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the data set does not tell how many batches there are")
        return self._length

    def __next__(self) -> Any:
        with torch.autograd.profiler.record_function("enumerate(DataLoader)#dlio.__next__"):
            self._stats.wait_begins()
            try:
                fed = next(self._feed)
            except StopIteration:
                self._stats.end()
                self._handed(None)
                raise
            except BaseException:
                self._stats.end()
                raise
            assert fed is not None
            self._handed(fed)
            self._stats.wait_ends(fed.samples)
        if fed.error is not None:
            error, fed.error = fed.error, None
            if isinstance(error, StopIteration):
                raise RuntimeError("a data set raised StopIteration") from error
            raise error
        data, fed.data = fed.data, None
        return data

    def close(self) -> None:
        """End the pass; what is under way is dropped."""
        self._feed.close()
        self._stats.end()

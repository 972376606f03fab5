"""Sources of random numbers for transforms.

Inside dlio's loader each transform draws numbers that belong to the sample: a formula of (seed,
epoch, sample) and of the transform's place in the pipeline, so that any number of ranks and threads
gives the same pixels. Anywhere else transforms draw from torch's global generator, as torchvision's
do.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.plan.order import keyed_words

_FIRST_STREAM: Final = 64
"""Streams of `keyed_uniforms` from here on are those of transforms; 0 is the crop's."""
CROP_STREAMS: Final = 1 << 16
"""Streams of one crop of a sample; those of its next crop follow."""


class TorchRandom:
    """torch's global generator, asked as torchvision asks it."""

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Draw a number from [low, high)."""
        return float(torch.empty(1).uniform_(low, high).item())

    def below(self, count: int) -> int:
        """Draw a whole number from 0 to `count` - 1."""
        return int(torch.randint(0, count, (1,)).item())

    def permutation(self, count: int) -> list[int]:
        """Draw an order of the numbers from 0 to `count` - 1."""
        order: list[int] = torch.randperm(count).tolist()
        return order

    def beta(self, alpha: float) -> float:
        """Draw from the distribution Beta(alpha, alpha)."""
        return float(torch._sample_dirichlet(torch.tensor([alpha, alpha]))[0])

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        """Draw numbers of mean 0 and variance 1."""
        drawn: npt.NDArray[np.float32] = torch.empty(shape, dtype=torch.float32).normal_().numpy()
        return drawn


class KeyedRandom:
    """Random numbers of one sample, drawn as `TorchRandom` draws. They are the same wherever the
    sample is made; `stream` is the number of the purpose, see `stream_of`."""

    __slots__ = ("_words",)

    def __init__(self, seed: int, epoch: int, sample: int, stream: int) -> None:
        self._words: Iterator[int] = keyed_words(seed, epoch, sample, stream)

    def word(self) -> int:
        """Draw 64 bits."""
        return next(self._words)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * (next(self._words) >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        return next(self._words) * count >> 64

    def permutation(self, count: int) -> list[int]:
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def beta(self, alpha: float) -> float:
        return float(np.random.default_rng(self.word()).beta(alpha, alpha))

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        return np.random.default_rng(self.word()).standard_normal(shape, np.float32)


RandomSource = TorchRandom | KeyedRandom


def stream_of(step: int, crop: int = 0) -> int:
    """Return the stream of a pipeline's step for a crop of a sample, both counted from 0."""
    return _FIRST_STREAM + step + crop * CROP_STREAMS


_local = threading.local()
_TORCH: Final = TorchRandom()


def current_draws() -> RandomSource:
    """Return this thread's source: of the sample that a loader makes, or torch's generator."""
    make: Callable[[], RandomSource] | None = getattr(_local, "make", None)
    if make is None:
        return _TORCH
    held: RandomSource | None = getattr(_local, "held", None)
    if held is None:
        held = _local.held = make()
    return held


@contextmanager
def drawing(make: Callable[[], RandomSource]) -> Iterator[None]:
    """Have transforms that this thread calls draw from the source that `make` returns."""
    before = getattr(_local, "make", None), getattr(_local, "held", None)
    _local.make, _local.held = make, None
    try:
        yield
    finally:
        _local.make, _local.held = before

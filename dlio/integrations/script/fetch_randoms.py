"""Random numbers that a data set draws in the script's process, such as for crops, by rank.

All ranks have equal random states: drawn from these, the samples of one rank would be cropped, or
picked, like those of another.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

_LOOKS: Final = 4
"""Batches of a pass after which a generator that no sample has drawn from is left as it is."""
_T = TypeVar("_T")


def rank_seed(rank: int, *numbers: int) -> int:
    """Return a seed of 64 bits, other for each rank, from numbers that all ranks have."""
    text = repr((*numbers, rank)).encode()
    return zlib.crc32(text) << 32 | zlib.crc32(text[::-1])


@dataclass(slots=True)
class _Generator:
    """A generator of random numbers that data sets share with scripts."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    seed: Callable[[int], None]
    same: Callable[[Any, Any], bool]
    own: Any = None
    """State of this rank's."""
    draws: bool = False


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _generators() -> list[_Generator]:
    numpy = np.random
    return [
        _Generator(
            "random", random.getstate, random.setstate, random.seed, lambda a, b: bool(a == b)
        ),
        _Generator(
            "numpy.random",
            numpy.get_state,
            numpy.set_state,
            lambda seed: numpy.seed(seed % 2**32),
            lambda a, b: a[2:] == b[2:] and np.array_equal(a[1], b[1]),
        ),
        _Generator(
            "torch",
            torch.get_rng_state,
            torch.set_rng_state,
            _seed_torch,
            torch.equal,
        ),
    ]


class FetchRandoms:
    """The random states of this rank from which a data set draws in one pass.

    Args:
        seed: of this rank and pass.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators = _generators()
        self._fetches = 0
        self.drawn_from: list[str] = []
        """Modules from whose random numbers samples have drawn."""

    def around(self, batches: Iterator[_T]) -> Iterator[_T]:
        """Yield batches; while one is fetched, random states are this rank's."""
        batches = iter(batches)
        while True:
            looks = self._fetches < _LOOKS
            used = [each for each in self._generators if looks or each.draws]
            common = [each.get() for each in used]
            own = [self._begun(each) for each in used]
            try:
                data = next(batches)
            except StopIteration:
                return
            finally:
                for each, before, first in zip(used, common, own, strict=True):
                    each.own = each.get()
                    each.draws |= not each.same(first, each.own)
                    each.set(before)
            self._fetches += 1
            if used:
                self.drawn_from = [each.name for each in self._generators if each.draws]
            yield data

    def _begun(self, generator: _Generator) -> Any:
        """Set a generator to this rank's state, and return it."""
        if generator.own is None:
            generator.seed(self._seed)
            generator.own = generator.get()
        else:
            generator.set(generator.own)
        return generator.own


def draws_differ(
    kind: str, modules: list[str], by_dlio: bool, workers: int, has_generator: bool
) -> str:
    """Return a notice of samples that draw other random numbers than in one process.

    Args:
        kind: name of the data set's class.
        modules: those whose numbers samples draw in the script's process; none if dlio draws
            instead, or a loader's workers.
        has_generator: True if the loader's order is drawn from a generator of its own.
    """
    such = "" if has_generator else ", such as the next pass's order,"
    remedy = "they are" if has_generator else "or its generator= the order is"
    remedy = f"not one process's; with the loader's num_workers=1 {remedy}"
    if by_dlio:
        later = "" if workers else f": numbers that are drawn afterwards{such} are {remedy}"
        return (
            f"dlio draws the random numbers by which samples of {kind} are transformed, the same "
            "on any number of ranks, but others than the transforms draw in one process without "
            f"dlio{later}"
        )
    if modules:
        return (
            f"samples of {kind} draw random numbers of {' and '.join(modules)} in the script's "
            "process, and each rank draws for its own samples: numbers drawn from these "
            f"afterwards{such} are the same on all ranks, but {remedy}"
        )
    return (
        f"samples of {kind} draw random numbers in the loader's workers, and those of a rank draw "
        "for its own samples: they are not one process's, and the training is as that of one "
        "process with another seed"
    )

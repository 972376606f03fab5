"""The order of an epoch: a keyed bijection between positions and samples, in O(1) memory.

An order is a formula. Every rank evaluates any part of it, in either direction, without a
message and without a table, so an epoch is known before it starts: the samples that each rank
consumes and sends, the samples left after a crash, and the order of the next epoch.

The bijection is a generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002) over pairs (left, right) of Z_a x Z_b with a·b barely above n: each round adds a
keyed hash of one half to the other, modulo that half's range. The few values beyond n walk the
cycle until they fall below it. Small n, where a network over tiny halves is a poor shuffle, sort
keyed hashes instead. Only integer arithmetic modulo 2^64 is used, so results are the same on
every machine and under every version of Python and numpy.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.util.units import counted

MAX_SAMPLES = 2**40
_SORTED_UP_TO = 4096
_ROUNDS = 8
_CHUNK = 1 << 14
"""Positions evaluated at a time: their temporaries fit in the second-level cache."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1

_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """The order in which one epoch visits the samples of a data set.

    Cost 0.03 µs a position in arrays of thousands, and 0.1 ms for a small array.
    """

    n: int
    """Number of samples, 1 to 2^40."""
    seed: int
    """0 to 2^64 - 1."""
    epoch: int = 0
    shuffled: bool = True
    """False: position i is sample i."""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise UsageError(f"an order of {counted(self.n, 'sample')}: 1 to 2^40 are possible")
        if not 0 <= self.seed <= _MASK or not 0 <= self.epoch <= _MASK:
            raise UsageError(f"seed {self.seed} and epoch {self.epoch} must be 0 to 2^64 - 1")

    def __len__(self) -> int:
        return self.n

    def samples(self, positions: _I64) -> _I64:
        """Return the samples at `positions`; same shape. Raises IndexError outside 0 to n - 1."""
        return self._map(np.asarray(positions, np.int64), inverse=False)

    def positions(self, samples: _I64) -> _I64:
        """Return the positions of `samples`, the inverse of `samples`; same shape."""
        return self._map(np.asarray(samples, np.int64), inverse=True)

    def _map(self, given: _I64, inverse: bool) -> _I64:
        self._check(given)
        if not self.shuffled:
            return given.copy()
        if self.n <= _SORTED_UP_TO:
            forward, backward = _sorted_hashes(self.n, self.seed, self.epoch)
            return (backward if inverse else forward)[given]
        flat = given.reshape(-1)
        result = np.empty(flat.shape, np.int64)
        network = _network(self.n, self.seed, self.epoch)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK].astype(np.uint64)
            mapped = network.apply(part, inverse)
            while len(outside := np.flatnonzero(mapped >= np.uint64(self.n))):
                mapped[outside] = network.apply(mapped[outside], inverse)
            result[start : start + _CHUNK] = mapped
        return result.reshape(given.shape)

    def _check(self, given: _I64) -> None:
        # As numbers without a sign, negative ones are large.
        if given.size and int(np.maximum.reduce(given.view(np.uint64), axis=None)) >= self.n:
            wrong = given[(given < 0) | (given >= self.n)].flat[0]
            raise IndexError(f"{wrong} is not within an order of {counted(self.n, 'sample')}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place of a pass over the data: all positions below `position` have been consumed.

    The whole state of a loader; independent of the number of ranks.
    """

    seed: int
    epoch: int
    position: int
    samples: int
    """Number of samples in the data set."""

    def as_dict(self) -> dict[str, int]:
        return {"format": 1, **asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> "Cursor":
        """Read the result of `as_dict`.

        Raises UsageError that names a value which is missing or out of range.
        """
        if state.get("format") != 1:
            raise UsageError(
                f"loader state of format {state.get('format')!r}: this version of dlio reads 1"
            )
        limits = {"seed": _MASK, "epoch": _MASK, "samples": MAX_SAMPLES, "position": MAX_SAMPLES}
        values: dict[str, int] = {}
        for name, limit in limits.items():
            value = state.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
                raise UsageError(
                    f"loader state with {name} {value!r}: a whole number from 0 to {limit} is "
                    "expected; was it written by state_dict()?"
                )
            values[name] = value
        cursor = cls(**values)
        places = cursor.samples + len(again_of(state))
        # An epoch of a mixture has its own length.
        if cursor.position > places and "mixture" not in state:
            raise UsageError(
                f"loader state at position {cursor.position} of only {counted(places, 'sample')}: "
                "was it written by state_dict()?"
            )
        return cursor


def again_of(state: Mapping[str, object]) -> tuple[int, ...]:
    """Return the samples that are requeued at the end of a state's epoch. Raises UsageError."""
    again = state.get("again", ())
    if not isinstance(again, list | tuple) or any(
        type(sample) is not int or not 0 <= sample < MAX_SAMPLES for sample in again
    ):
        raise UsageError(
            f"loader state with again {again!r}: a list of samples is expected; was it written by "
            "state_dict()?"
        )
    return tuple(again)


def share(count: int, parts: int, part: int) -> range:
    """Return part number `part` of `range(count)` cut into `parts`; sizes differ by at most 1."""
    return range(count * part // parts, count * (part + 1) // parts)


def keyed_uniforms(
    seed: int, epoch: int, samples: _I64, count: int, stream: int = 0
) -> npt.NDArray[np.float64]:
    """Draw random numbers that belong to samples: every rank draws the same ones. There are `count`
    for each sample; those of different `stream`s are independent.

    Returns: in [0, 1), shape (n, count). The first ones are the same for any `count`.

    Cost 7 ns a number.
    """
    key = np.uint64(_key(seed, epoch, 0x5EED + stream))
    base = mix(np.asarray(samples, np.int64).astype(np.uint64), key)
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    bits = mix(base[:, None] + counters, np.uint64(0))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keyed_words(seed: int, epoch: int, sample: int, stream: int = 0) -> Iterator[int]:
    """Yield one sample's random numbers without end, as 64 bits each.

    `word >> 11`, times 2**-53, are the numbers of `keyed_uniforms`. Cost 0.6 µs a number.
    """
    # The k-th number, from 1, is the sum of this and k GOLDEN, mixed.
    state = _mixed((sample + _key(seed, epoch, 0x5EED + stream)) & _MASK)
    while True:
        state = (state + GOLDEN) & _MASK
        yield _mixed(state)


def _mixed(x: int) -> int:
    """Mix 64 bits as `mix` does, in plain integers."""
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)


class _Network:
    """The Feistel network of one (n, seed, epoch)."""

    __slots__ = ("_keys", "_left", "_right")

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._left = math.isqrt(n - 1) + 1
        self._right = -(-n // self._left)
        self._keys = [np.uint64(_key(seed, epoch, k)) for k in range(_ROUNDS)]

    def apply(self, values: _U64, inverse: bool) -> _U64:
        """Map values below left·right one to one onto themselves."""
        left_range, right_range = np.uint64(self._left), np.uint64(self._right)
        left = values // right_range
        right = values - left * right_range
        rounds = list(enumerate(self._keys))
        for k, key in reversed(rounds) if inverse else rounds:
            if k % 2:
                right = _add(right, left, key, right_range, inverse)
            else:
                left = _add(left, right, key, left_range, inverse)
        mapped: _U64 = left * right_range + right
        return mapped


def _add(half: _U64, other: _U64, key: np.uint64, size: np.uint64, inverse: bool) -> _U64:
    """half ± hash(other) modulo size."""
    bits = mix(other, key)
    bits >>= np.uint64(32)
    # 32 hash bits scaled to [0, size): size is at most 2^20, so the bias is below 2^-12.
    bits *= size
    bits >>= np.uint64(32)
    if inverse:
        bits = size - bits
    bits += half
    bits -= size * (bits >= size)
    return bits


def mix(values: _U64, key: np.uint64) -> _U64:
    """Mix 64 bits thoroughly (the finaliser of splitmix64; Steele, Lea and Flood, 2014)."""
    x = values + key
    x ^= x >> np.uint64(30)
    x *= np.uint64(MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(MIX_2)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=256)
def _key(seed: int, epoch: int, number: int) -> int:
    """A 64-bit key for one purpose, from seed and epoch: splitmix64 in plain integers."""
    state = 0
    for word in (seed, epoch, number):
        state = _mixed((state + word + GOLDEN) & _MASK)
    return state


_network = lru_cache(maxsize=16)(_Network)


@lru_cache(maxsize=16)
def _sorted_hashes(n: int, seed: int, epoch: int) -> tuple[_I64, _I64]:
    """A small permutation and its inverse, as tables of at most 64 KiB."""
    hashes = mix(
        np.arange(n, dtype=np.uint64) * np.uint64(GOLDEN & 0xFFFFFFFF),
        np.uint64(_key(seed, epoch, 0)),
    )
    forward = np.argsort(hashes, kind="stable").astype(np.int64)
    backward = np.empty_like(forward)
    backward[forward] = np.arange(n)
    return forward, backward

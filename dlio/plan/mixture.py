"""A weighted mixture of sources as a formula: the sample at each position of an epoch. Pure.

Each whole global batch has the largest-remainder share of every source (`dlio.plan.fair_counts`);
its samples are shuffled by a key of (seed, epoch, batch). The draws from a source are numbered
since the run began: draw g is at position g % n of the source's own epoch g // n, whose order is a
keyed permutation (`dlio.plan.order`). So a source goes round in its own epochs, sees all its
samples before it repeats one, and continues where the last epoch of the mixture stopped.

An epoch consists of segments, in each of which weights and global batch are fixed. The state of a
loader holds the segments of its epoch, with the draws before each, so that a run that is resumed
continues exactly: on other ranks, or with weights that have changed since. The promises on counts
hold within each segment.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import UsageError
from dlio.plan.fair_counts import fair_counts, largest_remainder
from dlio.plan.mixture_end import end_of
from dlio.plan.order import GOLDEN, MAX_SAMPLES, Order, mix
from dlio.util.units import counted

_I64 = npt.NDArray[np.int64]
Weights = tuple[Fraction, ...]
"""Of each source; sum 1."""
_KEYS: Final = 1 << 20
"""Keys of batches' shuffles that are made at a time."""
_FRACTION: Final = re.compile(r"\d{1,2000}(/\d{1,2000})?")
_MOST_SEGMENTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class MixtureSegment:
    """A run of an epoch's positions with the same weights and the same global batch."""

    position: int
    """First position of the epoch."""
    batch: int
    """Samples of a global batch."""
    weights: Weights
    drawn: tuple[int, ...]
    """Samples of each source before it, since the run began."""


@dataclass(frozen=True, slots=True)
class MixtureRule:
    """The facts of a mixture that all ranks agree on."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of samples of each source."""
    exhaustion: str
    """One of `dlio.plan.mixture_end.EXHAUSTION`."""
    samples: int | None
    """Samples of an epoch, for `repeat`."""
    schedule: tuple[tuple[int, Weights], ...]
    """(step of the run from which on they hold, weights); the first at step 0."""

    def epoch(
        self,
        epoch: int,
        position: int,
        batch: int,
        drop_last: bool,
        state: object = None,
        again: int = 0,
    ) -> "MixtureEpoch":
        """Return an epoch, with `again` samples requeued at its end, as it continues at a position
        with global batches of `batch` samples.

        `state` is a text of `MixtureEpoch.text` or `following`; None for an epoch of a run that has
        used this schedule from its beginning. Raises UsageError for that of another mixture.
        """
        if state is None:
            if position:
                raise UsageError(
                    "loader state in the middle of an epoch of a mixture, without its ledger: "
                    "was it written by state_dict()?"
                )
            step, drawn = self._before(epoch, batch, drop_last)
            return self._begun(step, drawn, batch)
        given = _parsed(state, self)
        if not given["segments"]:
            return self._begun(given["step"], given["drawn"], batch)
        begun = MixtureEpoch(self, given["step"], given["n"], given["segments"])
        if position > begun.n + again:
            raise UsageError(
                f"loader state at position {position} of an epoch of {counted(begun.n, 'sample')}: "
                "was it written by state_dict()?"
            )
        return begun.resumed(position, batch) if position else begun

    def scheduled(self, state: object) -> "MixtureRule":
        """Return this mixture with the weights of a loader's state. Raises UsageError."""
        return replace(self, schedule=_parsed(state, self)["schedule"])

    def _before(self, epoch: int, batch: int, drop_last: bool) -> tuple[int, tuple[int, ...]]:
        """Return (steps, samples of each source) before an epoch, with this schedule alone."""
        step, drawn = 0, (0,) * len(self.names)
        while epoch > 0:
            begun = self._begun(step, drawn, batch)
            turns = 1
            if step >= self.schedule[-1][0]:  # All the others are the same.
                turns = epoch
            after = begun.drawn(begun.n)
            drawn = tuple(a + turns * (b - a) for a, b in zip(drawn, after, strict=True))
            step += turns * begun.steps(drop_last)
            epoch -= turns
        return step, drawn

    def _begun(self, step: int, drawn: tuple[int, ...], batch: int) -> "MixtureEpoch":
        """Plan an epoch whose first step is `step` of the run."""
        first = max(k for k, (begin, _) in enumerate(self.schedule) if begin <= step)
        position, had = 0, (0,) * len(self.names)
        segments: list[MixtureSegment] = []
        for k in range(first, len(self.schedule)):
            weights = self.schedule[k][1]
            before = _sums(drawn, had)
            segments.append(MixtureSegment(position, batch, weights, before))
            steps = None
            if k + 1 < len(self.schedule):
                steps = self.schedule[k + 1][0] - max(step, self.schedule[k][0])
            end = end_of(
                self.exhaustion, weights, batch, steps, had, self.sizes, self.samples, position
            )
            if end is not None:
                return MixtureEpoch(self, step, end, tuple(segments))
            assert steps is not None
            had = _sums(had, fair_counts(weights, batch).after(steps))
            position += steps * batch
        raise AssertionError("the last weights of a schedule have no end")


@dataclass(frozen=True, slots=True)
class MixtureEpoch:
    """One epoch of a mixture."""

    mixing: MixtureRule
    step: int
    """First step, counted since the run began."""
    n: int
    """Number of positions."""
    segments: tuple[MixtureSegment, ...]
    """By position; the first at 0."""

    def order(self, seed: int, epoch: int, shuffled: bool) -> "MixtureOrder":
        return MixtureOrder(self.n, seed, epoch, shuffled, self)

    def steps(self, drop_last: bool) -> int:
        """Count the epoch's steps."""
        ends = [*(each.position for each in self.segments[1:]), self.n]
        steps = 0
        for segment, end in zip(self.segments, ends, strict=True):
            whole, rest = divmod(end - segment.position, segment.batch)
            steps += whole + bool(rest and not drop_last)
        return steps

    def drawn(self, position: int) -> tuple[int, ...]:
        """Return the samples of each source before a position, since the run began.

        The position is one between two batches of its segment, or the end of the epoch.
        """
        segment = next(each for each in reversed(self.segments) if each.position <= position)
        batches, rest = divmod(position - segment.position, segment.batch)
        counts = fair_counts(segment.weights, segment.batch)
        return _sums(segment.drawn, counts.after(batches, rest))

    def resumed(self, position: int, batch: int) -> "MixtureEpoch":
        """Return the epoch as it continues at a position with other global batches.

        Its length stays, and so do later changes of weights, but for the batch that they fall in.
        """
        here = next(each for each in reversed(self.segments) if each.position <= position)
        if position >= self.n or (here.batch == batch and (position - here.position) % batch == 0):
            return self
        kept = [each for each in self.segments if each.position < position]
        kept.append(MixtureSegment(position, batch, here.weights, self.drawn(position)))
        for later in self.segments[self.segments.index(here) + 1 :]:
            begin = position - (position - later.position) // batch * batch
            if begin >= self.n:
                break
            drawn = replace(self, segments=tuple(kept)).drawn(begin)
            if kept[-1].position == begin:
                kept.pop()
            kept.append(MixtureSegment(begin, batch, later.weights, drawn))
        return replace(self, segments=tuple(kept))

    def text(self, position: int) -> str:
        """Return the ledger of this epoch at a position, for a loader's state."""
        if not position:
            return self._text(self.step, self.segments[0].drawn, ())
        return self._text(self.step, self.segments[0].drawn, self.segments)

    def following(self, drop_last: bool) -> str:
        """Return the ledger at the beginning of the next epoch."""
        return self._text(self.step + self.steps(drop_last), self.drawn(self.n), ())

    def _text(self, step: int, drawn: tuple[int, ...], segments: tuple[MixtureSegment, ...]) -> str:
        ledger = {
            "sources": list(zip(self.mixing.names, self.mixing.sizes, strict=True)),
            "schedule": [[begin, _written(weights)] for begin, weights in self.mixing.schedule],
            "step": step,
            "drawn": drawn,
            "n": self.n if segments else 0,
            "segments": [
                [each.position, each.batch, _written(each.weights), each.drawn] for each in segments
            ],
        }
        return json.dumps(ledger, separators=(",", ":"))


@dataclass(frozen=True)
class MixtureOrder(Order):
    """The order of an epoch of a mixture: positions -> samples of all sources, side by side.

    A sample may stand at several positions, so the order has no inverse.

    Cost: for each batch of which a position is asked for, that of sorting its samples; memory, that
    of 2^20 samples.
    """

    mixed: MixtureEpoch | None = None

    def _map(self, given: _I64, inverse: bool) -> _I64:
        if inverse:
            raise UsageError("a sample of a mixture may have several positions: ask for samples")
        self._check(given)
        flat = given.reshape(-1)
        result = np.empty(flat.shape, np.int64)
        segments = self._mixed.segments
        owner = np.searchsorted([each.position for each in segments], flat, side="right") - 1
        for number in np.unique(owner).tolist():
            here = np.flatnonzero(owner == number)
            source, draw = self._draws(segments[number], flat[here])
            result[here] = self._samples(source, draw)
        return result.reshape(given.shape)

    @property
    def _mixed(self) -> MixtureEpoch:
        assert self.mixed is not None
        return self.mixed

    def _draws(self, segment: MixtureSegment, positions: _I64) -> tuple[_I64, _I64]:
        """Return (source, draw from it since the run began) of positions of a segment."""
        batch, slot = np.divmod(positions - segment.position, segment.batch)
        batches, row = np.unique(batch, return_inverse=True)
        before = fair_counts(segment.weights, segment.batch).totals(batches)
        after = fair_counts(segment.weights, segment.batch).totals(batches + 1)
        sizes = np.full(len(batches), segment.batch, np.int64)
        left = self.n - segment.position - batches[-1:] * segment.batch
        if len(left) and left[0] < segment.batch:
            had = tuple(before[-1].tolist())
            consumed = int(batches[-1]) * segment.batch
            last = largest_remainder(segment.weights, had, consumed, int(left[0]))
            sizes[-1], after[-1] = left[0], before[-1] + np.array(last)
        place = self._shuffled(segment, batches, sizes, row, slot)
        edges = np.cumsum(after - before, axis=1)
        source = (edges[row] <= place[:, None]).sum(1)
        begins = edges - (after - before)
        drawn = np.array(segment.drawn, np.int64)[source] + before[row, source]
        return source, drawn + place - begins[row, source]

    def _shuffled(
        self, segment: MixtureSegment, batches: _I64, sizes: _I64, row: _I64, slot: _I64
    ) -> _I64:
        """Return the place of each slot in its batch before the batch is shuffled."""
        place = np.empty_like(slot)
        word = f"{self.seed}/{self.epoch}/batch/{segment.position}".encode()
        keys = mix(batches.astype(np.uint64), np.uint64(xxhash.xxh3_64_intdigest(word)))
        slots = np.arange(segment.batch, dtype=np.uint64) * np.uint64(GOLDEN)
        each = max(1, _KEYS // segment.batch)
        for first in range(0, len(batches), each):
            part = slice(first, first + each)
            hashes = mix(keys[part, None] + slots, np.uint64(0))
            hashes[np.arange(segment.batch) >= sizes[part, None]] = np.uint64(2**64 - 1)
            table = np.argsort(hashes, axis=1, kind="stable")
            here = np.flatnonzero((row >= first) & (row < first + each))
            place[here] = table[row[here] - first, slot[here]]
        return place

    def _samples(self, source: _I64, draw: _I64) -> _I64:
        mixing, result, first = self._mixed.mixing, np.empty(len(draw), np.int64), 0
        for number, size in enumerate(mixing.sizes):
            here = np.flatnonzero(source == number)
            turn, place = np.divmod(draw[here], size)
            seed = xxhash.xxh3_64_intdigest(f"{self.seed}/source/{number}".encode())
            inner = np.empty(len(here), np.int64)
            for each in np.unique(turn).tolist():
                now = turn == each
                inner[now] = Order(size, seed, each, self.shuffled).samples(place[now])
            result[here] = first + inner
            first += size
        return result


def _sums(counts: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(counts, more, strict=True))


def _written(weights: Weights) -> str:
    return " ".join(map(str, weights))


def _parsed(state: object, mixing: MixtureRule) -> dict[str, Any]:
    """Return the ledger in a loader's state. Raises UsageError for that of another mixture."""
    try:
        ledger = json.loads(str(state))
        sources = [(str(name), int(size)) for name, size in ledger["sources"]]
        parsed = {
            "schedule": tuple((_whole(k), _weights(w, mixing)) for k, w in ledger["schedule"]),
            "step": _whole(ledger["step"]),
            "drawn": _counts(ledger["drawn"], mixing),
            "n": _whole(ledger["n"]),
            "segments": tuple(
                MixtureSegment(_whole(p), _whole(b), _weights(w, mixing), _counts(d, mixing))
                for p, b, w, d in ledger["segments"]
            ),
        }
        _check(parsed)
    except (KeyError, ValueError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise UsageError(
            f"loader state with a damaged ledger of a mixture ({error}): was it written by "
            "state_dict()?"
        ) from error
    if [size for _, size in sources] != list(mixing.sizes):  # Paths may have moved.
        then = ", ".join(f"{name} ({size})" for name, size in sources)
        now = ", ".join(
            f"{name} ({size})" for name, size in zip(mixing.names, mixing.sizes, strict=True)
        )
        raise UsageError(f"loader state of a mixture of {then}: this one is of {now}")
    return parsed


def _check(ledger: Mapping[str, Any]) -> None:
    """Raise ValueError for a ledger that makes no epoch."""
    begins = [begin for begin, _ in ledger["schedule"]]
    positions = [each.position for each in ledger["segments"]]
    if begins[:1] != [0] or any(b <= a for a, b in pairwise(begins)):
        raise ValueError("steps of the schedule")
    if len(positions) > _MOST_SEGMENTS or any(each.batch < 1 for each in ledger["segments"]):
        raise ValueError("segments")
    if positions and (
        positions[0] != 0
        or positions[-1] >= ledger["n"]
        or any(b <= a for a, b in pairwise(positions))
    ):
        raise ValueError("positions of segments")


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SAMPLES:
        raise ValueError(f"{value!r} where a whole number is expected")
    return value


def _counts(values: Mapping[int, object], mixing: MixtureRule) -> tuple[int, ...]:
    if len(values) != len(mixing.names):
        raise ValueError("counts of other sources")
    return tuple(map(_whole, values))


def _weights(text: object, mixing: MixtureRule) -> Weights:
    parts = str(text).split(" ")
    if len(parts) != len(mixing.names):
        raise ValueError("weights of other sources")
    if not all(map(_FRACTION.fullmatch, parts)):
        raise ValueError("weights that are not fractions")
    weights = tuple(map(Fraction, parts))
    if sum(weights) != 1 or min(weights) < 0:
        raise ValueError(f"weights {text}")
    return weights

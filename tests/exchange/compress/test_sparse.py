"""Sparse compressors: shares, rules for levels, and damaged messages."""

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import CommError
from dlio.exchange.compress.message_layout import CHUNK, ChunkScratch, pieces_of
from dlio.exchange.compress.sparse import (
    ROOM,
    SHARE,
    LevelRule,
    SparseCompressor,
    _entries,
    _entries_of_trits,
    _steps,
    _trits,
    plan,
)
from dlio.exchange.compress.threshold import ThresholdLevel
from tests.conftest import examples
from tests.exchange.compress.compressing import KINDS, Layout, drawn, encoded, make


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_never_outgrow_their_share(name: str, kind: str) -> None:
    count = 300_000
    compressor = make(name, [("w", (count // 1000, 1000))])
    residual = np.zeros(count, np.float32)
    for step in range(4):
        q, used = encoded(compressor, drawn(kind, count, step) * np.float32(0.25), residual)
        assert np.count_nonzero(q) <= count // ROOM
        assert used <= compressor.max_bytes <= 4 * count / 100


@given(st.lists(st.integers(1, 10**7), max_size=40))
def test_shares_of_tensors_add_up(drawn_sizes: list[int]) -> None:
    sizes = np.array(drawn_sizes, np.int64)
    whole, ratios = plan(sizes)
    taken = (-(-sizes // 5))[whole].sum()
    assert taken <= sizes.sum() / SHARE / 2
    assert taken + (sizes / ratios)[~whole].sum() == pytest.approx(sizes.sum() / SHARE)
    sizes, ratios = sizes[~whole], ratios[~whole]
    order = np.argsort(sizes)
    assert (np.diff(ratios[order]) >= -1e-6).all()
    assert (np.diff((sizes / ratios)[order]) >= -1e-6).all()
    assert ((ratios >= 4) & (ratios <= 64)).all()


def _normals(steps: int, count: int) -> Iterator[npt.NDArray[np.float32]]:
    """Normal values for each step: another part of one draw, which costs more than all else."""
    pool = np.random.default_rng(0).standard_normal(2 * count, np.float32)
    for step in range(steps):
        start = step * 7919 % count
        yield pool[start : start + count].copy()


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
def test_larger_shares_of_small_tensors_are_sent_within_the_same_bytes(name: str) -> None:
    layout: Layout = [("head", (40, 256)), ("conv", (256, 256, 3, 3)), ("other", (256, 128, 3, 3))]
    compressor = make(name, layout)
    residual = np.zeros(compressor.entries, np.float32)
    counts, lengths = [], []
    for values in _normals(100, compressor.entries):
        q, used = encoded(compressor, values, residual)
        counts.append([np.count_nonzero(q[p.start : p.stop]) for p in pieces_of(layout)])
        lengths.append(used)
        assert used <= compressor.max_bytes <= compressor.entries / ROOM + 12 * len(layout)
    head, conv, other = np.mean(counts[50:], axis=0)
    assert 0.3 <= head / 10_240 <= 0.5
    assert 0.8 <= (10_240 / 5 + conv + other) / (compressor.entries / SHARE) <= 1.2
    assert 0.8 <= np.mean(lengths[50:]) / (compressor.entries / SHARE) <= 1.2
    assert 0.8 <= conv / other / np.sqrt(2) <= 1.2


class _ConstantThreshold(ThresholdLevel):
    """A threshold that does not adapt."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def level(self, tensor: int, sample: npt.NDArray[np.float32], ratio: float) -> float:
        return self._threshold


@pytest.mark.parametrize(
    "rule", [_ConstantThreshold(0.25), LevelRule()], ids=["threshold", "adaptive"]
)
def test_every_entry_is_sent_in_turn_when_the_share_is_too_small_for_all(
    rule: ThresholdLevel | LevelRule,
) -> None:
    count = 3 * CHUNK + 64
    compressor = SparseCompressor(pieces_of([("w", (64, count // 64))]), ChunkScratch(), rule)
    residual = np.zeros(count, np.float32)
    values = np.full(count, 0.25, np.float32)
    times = np.zeros(count, np.int64)
    for _ in range(4 * ROOM):
        q, _ = encoded(compressor, values, residual)
        times += q != 0
    assert times.min() >= 3
    assert times.max() <= 5


def test_entries_beyond_the_threshold_are_sent_at_one_size_and_the_rest_is_residual() -> None:
    compressor = SparseCompressor(
        pieces_of([("w", (300, 1000))]), ChunkScratch(), _ConstantThreshold(4.0)
    )
    values = drawn("heavy", 300_000, 0) * np.float32(1000)
    residual = np.zeros_like(values)
    q, used = encoded(compressor, values, residual)
    sent = np.abs(values) >= 4
    order = np.flatnonzero(sent)[: np.count_nonzero(q)]
    expected = np.zeros_like(values)
    expected[order] = 5 * np.sign(values[order])
    assert np.array_equal(q, expected)
    assert used == compressor.max_bytes


@pytest.mark.parametrize("change", [8, 1 / 4])
@pytest.mark.daily("8")
def test_thresholds_follow_their_share_up_and_down(change: float) -> None:
    """Each tensor's threshold moves by a few bits per step; a quarter more may be sent."""
    compressor = make("threshold", [("w", (100, 1000)), ("v", (100, 1000))])
    zero, residual = np.zeros(200_000, np.float32), np.zeros(200_000, np.float32)
    assert not encoded(compressor, zero, residual)[0].any()
    counts, levels = [], []
    for step, values in enumerate(_normals(300, 200_000)):
        values[100_000:] *= 1000
        q, _ = encoded(compressor, values * np.float32(change if step >= 100 else 1), residual)
        halves = np.split(q, 2)
        counts.append([np.count_nonzero(half) for half in halves])
        first, second = (np.unique(np.abs(half[half != 0])) for half in halves)
        assert len(first) == len(second) == 1
        assert 400 <= second[0] / first[0] <= 2500
        assert (math.frexp(first[0] / 1.25)[0] * 16).is_integer()
        levels.append(float(first[0]))
    for when in (slice(60, 100), slice(260, 300)):
        for mean in np.mean(counts[when], axis=0):
            assert 0.8 <= mean / (100_000 / SHARE) <= 1.2
    assert change / 2 <= np.mean(levels[260:]) / np.mean(levels[60:100]) <= 2 * change


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.integers(1, 700), max_size=300),
    st.integers(0, 2**32),
)
def test_gaps_of_any_length_are_read_as_they_were_written(gaps: list[int], seed: int) -> None:
    ahead = np.cumsum(gaps, dtype=np.int64) - 1
    negative = np.random.default_rng(seed).random(len(gaps)) < 0.5
    steps = _steps(ahead, negative)
    assert len(steps) == sum(1 + (gap - 1) // 127 for gap in gaps)
    again, signs = _entries(steps)
    assert np.array_equal(again, ahead)
    assert np.array_equal(signs, negative)


@settings(deadline=None)
@given(st.integers(0, 700), st.floats(0, 1), st.integers(0, 2**32))
def test_trits_are_read_as_they_were_written(size: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = np.flatnonzero(rng.random(size) < share)
    negative = rng.random(len(places)) < 0.5
    trits = _trits(places, negative, size)
    assert len(trits) == -(-size // 5)
    again, signs = _entries_of_trits(trits, size)
    assert np.array_equal(again, places)
    assert np.array_equal(signs, negative)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_adaptive_sends_the_largest_entries_as_the_mean_of_their_sign(seed: int) -> None:
    count = 250_000
    compressor = SparseCompressor(
        pieces_of([("w", (250, 1000))]), ChunkScratch(), LevelRule(), seed
    )
    values = drawn("heavy", count, seed)
    values[:1000] += 0.01
    residual = np.zeros_like(values)
    q, _ = encoded(compressor, values, residual)
    sent = q != 0
    room = np.count_nonzero(np.abs(values) >= np.abs(values[sent]).min()) <= count // (ROOM + 2)
    if room:
        assert count / SHARE / 4 <= np.count_nonzero(sent)
    for side, sign in ((q > 0, 1), (q < 0, -1)):
        assert len(np.unique(q[side])) == 1
        sizes = sign * values[side]
        expected = min(sizes.mean(dtype=np.float64), 2 * sizes.min())
        assert abs(q[side][0]) == pytest.approx(expected, rel=2**-7)
        if room:
            assert sizes.min() >= (sign * values[~sent]).max()


def test_one_entry_far_beyond_the_others_goes_first() -> None:
    compressor = make("adaptive", [("w", (300, 1000))])
    values = drawn("heavy", 300_000, 0)
    values[12_345] = 1e6
    residual = np.zeros_like(values)
    q, _ = encoded(compressor, values, residual)
    assert np.flatnonzero(q > 0).tolist() == [12_345]
    assert 0 <= residual[12_345] <= 1e4
    # Each message shortens its residual by 8 bits.
    for _ in range(12):
        q, _ = encoded(compressor, np.zeros_like(values), residual)
    assert np.count_nonzero(q > 0) > 100


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
@pytest.mark.parametrize(
    ("word", "damage"), [(1, 2000), (2, 1000), (2, 2**32 - 1), (None, 127)], ids=str
)
def test_a_damaged_message_is_refused(name: str, word: int | None, damage: int) -> None:
    """A start beyond the end, more bytes than the message has, entries beyond the end."""
    compressor = make(name, [("w", (40, 50))])
    values = drawn("heavy", 2000, 0)
    message = np.empty(compressor.max_bytes, np.uint8)
    used = compressor.encode(values, np.zeros_like(values), message)
    if word is None:
        message[12:used] = damage - 1
    else:
        message[:12].view(np.uint32)[word] = damage
    with pytest.raises(CommError, match="damaged"):
        compressor.add(message, np.zeros_like(values))


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
@pytest.mark.parametrize(("word", "damage"), [(1, 1500), (2, 200), (None, 243)], ids=str)
def test_a_damaged_tensor_that_is_written_whole_is_refused(
    name: str, word: int | None, damage: int
) -> None:
    compressor = make(name, [("w", (50, 30)), ("v", (1000, 100))])
    message = np.empty(compressor.max_bytes, np.uint8)
    values = drawn("heavy", compressor.entries, 0)
    compressor.encode(values, np.zeros_like(values), message)
    assert message[:12].view(np.uint32)[2] == 300
    if word is None:
        message[24] = damage
    else:
        message[:12].view(np.uint32)[word] = damage
    with pytest.raises(CommError, match="damaged"):
        compressor.add(message, np.zeros_like(values))


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
def test_a_message_that_is_cut_off_is_refused(name: str) -> None:
    compressor = make(name, [("w", (40, 50))])
    values = drawn("heavy", 2000, 0)
    message = np.empty(compressor.max_bytes, np.uint8)
    used = compressor.encode(values, np.zeros_like(values), message)
    for length in range(used):
        with pytest.raises(CommError, match="damaged"):
            compressor.add(message[:length], np.zeros_like(values))


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
@given(st.binary(max_size=2000))
def test_random_messages_write_nothing_outside_of_the_region(name: str, noise: bytes) -> None:
    compressor = make(name, [("w", (40, 50)), ("b", (3,)), ("v", (40, 50))])
    message = np.zeros(compressor.max_bytes, np.uint8)
    message[: len(noise)] = np.frombuffer(noise, np.uint8)[: len(message)]
    memory = np.zeros(compressor.entries + 2000, np.float32)
    with contextlib.suppress(CommError), np.errstate(all="ignore"):
        compressor.add(message, memory[1000:-1000])
    assert not memory[:1000].any()
    assert not memory[-1000:].any()

"""Compressors: nothing is lost, nothing is longer than promised, and all is counted."""

import contextlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlio.errors import CommError, DlioError, UsageError
from dlio.train.exchange.compress import NAMES, Compressor, make_compressor
from dlio.train.exchange.compress.adaptive import Adaptive
from dlio.train.exchange.compress.layout import (
    CHUNK,
    Piece,
    Scratch,
    chunks,
    is_small,
    pieces_of,
    split,
)
from dlio.train.exchange.compress.sparse import (
    ROOM,
    SHARE,
    Sparse,
    _entries,
    _entries_of_trits,
    _steps,
    _trits,
    plan,
)
from dlio.train.exchange.compress.threshold import Threshold

Floats = npt.NDArray[np.float32]
Layout = Sequence[tuple[str, Sequence[int]]]
HALF_MAX = float(np.finfo(np.float32).max) / 2

RESNET: Layout = [
    (f"layer{stage}.{block}.{name}", shape)
    for stage, width in enumerate((64, 128, 256))
    for block in range(2)
    for name, shape in (
        ("conv1.weight", (width, width, 3, 3)),
        ("bn1.weight", (width,)),
        ("bn1.bias", (width,)),
        ("conv2.weight", (width, width, 1, 1)),
        ("bn2.weight", (width,)),
        ("bn2.bias", (width,)),
    )
] + [("fc.weight", (100, 256)), ("fc.bias", (100,))]
MLP: Layout = [
    ("0.weight", (1024, 784)),
    ("0.bias", (1024,)),
    ("1.weight", (1024, 1024)),
    ("1.bias", (1024,)),
    ("2.weight", (10, 1024)),
    ("2.bias", (10,)),
]


def make(name: str, layout: Layout) -> Compressor:
    return make_compressor(name, pieces_of(layout), Scratch())


def encoded(compressor: Compressor, values: Floats, residual: Floats) -> tuple[Floats, int]:
    """What a message stands for, and its length."""
    message = np.full(compressor.max_bytes, 0xA5, np.uint8)
    used = compressor.encode(values, residual, message)
    assert used <= compressor.max_bytes
    decoded = np.zeros(compressor.entries, np.float32)
    compressor.add(message[:used].copy(), decoded)
    return decoded, used


def assert_nothing_is_lost(name: str, v: Floats, q: Floats, r: Floats) -> None:
    """The promise of the package: q + r = v, in float32 and as real numbers."""
    if name == "onebit":
        near = np.abs(v) < np.abs(q).astype(np.float64) / 2
        lost = np.abs(q.astype(np.float64) + r - v)[near]
        assert (lost <= 2.0**-24 * np.abs(q[near].astype(np.float64))).all()
        v, q, r = v[~near], q[~near], r[~near]
    assert np.array_equal(q + r, v)
    total = q.astype(np.float64) + r
    assert np.array_equal(total, v.astype(np.float64))
    # What adding in float64 rounded away: nothing (Knuth's TwoSum).
    taken = total - q
    assert not ((q - (total - taken)) + (r - taken)).any()


def drawn(kind: str, count: int, seed: int) -> Floats:
    """Gradients of many kinds, none beyond half of the largest float32."""
    rng = np.random.default_rng(seed)
    match kind:
        case "heavy":
            values = rng.standard_t(2, count) * 1e-3
        case "huge range":
            values = rng.choice([-1, 1], count) * 10.0 ** rng.uniform(-45, 38, count)
        case "denormal":
            values = rng.normal(size=count) * 1e-42
        case "large":
            values = rng.uniform(-1, 1, count) * HALF_MAX
        case "constant":
            values = np.full(count, rng.normal())
        case "one sign":
            values = rng.exponential(size=count)
        case "mostly zero":
            values = rng.normal(size=count) * (rng.random(count) < 1e-3)
        case "one beyond all":
            values = rng.normal(size=count)
            values[rng.integers(count)] = 1e30
        case "small beside large":
            values = rng.normal(size=count) * np.where(rng.random(count) < 0.5, 1, 1e-9)
        case _:
            values = np.zeros(count)
    return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float32)


KINDS = (
    *("heavy", "huge range", "denormal", "large", "constant", "one sign"),
    *("mostly zero", "one beyond all", "small beside large", "zero"),
)
shapes = st.one_of(
    st.tuples(st.integers(0, 3000)),
    st.tuples(st.integers(1, 40), st.integers(1, 3000)),
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 3), st.integers(1, 3)),
    st.just(()),
    st.sampled_from([(70_001,), (3, 40_000), (2, CHUNK), (257, 257)]),
)
layouts = st.lists(shapes, min_size=1, max_size=5).map(
    lambda drawn: [(f"t{number}", shape) for number, shape in enumerate(drawn)]
)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(layouts, st.lists(st.sampled_from(KINDS), min_size=2, max_size=4), st.integers(0, 2**32))
def test_what_is_sent_and_what_is_kept_make_up_the_whole(
    name: str, layout: Layout, kinds: list[str], seed: int
) -> None:
    compressor = make(name, layout)
    residual = np.zeros(compressor.entries, np.float32)
    for step, kind in enumerate(kinds):
        values = drawn(kind, max(1, compressor.entries), seed + step)[: compressor.entries]
        before = values.copy()
        with np.errstate(over="ignore"):
            v = values + residual
        assume(np.isfinite(v).all())
        q, _ = encoded(compressor, values, residual)
        assert np.array_equal(values, before)
        assert_nothing_is_lost(name, v, q, residual)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
        elements=st.floats(-HALF_MAX, HALF_MAX, width=32, allow_subnormal=True),
    )
)
def test_nothing_is_lost_of_any_floats(name: str, values: Floats) -> None:
    """As rational numbers, which round nothing; beside tensors that are not small."""
    flat = values.reshape(-1)
    rows = -(-1025 // len(flat))
    compressor = make(name, [("few", values.shape), ("many", (rows, len(flat)))])
    given_ = np.concatenate([flat, np.tile(flat, rows)])
    residual = np.zeros_like(given_)
    q, _ = encoded(compressor, given_, residual)
    for a, b, c in zip(q.tolist(), residual.tolist(), given_.tolist(), strict=True):
        lost = abs(Fraction(a) + Fraction(b) - Fraction(c))
        assert lost == 0 or (name == "onebit" and abs(c) < abs(a) / 2 and lost <= abs(a) / 2**24)


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_delivers_everything_in_the_end(name: str) -> None:
    layout: Layout = [("w", (60, 100)), ("b", (60,))]
    compressor = make(name, layout)
    rng = np.random.default_rng(0)
    mean = rng.uniform(-1, 1, compressor.entries).astype(np.float32)
    residual = np.zeros_like(mean)
    delivered = np.zeros(len(mean))
    whole = np.zeros(len(mean))
    errors = []
    for _ in range(1200):
        values = mean + rng.normal(size=len(mean)).astype(np.float32)
        whole += values
        q, _ = encoded(compressor, values, residual)
        delivered += q
        errors.append(float(np.abs(residual).max()))
    assert np.allclose(delivered + residual, whole, rtol=1e-4, atol=1e-2)
    # The residual does not grow any more.
    assert max(errors[-200:]) <= 1.3 * max(errors[600:800])
    assert np.abs(delivered / 1200 - mean).max() < (3 if name in ("threshold", "adaptive") else 0.2)


@pytest.mark.parametrize("layout", [RESNET, MLP], ids=["resnet", "mlp"])
@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *(("onebit", 30), ("threshold", 100), ("adaptive", 100)),
        *(("int8", 3.9), ("bf16", 2), ("fp16", 1.99)),
    ],
)
def test_messages_are_as_short_as_promised(name: str, ratio: float, layout: Layout) -> None:
    compressor = make(name, layout)
    assert compressor.entries == sum(math.prod(shape) for _, shape in layout)
    assert 4 * compressor.entries / compressor.max_bytes >= ratio
    residual = np.zeros(compressor.entries, np.float32)
    for step in range(3):
        values = drawn("heavy", compressor.entries, step)
        _, used = encoded(compressor, values, residual)
        assert 4 * compressor.entries / used >= ratio


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_region_are_hardly_longer_than_the_whole(name: str) -> None:
    pieces = pieces_of(RESNET)
    whole = make_compressor(name, pieces, Scratch()).max_bytes
    parts = [make_compressor(name, part, Scratch()).max_bytes for part in split(pieces, 8)]
    assert sum(parts) <= 1.05 * whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 69_999, 70_003, 170_002])
def test_a_gradient_that_is_not_finite_is_refused_by_name(name: str, bad: float, at: int) -> None:
    layout: Layout = [("first", (70, 1000)), ("norm", (5,)), ("last", (100, 1000))]
    compressor = make(name, layout)
    values = drawn("heavy", compressor.entries, 0)
    values[at] = bad
    whose = "first" if at < 70_000 else "norm" if at < 70_005 else "last"
    with pytest.raises(DlioError, match=f"gradient of {whose} .*(nan|inf)"):
        encoded(compressor, values, np.zeros(compressor.entries, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_with_the_residual_that_overflows_is_refused(name: str) -> None:
    compressor = make(name, [("w", (40, 40))])
    values = np.full(1600, np.finfo(np.float32).max)
    with pytest.raises(DlioError, match="gradient of w "):
        encoded(compressor, values, values.copy())


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_floats_are_no_error(name: str) -> None:
    compressor = make(name, [("w", (40, 2000)), ("b", (10,))])
    values = np.full(compressor.entries, np.finfo(np.float32).max)
    values[::3] *= -1
    residual = np.zeros_like(values)
    q, _ = encoded(compressor, values, residual)
    assert np.isfinite(q).all()
    assert_nothing_is_lost(name, values, q, residual)


@pytest.mark.parametrize("name", NAMES)
def test_a_region_of_nothing_has_an_empty_message(name: str) -> None:
    compressor = make(name, [("nothing", (0, 3))])
    assert compressor.entries == compressor.max_bytes == 0
    empty = np.empty(0, np.float32)
    assert encoded(compressor, empty, empty.copy())[1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_any_compressor_of_the_same_pieces_reads_a_message(name: str) -> None:
    ours, theirs = make(name, RESNET), make(name, RESNET)
    residual = np.zeros(ours.entries, np.float32)
    message = np.empty(ours.max_bytes, np.uint8)
    for step in range(3):
        used = ours.encode(drawn("heavy", ours.entries, step), residual, message)
    sums = np.ones((2, ours.entries), np.float32)
    ours.add(message[:used], sums[0])
    theirs.add(message[:used], sums[1])
    assert np.array_equal(sums[0], sums[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients_give_the_same_bytes(name: str) -> None:
    messages = []
    for _ in range(2):
        compressor = make(name, MLP)
        residual = np.zeros(compressor.entries, np.float32)
        message = np.zeros(compressor.max_bytes, np.uint8)
        for step in range(2):
            compressor.encode(drawn("heavy", compressor.entries, step), residual, message)
        messages.append(message.tobytes())
    assert messages[0] == messages[1]


def test_one_bit_sends_each_sign_as_its_mean_in_the_row() -> None:
    compressor = make("onebit", [("w", (7, 2000)), ("long", (2, 40_000)), ("short", (100, 300))])
    values = drawn("heavy", compressor.entries, 1)
    q, _ = encoded(compressor, values, np.zeros(compressor.entries, np.float32))
    groups = [(k * 2000, 2000) for k in range(7)]  # rows
    groups += [(14_000, 32_768), (46_768, 32_768)]  # a long row, cut
    groups += [(94_000 + k * 1200, 1200) for k in range(25)]  # four short rows each
    for start, count in groups:
        v, decoded = values[start : start + count], q[start : start + count]
        for side in (v >= 0, v < 0):
            assert len(set(decoded[side].tolist())) == 1
            assert decoded[side][0] == pytest.approx(v[side].mean(dtype=np.float64), rel=2**-8)


def test_bfloat16_rounds_as_torch_does() -> None:
    compressor = make("bf16", [("w", (300, 300))])
    values = drawn("huge range", compressor.entries, 0)
    q, _ = encoded(compressor, values, np.zeros_like(values))
    assert np.array_equal(q, torch.from_numpy(values).bfloat16().float().numpy())


@pytest.mark.parametrize(("name", "relative"), [("fp16", 2.0**-11), ("int8", 2.0**-7)])
@pytest.mark.parametrize("scale", [1e-35, 1e-10, 1, 1e10, 1e37])
def test_blocks_have_scales_of_their_own(name: str, relative: float, scale: float) -> None:
    compressor = make(name, [("w", (300, 300))])
    values = (np.random.default_rng(0).normal(size=90_000) * scale).astype(np.float32)
    q, _ = encoded(compressor, values, np.zeros_like(values))
    assert np.abs(q - values).max() <= relative * np.abs(values).max()


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


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
def test_small_tensors_are_sent_more_of_within_the_same_bytes(name: str) -> None:
    layout: Layout = [("head", (40, 256)), ("conv", (256, 256, 3, 3)), ("other", (256, 128, 3, 3))]
    compressor = make(name, layout)
    residual = np.zeros(compressor.entries, np.float32)
    counts, lengths = [], []
    for step in range(100):
        values = np.random.default_rng(step).normal(size=compressor.entries).astype(np.float32)
        q, used = encoded(compressor, values, residual)
        counts.append([np.count_nonzero(q[p.start : p.stop]) for p in pieces_of(layout)])
        lengths.append(used)
        assert used <= compressor.max_bytes <= compressor.entries / ROOM + 12 * len(layout)
    head, conv, other = np.mean(counts[50:], axis=0)
    assert 0.3 <= head / 10_240 <= 0.5
    assert 0.8 <= (10_240 / 5 + conv + other) / (compressor.entries / SHARE) <= 1.2
    assert 0.8 <= np.mean(lengths[50:]) / (compressor.entries / SHARE) <= 1.2
    assert 0.8 <= conv / other / np.sqrt(2) <= 1.2


@pytest.mark.parametrize("rule", [Threshold(0.25), Adaptive()], ids=["threshold", "adaptive"])
def test_where_not_all_can_be_sent_each_entry_has_its_turn(rule: Threshold | Adaptive) -> None:
    count = 3 * CHUNK + 64
    compressor = Sparse(pieces_of([("w", (64, count // 64))]), Scratch(), rule)
    residual = np.zeros(count, np.float32)
    values = np.full(count, 0.25, np.float32)
    times = np.zeros(count, np.int64)
    for _ in range(4 * ROOM):
        q, _ = encoded(compressor, values, residual)
        times += q != 0
    assert times.min() >= 3
    assert times.max() <= 5


def test_a_threshold_is_sent_as_it_is_and_the_rest_waits() -> None:
    compressor = Sparse(pieces_of([("w", (300, 1000))]), Scratch(), Threshold(4.2))
    values = drawn("heavy", 300_000, 0) * np.float32(1000)
    residual = np.zeros_like(values)
    q, used = encoded(compressor, values, residual)
    sent = np.abs(values) >= 4
    order = np.flatnonzero(sent)[: np.count_nonzero(q)]
    expected = np.zeros_like(values)
    expected[order] = 4 * np.sign(values[order])
    assert np.array_equal(q, expected)
    assert used == compressor.max_bytes


@pytest.mark.parametrize("change", [8, 1 / 4])
def test_thresholds_follow_their_share_up_and_down(change: float) -> None:
    """In steps of few bits, for each tensor by itself."""
    compressor = make("threshold", [("w", (300, 1000)), ("v", (300, 1000))])
    zero, residual = np.zeros(600_000, np.float32), np.zeros(600_000, np.float32)
    assert not encoded(compressor, zero, residual)[0].any()
    counts, levels = [], []
    for step in range(300):
        values = np.random.default_rng(step).normal(size=600_000).astype(np.float32)
        values[300_000:] *= 1000
        q, _ = encoded(compressor, values * np.float32(change if step >= 100 else 1), residual)
        halves = np.split(q, 2)
        counts.append([np.count_nonzero(half) for half in halves])
        first, second = (np.unique(np.abs(half[half != 0])) for half in halves)
        assert len(first) == len(second) == 1
        assert 400 <= second[0] / first[0] <= 2500
        assert (math.frexp(first[0])[0] * 16).is_integer()
        levels.append(float(first[0]))
    for when in (slice(60, 100), slice(260, 300)):
        for mean in np.mean(counts[when], axis=0):
            assert 0.8 <= mean / (300_000 / SHARE) <= 1.2
    assert change / 2 <= np.mean(levels[260:]) / np.mean(levels[60:100]) <= 2 * change


@settings(deadline=None, max_examples=200)
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
def test_adaptive_sends_the_largest_as_the_mean_of_their_sign(seed: int) -> None:
    count = 250_000
    compressor = Sparse(pieces_of([("w", (250, 1000))]), Scratch(), Adaptive(), seed)
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
    # Its residual is 8 bits shorter each time.
    for _ in range(12):
        q, _ = encoded(compressor, np.zeros_like(values), residual)
    assert np.count_nonzero(q > 0) > 100


@pytest.mark.parametrize("name", ["onebit", "threshold", "adaptive"])
def test_biases_and_norms_travel_in_eight_bits(name: str) -> None:
    layout: Layout = [("w", (300, 300)), ("norm", (600,)), ("tiny", (3, 4)), ("v", (300, 300))]
    compressor = make(name, layout)
    without = make(name, [each for each in layout if not is_small(each[1])])
    assert 612 <= compressor.max_bytes - without.max_bytes <= 612 + 3 + 1
    values = drawn("heavy", compressor.entries, 0)
    q, _ = encoded(compressor, values, np.zeros_like(values))
    small = slice(90_000, 90_612)
    assert np.abs(q - values)[small].max() <= np.abs(values[small]).max() / 64


@pytest.mark.parametrize("name", ["threshold", "adaptive"])
@pytest.mark.parametrize(
    ("word", "damage"), [(1, 2000), (2, 1000), (2, 2**32 - 1), (None, 127)], ids=str
)
def test_a_damaged_message_is_refused(name: str, word: int | None, damage: int) -> None:
    """A beginning beyond the end, more bytes than there are, entries beyond the end."""
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
def test_noise_writes_nothing_outside_of_the_region(name: str, noise: bytes) -> None:
    compressor = make(name, [("w", (40, 50)), ("b", (3,)), ("v", (40, 50))])
    message = np.zeros(compressor.max_bytes, np.uint8)
    message[: len(noise)] = np.frombuffer(noise, np.uint8)[: len(message)]
    memory = np.zeros(compressor.entries + 2000, np.float32)
    with contextlib.suppress(CommError), np.errstate(all="ignore"):
        compressor.add(message, memory[1000:-1000])
    assert not memory[:1000].any()
    assert not memory[-1000:].any()


def test_what_does_not_exist_names_what_does() -> None:
    with pytest.raises(UsageError, match="onebit, threshold, adaptive"):
        make("zip", MLP)
    with pytest.raises(UsageError, match="threshold of 0"):
        Threshold(0)


@given(layouts, st.integers(1, 9))
def test_parts_hold_each_entry_once_in_even_shares(layout: Layout, parts: int) -> None:
    pieces = pieces_of(layout)
    total = sum(math.prod(shape) for _, shape in layout)
    owners: list[str] = []
    shares = split(pieces, parts)
    assert len(shares) == parts
    for share in shares:
        at = 0
        for piece in share:
            assert piece.start == at
            assert piece.size
            owners += [piece.name] * piece.size
            at = piece.stop
        assert abs(at - total // parts) <= total // parts // 4 + 1
    assert owners == [name for name, shape in layout for _ in range(math.prod(shape))]
    for piece in (each for share in shares for each in share):
        whole = next(each for each in pieces if each.name == piece.name)
        assert piece.small == whole.small
        assert piece.width == whole.width or piece.rows == 1


def test_parts_end_at_the_ends_of_rows() -> None:
    pieces = pieces_of([("w", (100, 30)), ("b", (30,))])
    assert split(pieces, 3) == [
        [Piece("w", 0, 34, 30, small=False)],
        [Piece("w", 0, 33, 30, small=False)],
        [Piece("w", 0, 33, 30, small=False), Piece("b", 990, 1, 30, small=True)],
    ]


def test_chunks_cover_a_region() -> None:
    assert list(chunks(0)) == []
    assert list(chunks(CHUNK + 1)) == [(0, CHUNK), (CHUNK, CHUNK + 1)]

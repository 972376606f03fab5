"""Compressors: message and residual add up to the gradient, and lengths keep their bounds."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlio.errors import DlioError, UsageError
from dlio.exchange.compress import NAMES, make_compressor
from dlio.exchange.compress.message_layout import (
    CHUNK,
    ChunkScratch,
    Piece,
    chunks,
    is_small,
    pieces_of,
    split,
)
from dlio.plan.order import mix
from tests.conftest import examples
from tests.exchange.compress.compressing import (
    HALF_MAX,
    KINDS,
    Floats,
    Layout,
    drawn,
    encoded,
    make,
)

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


def assert_nothing_is_lost(name: str, v: Floats, q: Floats, r: Floats) -> None:
    """Check the package's promise: q + r = v, in float32 and as real numbers."""
    if name == "onebit":
        # In float64, whose rounding is far below the bound.
        lost = np.abs((v - q.astype(np.float64)) - r)
        assert (lost <= 2.0**-24 * (np.abs(v).astype(np.float64) + np.abs(q))).all()
        near = rounded(v, q)
        v, q, r = v[~near], q[~near], r[~near]
    assert np.array_equal(q + r, v)
    total = q.astype(np.float64) + r
    assert np.array_equal(total, v.astype(np.float64))
    # The sum in float64 has no rounding error (Knuth's TwoSum).
    taken = total - q
    assert not ((q - (total - taken)) + (r - taken)).any()


def rounded(v: Floats | float, q: Floats | float) -> npt.NDArray[np.bool_]:
    """True where `onebit` may lose the last bit of v: below half of q, or with the other sign."""
    v, q = np.asarray(v, np.float64), np.asarray(q, np.float64)
    return (np.sign(v) * q < 0) | (np.abs(v) < np.abs(q) / 2)


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
def test_message_and_residual_add_up_to_the_gradient(
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
@settings(deadline=None, max_examples=examples(60))
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
        elements=st.floats(-HALF_MAX, HALF_MAX, width=32, allow_subnormal=True),
    )
)
def test_nothing_is_lost_of_any_floats(name: str, values: Floats) -> None:
    """Computed in rational numbers, without rounding; a larger tensor is in the same region."""
    flat = values.reshape(-1)
    rows = -(-1025 // len(flat))
    compressor = make(name, [("few", values.shape), ("many", (rows, len(flat)))])
    given_ = np.concatenate([flat, np.tile(flat, rows)])
    residual = np.zeros_like(given_)
    q, _ = encoded(compressor, given_, residual)
    for a, b, c in zip(q.tolist(), residual.tolist(), given_.tolist(), strict=True):
        lost = abs(Fraction(a) + Fraction(b) - Fraction(c))
        bound = (abs(a) + abs(c)) / 2**24 if name == "onebit" and rounded(c, a) else 0
        assert lost <= bound


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily("onebit", "adaptive", "int8")
def test_error_feedback_delivers_everything_over_time(name: str) -> None:
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
    # The residual no longer grows.
    assert max(errors[-200:]) <= 1.3 * max(errors[600:800])
    assert np.abs(delivered / 1200 - mean).max() < (3 if name in ("threshold", "adaptive") else 0.2)


@pytest.mark.parametrize("layout", [RESNET, MLP], ids=["resnet", "mlp"])
@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *(("onebit", 30), ("ternary", 19), ("threshold", 100), ("adaptive", 100)),
        *(("int8", 3.9), ("bf16", 2), ("fp16", 1.99)),
    ],
)
@pytest.mark.daily("onebit-30-mlp", "ternary-19-resnet", "threshold-100-mlp", "int8-3.9-mlp")
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
    whole = make_compressor(name, pieces, ChunkScratch()).max_bytes
    parts = [make_compressor(name, part, ChunkScratch()).max_bytes for part in split(pieces, 8)]
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
def test_the_largest_floats_are_accepted(name: str) -> None:
    compressor = make(name, [("w", (40, 2000)), ("b", (10,))])
    values = np.full(compressor.entries, np.finfo(np.float32).max)
    values[::3] *= -1
    residual = np.zeros_like(values)
    q, _ = encoded(compressor, values, residual)
    assert np.isfinite(q).all()
    assert_nothing_is_lost(name, values, q, residual)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_region_has_an_empty_message(name: str) -> None:
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


def test_one_bit_sends_signs_along_turned_axes() -> None:
    """Compared with an explicit Walsh matrix: per block, signs and the mean size are sent there."""
    compressor = make("onebit", [("w", (70, 1000)), ("b", (3, 700))])
    values = drawn("heavy", compressor.entries, 1)
    q, _ = encoded(compressor, values, np.zeros(compressor.entries, np.float32))
    sizes = [1024] * 68 + [256, 64, 48] + [1024] * 2 + [52]
    assert sum(sizes) == compressor.entries
    odd = mix(np.arange(1024, dtype=np.uint64), np.uint64(0)) & np.uint64(1)
    flips = 1 - 2 * odd.astype(np.float64)
    at = 0
    for size in sizes:
        v, decoded = values[at : at + size].astype(np.float64), q[at : at + size]
        at += size
        if size & (size - 1):
            assert np.array_equal(np.signbit(decoded), np.signbit(v))
            assert np.abs(decoded) == pytest.approx(np.abs(v).mean(), rel=2**-8)
            continue
        numbers = np.arange(size)
        walsh = 1.0 - 2 * (np.bitwise_count(numbers[:, None] & numbers) & 1)
        turned = walsh @ (v * flips[:size])
        assert np.abs(walsh @ (decoded * flips[:size]) / size) == pytest.approx(
            np.abs(turned).mean() / size, rel=2**-8
        )


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


@pytest.mark.parametrize("name", ["onebit", "ternary", "threshold", "adaptive"])
def test_biases_and_norms_travel_in_eight_bits(name: str) -> None:
    layout: Layout = [("w", (300, 300)), ("norm", (600,)), ("tiny", (3, 4)), ("v", (300, 300))]
    compressor = make(name, layout)
    without = make(name, [each for each in layout if not is_small(each[1])])
    assert 612 <= compressor.max_bytes - without.max_bytes <= 612 + 3 + 1
    values = drawn("heavy", compressor.entries, 0)
    q, _ = encoded(compressor, values, np.zeros_like(values))
    small = slice(90_000, 90_612)
    assert np.abs(q - values)[small].max() <= np.abs(values[small]).max() / 64


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="onebit, ternary, threshold, adaptive"):
        make("zip", MLP)


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

"""The promises of `dlio.exchange.compress.Compressor`, each as a test.

Subclass `CompressorTests` and give `make`. Gradients are drawn from many distributions; hypothesis
adds arrays of any float32 numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlio.errors import CommError, DlioError
from dlio.exchange.compress import Compressor

Floats = npt.NDArray[np.float32]
Layout = Sequence[tuple[str, Sequence[int]]]

_LAYOUT: Final[Layout] = [("first", (70, 1000)), ("norm", (5,)), ("last", (40, 600))]
_KINDS: Final = ("heavy", "huge range", "denormal", "constant", "mostly zero", "zero")
_GUARD: Final = 0xA5
_EXTRA: Final = 64
_HALF_MAX: Final = float(np.finfo(np.float32).max) / 2


class CompressorTests(ABC):
    """Tests that a compressor keeps its contract."""

    lossless_feedback = True
    """True if message and residual add up to the gradient exactly; otherwise to 2^-24 of it."""

    @abstractmethod
    def make(self, layout: Layout) -> Compressor:
        """A compressor of tensors (name, shape) that lie one after another in a region."""

    # Messages.

    def test_it_knows_the_entries_of_its_region(self) -> None:
        assert self.make(_LAYOUT).entries == 70 * 1000 + 5 + 40 * 600

    def test_messages_fit_into_max_bytes(self) -> None:
        compressor = self.make(_LAYOUT)
        residual = np.zeros(compressor.entries, np.float32)
        for kind in _KINDS:
            message = np.full(compressor.max_bytes + _EXTRA, _GUARD, np.uint8)
            used = compressor.encode(_drawn(kind, compressor.entries), residual, message)
            assert 0 <= used <= compressor.max_bytes
            assert (message[compressor.max_bytes :] == _GUARD).all(), "it writes beyond max_bytes"

    def test_a_region_of_nothing_has_an_empty_message(self) -> None:
        compressor = self.make([("nothing", (0, 3))])
        empty = np.empty(0, np.float32)
        assert (compressor.entries, compressor.max_bytes) == (0, 0)
        assert compressor.encode(empty, empty.copy(), np.empty(0, np.uint8)) == 0

    def test_values_are_only_read(self) -> None:
        compressor = self.make(_LAYOUT)
        values = _drawn("heavy", compressor.entries)
        before = values.copy()
        self._encoded(compressor, values, np.zeros_like(values))
        assert np.array_equal(values, before)

    def test_the_same_gradients_give_the_same_bytes(self) -> None:
        messages = []
        for _ in range(2):
            compressor = self.make(_LAYOUT)
            residual = np.zeros(compressor.entries, np.float32)
            messages.append(_messages(compressor, residual, range(3)))
        assert messages[0] == messages[1]

    # Nothing is lost.

    def test_message_and_residual_make_up_the_gradient(self) -> None:
        for kind in _KINDS:
            compressor = self.make(_LAYOUT)
            residual = np.zeros(compressor.entries, np.float32)
            for seed in range(3):
                values = _drawn(kind, compressor.entries, seed)
                total = values + residual
                self._assert_nothing_is_lost(
                    total, self._encoded(compressor, values, residual), residual
                )

    def test_nothing_is_lost_of_any_floats(self) -> None:
        elements = st.floats(-_HALF_MAX, _HALF_MAX, width=32)
        shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40)

        @settings(deadline=None, max_examples=40, database=None, derandomize=True)
        @given(hnp.arrays(np.float32, shapes, elements=elements))
        def check(values: Floats) -> None:
            rows = -(-1025 // values.size)  # Tensors of up to 1,024 entries may travel otherwise.
            compressor = self.make([("few", values.shape), ("many", (rows, values.size))])
            flat = np.concatenate([values.reshape(-1), np.tile(values.reshape(-1), rows)])
            residual = np.zeros_like(flat)
            self._assert_nothing_is_lost(flat, self._encoded(compressor, flat, residual), residual)

        check()

    def test_add_adds_to_the_sum(self) -> None:
        compressor = self.make(_LAYOUT)
        values = _drawn("heavy", compressor.entries)
        message = np.zeros(compressor.max_bytes, np.uint8)
        used = compressor.encode(values, np.zeros_like(values), message)
        alone, onto = np.zeros_like(values), np.ones_like(values)
        compressor.add(message[:used], alone)
        compressor.add(message[:used], onto)
        assert np.array_equal(onto, alone + 1)

    def test_any_compressor_of_the_same_kind_reads_a_message(self) -> None:
        ours, theirs = self.make(_LAYOUT), self.make(_LAYOUT)
        residual = np.zeros(ours.entries, np.float32)
        message = np.zeros(ours.max_bytes, np.uint8)
        for seed in range(3):
            used = ours.encode(_drawn("heavy", ours.entries, seed), residual, message)
        sums = np.zeros((2, ours.entries), np.float32)
        ours.add(message[:used], sums[0])
        theirs.add(message[:used], sums[1])
        assert np.array_equal(sums[0], sums[1])

    # Errors.

    def test_an_entry_that_is_not_finite_is_refused_by_name(self) -> None:
        for at, name in ((3, "first"), (70_002, "norm"), (93_000, "last")):
            for bad in (np.nan, np.inf, -np.inf):
                compressor = self.make(_LAYOUT)
                values = _drawn("heavy", compressor.entries)
                values[at] = bad
                with pytest.raises(DlioError) as caught:
                    self._encoded(compressor, values, np.zeros_like(values))
                assert name in str(caught.value)

    def test_a_sum_with_the_residual_that_overflows_is_refused(self) -> None:
        compressor = self.make([("w", (40, 40))])
        values = np.full(1600, np.finfo(np.float32).max)
        with pytest.raises(DlioError) as caught:
            self._encoded(compressor, values, values.copy())
        assert "w" in str(caught.value)

    def test_the_largest_floats_are_no_error(self) -> None:
        compressor = self.make([("w", (40, 2000)), ("b", (10,))])
        values = np.full(compressor.entries, np.finfo(np.float32).max)
        values[::3] *= -1
        try:
            decoded = self._encoded(compressor, values, np.zeros_like(values))
        except DlioError as error:
            raise AssertionError(f"finite numbers are refused: {error}") from error
        assert np.isfinite(decoded).all()

    def test_a_message_of_noise_is_added_or_a_comm_error(self) -> None:
        compressor = self.make(_LAYOUT)
        for seed in range(20):
            noise = np.random.default_rng(seed).integers(0, 256, compressor.max_bytes, np.uint8)
            memory = np.zeros(compressor.entries + _EXTRA, np.float32)
            try:
                with np.errstate(all="ignore"):
                    compressor.add(noise, memory[: compressor.entries])
            except CommError:
                pass
            except Exception as error:
                raise AssertionError(f"noise raises {error!r}: CommError is for that") from error
            assert not memory[compressor.entries :].any(), "noise is written beyond the region"

    # State.

    def test_a_restored_compressor_sends_the_same_messages(self) -> None:
        ours = self.make(_LAYOUT)
        residual = np.zeros(ours.entries, np.float32)
        for step in range(4):
            theirs = self.make(_LAYOUT)
            theirs.load_state(ours.state())
            wanted = _messages(theirs, residual.copy(), range(step, step + 3))
            assert _messages(ours, residual.copy(), range(step, step + 3)) == wanted

    def test_a_state_is_an_array_of_integers_that_stays_as_it_is(self) -> None:
        compressor = self.make(_LAYOUT)
        residual = np.zeros(compressor.entries, np.float32)
        state = compressor.state()
        before = state.copy()
        _messages(compressor, residual, range(3))
        assert state.dtype == np.int64
        assert np.array_equal(state, before)

    def _encoded(self, compressor: Compressor, values: Floats, residual: Floats) -> Floats:
        """The numbers that a message stands for."""
        message = np.full(compressor.max_bytes, _GUARD, np.uint8)
        used = compressor.encode(values, residual, message)
        decoded = np.zeros(compressor.entries, np.float32)
        compressor.add(message[:used].copy(), decoded)
        return decoded

    def _assert_nothing_is_lost(self, total: Floats, sent: Floats, left: Floats) -> None:
        """sent + left = total: as float32 adds them, and, in float64, without a rounding."""
        if self.lossless_feedback:
            assert np.array_equal(sent + left, total)
        lost = np.abs(total.astype(np.float64) - sent - left)
        bound = np.abs(sent).astype(np.float64) + np.abs(total)
        assert (lost <= 2.0**-24 * bound).all()


def _messages(compressor: Compressor, residual: Floats, seeds: range) -> list[bytes]:
    """The messages of some steps, one after another."""
    message = np.zeros(compressor.max_bytes, np.uint8)
    sent = []
    for seed in seeds:
        used = compressor.encode(_drawn("heavy", compressor.entries, seed), residual, message)
        sent.append(message[:used].tobytes())
    return sent


def _drawn(kind: str, count: int, seed: int = 0) -> Floats:
    """Gradients of one kind, none beyond half of the largest float32; shape (count,)."""
    rng = np.random.default_rng(seed)
    if kind == "heavy":
        values = rng.standard_t(2, count) * 1e-3
    elif kind == "huge range":
        values = rng.choice([-1, 1], count) * 10.0 ** rng.uniform(-45, 38, count)
    elif kind == "denormal":
        values = rng.normal(size=count) * 1e-42
    elif kind == "constant":
        values = np.full(count, rng.normal())
    elif kind == "mostly zero":
        values = rng.normal(size=count) * (rng.random(count) < 1e-3)
    else:
        values = np.zeros(count)
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float32)

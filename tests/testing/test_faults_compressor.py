"""The compressor's suite catches each fault of a compressor."""

import numpy as np
import numpy.typing as npt
import pytest

from dlio.errors import CommError, DlioError
from dlio.exchange.compress import Compressor
from dlio.exchange.compress.half import Bfloat16, Float16
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of
from dlio.testing import CompressorTests
from dlio.testing.compressor import Floats, Layout
from tests.testing.faults import Fault, assert_caught, assert_complete

Message = npt.NDArray[np.uint8]


class _CountsBytes(Bfloat16):
    def __init__(self, layout: Layout) -> None:
        super().__init__(pieces_of(layout), ChunkScratch())
        self.entries *= 2


class _Plain(Bfloat16):
    """Keeps every promise; faults are put into it."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(pieces_of(layout), ChunkScratch())


class _WritesOneByteMore(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        used = super().encode(values, residual, message)
        message[used : used + 1] = 0
        return used


class _HasAHeader(_Plain):
    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.max_bytes += 8


class _AddsToTheValues(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        used = super().encode(values, residual, message)
        values += residual
        return used


class _Random(_Plain):
    """Rounds by chance, as unbiased quantisers do that draw from the system."""

    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        used = super().encode(values, residual, message)
        message[0] ^= np.random.default_rng().integers(0, 256, dtype=np.uint8)
        return used


class _ForgetsTheRest(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        used = super().encode(values, residual, message)
        residual[:] = 0
        return used


class _Overwrites(_Plain):
    def add(self, message: Message, into: Floats) -> None:
        into[:] = 0
        super().add(message, into)


class _ReadsItsOwnOnly(_Plain):
    """Multiplies by a number that it has drawn for itself."""

    steps = 0

    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        self.steps += 1
        return super().encode(values, residual, message)

    def add(self, message: Message, into: Floats) -> None:
        super().add(message, into)
        into *= 1 + self.steps


class _SendsNans(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        return super().encode(np.nan_to_num(values, posinf=0, neginf=0), residual, message)


class _NamelessError(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        try:
            return super().encode(values, residual, message)
        except DlioError as error:
            raise DlioError("a gradient is not finite") from error


class _Saturates(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        with np.errstate(over="ignore"):
            total = np.nan_to_num(values + residual)
        residual[:] = 0
        return super().encode(total, residual, message)


class _RefusesLargeNumbers(_Plain):
    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        if len(values) and np.abs(values).max() > 1e38:
            raise DlioError("the gradient of w is too large")
        return super().encode(values, residual, message)


class _TrustsMessages(_Plain):
    def add(self, message: Message, into: Floats) -> None:
        places = message[:8].view(np.uint32)
        if places[0] > len(into):
            raise IndexError(f"index {places[0]} is out of bounds")
        super().add(message, into)


class _SignsOfTheStep(Float16):
    """Sends every second step's exponents one larger, and does not say at which step it is."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(pieces_of(layout), ChunkScratch())
        self.steps = 0
        self.max_bytes += 1

    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        used = super().encode(values, residual, message)
        self.steps += 1
        message[used - 1] = self.steps % 256
        return used


class _LivingState(_Plain):
    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.steps = np.zeros(1, np.int64)

    def encode(self, values: Floats, residual: Floats, message: Message) -> int:
        self.steps += 1
        return super().encode(values, residual, message)

    def state(self) -> npt.NDArray[np.int64]:
        return self.steps


def _of(broken: "type[_Plain] | type[_CountsBytes] | type[_SignsOfTheStep]") -> type:
    def make(self: CompressorTests, layout: Layout) -> Compressor:
        return broken(layout)

    return type(broken.__name__, (CompressorTests,), {"make": make})


class TestPlain(CompressorTests):
    def make(self, layout: Layout) -> Compressor:
        return _Plain(layout)


FAULTS = [
    Fault("test_it_knows_the_entries_of_its_region", _of(_CountsBytes)),
    Fault("test_messages_fit_into_max_bytes", _of(_WritesOneByteMore)),
    Fault("test_a_region_of_nothing_has_an_empty_message", _of(_HasAHeader)),
    Fault("test_values_are_only_read", _of(_AddsToTheValues)),
    Fault("test_the_same_gradients_give_the_same_bytes", _of(_Random)),
    Fault("test_message_and_residual_make_up_the_gradient", _of(_ForgetsTheRest)),
    Fault("test_nothing_is_lost_of_any_floats", _of(_ForgetsTheRest)),
    Fault("test_add_adds_to_the_sum", _of(_Overwrites)),
    Fault("test_any_compressor_of_the_same_kind_reads_a_message", _of(_ReadsItsOwnOnly)),
    Fault("test_an_entry_that_is_not_finite_is_refused_by_name", _of(_SendsNans)),
    Fault("test_an_entry_that_is_not_finite_is_refused_by_name", _of(_NamelessError)),
    Fault("test_a_sum_with_the_residual_that_overflows_is_refused", _of(_Saturates)),
    Fault("test_the_largest_floats_are_no_error", _of(_RefusesLargeNumbers)),
    Fault("test_a_message_of_noise_is_added_or_a_comm_error", _of(_TrustsMessages)),
    Fault("test_a_restored_compressor_sends_the_same_messages", _of(_SignsOfTheStep)),
    Fault("test_a_state_is_an_array_of_integers_that_stays_as_it_is", _of(_LivingState)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_catches(fault: Fault) -> None:
    assert_caught(fault)


def test_each_promise_has_a_fault() -> None:
    assert_complete(CompressorTests, FAULTS)


def test_noise_may_be_a_comm_error() -> None:
    class Suspicious(_Plain):
        def add(self, message: Message, into: Floats) -> None:
            raise CommError("this message was not written for this region")

    suite = _of(Suspicious)()
    suite.test_a_message_of_noise_is_added_or_a_comm_error()

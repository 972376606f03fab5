"""Damaged and made-up bytes give errors of ours: no crash, no hang, no memory beyond the input."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS, sound, survives

SOUND = sound()
_BOUND = 8 << 20


@pytest.mark.parametrize("name", PARSERS)
def test_valid_input_is_taken(name: str) -> None:
    PARSERS[name](SOUND[name])


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_input_is_an_error_of_ours(name: str, data: st.DataObject) -> None:
    damaged = bytearray(SOUND[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        how = data.draw(st.sampled_from(["flip", "large", "cut", "insert"]))
        if how == "flip" and damaged:
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "large":
            damaged[at : at + 8] = b"\xff" * min(8, len(damaged) - at)
        elif how == "cut":
            del damaged[at:]
        else:
            damaged[at:at] = data.draw(st.binary(max_size=16))
    tracemalloc.start()
    try:
        survives(PARSERS[name], bytes(damaged))
        assert tracemalloc.get_traced_memory()[1] < _BOUND
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_are_an_error_of_ours(name: str, data: bytes) -> None:
    survives(PARSERS[name], data)
    survives(PARSERS[name], SOUND[name][:32] + data)

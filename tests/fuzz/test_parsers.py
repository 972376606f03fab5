"""Damaged and made-up bytes give errors of ours: no crash, no hang, no memory beyond the input."""

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import SourceError
from tests.conftest import examples
from tests.fuzz.datasets import remove
from tests.fuzz.parsers import OF_BYTES, PARSERS, sound, survives

SOUND = sound()
remove()  # Processes that only collect the tests make the data sets, too.
CORPUS = Path(__file__).parent / "corpus"
_BOUND = 8 << 20


@pytest.fixture(scope="module", autouse=True)
def _without_leftovers() -> Iterator[None]:
    yield
    remove()


@pytest.fixture(autouse=True)
def _own_cache(_telling: None) -> Iterator[None]:
    """Parsers choose the folder of the cache by a variable."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.parametrize("name", PARSERS)
def test_valid_input_is_taken(name: str) -> None:
    PARSERS[name](SOUND[name])


@pytest.mark.parametrize("name", [each.name for each in sorted(CORPUS.iterdir())])
def test_inputs_that_fuzzers_have_found_are_survived(name: str) -> None:
    inputs = list((CORPUS / name).iterdir())
    assert inputs
    for path in inputs:
        survives(PARSERS[name], path.read_bytes())


@pytest.mark.nightly
def test_a_library_that_computes_for_ever_is_stopped() -> None:
    with pytest.raises(SourceError, match="does not come to an end"):
        PARSERS["hdf5"]((CORPUS.parent / "endless.h5").read_bytes())


def test_a_library_that_aborts_is_an_error_that_names_the_file() -> None:
    with pytest.raises(SourceError, match=r"a\.parquet: pyarrow .* \(SIGABRT\)"):
        PARSERS["parquet"]((CORPUS.parent / "aborts.parquet").read_bytes())


@pytest.mark.parametrize("name", OF_BYTES)
@settings(max_examples=examples(60), deadline=None)
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


@pytest.mark.parametrize("name", OF_BYTES)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_are_an_error_of_ours(name: str, data: bytes) -> None:
    survives(PARSERS[name], data)
    survives(PARSERS[name], SOUND[name][:32] + data)

"""Fields make a payload and come back, of every kind, as views that are aligned."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlio.data.schema import DTYPES, ENCODED, TEXTS, Schema, array_kind, parse_kind
from dlio.errors import CorruptBlock

_DTYPES = st.sampled_from([np.dtype(name) for name in DTYPES])


@st.composite
def samples(draw: st.DrawFn) -> tuple[Schema, dict[str, Any]]:
    fields: list[tuple[str, str]] = []
    values: dict[str, Any] = {}
    for k in range(draw(st.integers(1, 6))):
        name = f"f{k}"
        if draw(st.booleans()):
            kind = draw(st.sampled_from(ENCODED))
            values[name] = draw(st.text(max_size=9) if kind in TEXTS else st.binary(max_size=30))
        else:
            array = draw(hnp.arrays(draw(_DTYPES), hnp.array_shapes(min_dims=0, min_side=0)))
            shape = [None if draw(st.booleans()) else size for size in array.shape]
            kind, values[name] = array_kind(array.dtype, shape), array
        fields.append((name, kind))
    return Schema(tuple(fields)), values


def _same(kind: str, value: Any, back: Any) -> bool:
    if kind in ENCODED:
        return bytes(back) == (value.encode() if isinstance(value, str) else value)
    return bool(np.asarray(back, value.dtype).tobytes() == value.tobytes())


@given(samples())
def test_fields_of_every_kind_make_a_payload_and_come_back(case: tuple[Schema, Any]) -> None:
    schema, values = case
    payload = schema.join(values)
    # Read into memory as it is in a block: at a multiple of eight.
    memory = np.zeros(len(payload) // 8 + 1, np.uint64).view(np.uint8)[: len(payload)]
    memory[:] = np.frombuffer(payload, np.uint8)
    back = schema.split(memory.data)
    for name, kind in schema.fields:
        assert _same(kind, values[name], back[name])
        if isinstance(back[name], np.ndarray):
            assert back[name].flags.aligned
            assert not back[name].flags.owndata
    bodies = {
        name: np.array([len(values[name].encode() if kind in TEXTS else values[name])])
        if kind in ENCODED
        else np.array([values[name].nbytes])
        for name, kind in schema.fields
        if not schema.kinds[name].fixed
    }
    assert schema.payload_sizes(1, bodies).tolist() == [len(payload)]
    assert Schema.from_json(schema.to_json()) == schema


@given(samples(), st.binary(max_size=200), st.data())
def test_damaged_payloads_are_refused_or_split_within_their_bytes(
    case: tuple[Schema, Any], noise: bytes, data: st.DataObject
) -> None:
    schema, values = case
    payload = schema.join(values)
    cut = payload[: data.draw(st.integers(0, len(payload)))]
    for damaged in (cut, bytes(cut) + noise, noise):
        try:
            back = schema.split(damaged)
        except CorruptBlock:
            continue
        arrays = [value for value in back.values() if isinstance(value, np.ndarray)]
        assert sum(array.nbytes for array in arrays) <= len(damaged)


def test_a_value_of_another_kind_is_refused_and_not_converted() -> None:
    schema = Schema((("x", "float32[2]"), ("n", "uint8"), ("t", "text")))
    good = {"x": np.zeros(2, np.float32), "n": 3, "t": "a"}
    assert schema.split(schema.join(good))["n"] == 3
    for bad in (
        {"x": np.zeros(2)},
        {"x": np.zeros(3, np.float32)},
        {"n": 256},
        {"n": 1.5},
        {"t": 5},
    ):
        with pytest.raises(ValueError, match="field"):
            schema.join(good | bad)


def test_a_sample_keeps_its_structure() -> None:
    schema = Schema(
        (("0", "int64"), ("1.a", "text"), ("1.b", "int8")), ["0", {"a": "1.a", "b": "1.b"}]
    )
    values = {"0": 1, "1.a": "x", "1.b": 2}
    assert Schema.from_json(schema.to_json()).arrange(values) == (1, {"a": "x", "b": 2})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "[]",
        "{}",
        '[["a","jpeg"],["a","jpeg"]]',
        '[["a","pickle"]]',
        '[["a","object"]]',
        '[["a","float32[1?]"]]',
        '[["a","float32[99999,99999]"]]',
        '[["a","float32[9999999999999]"]]',
        '{"fields":[["a","int8"]],"structure":["b"]}',
        '{"fields":[["a","int8"]],"structure":[5]}',
        '{"fields":[["a","int8"]],"structure":' + "[" * 900 + '"a"' + "]" * 900 + "}",
    ],
)
def test_schemas_that_make_no_sense_are_refused(text: str) -> None:
    try:
        Schema.from_json(text)
    except CorruptBlock:
        return
    assert text.count("[") > 100  # Deep, but sound.


@given(st.text(alphabet="abfilnotu0123468,?[]", max_size=20))
def test_any_text_is_a_kind_or_refused(text: str) -> None:
    try:
        assert parse_kind(text).text == text
    except ValueError:
        return

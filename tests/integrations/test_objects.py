"""Values that are broadcast to other ranks without pickle."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.integrations.objects import packed, unpacked

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SIMPLE | st.text(min_size=1, alphabet="abc/.").map(Path),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner)
    ),
)


@given(VALUES)
def test_values_are_restored_with_their_types(value: Any) -> None:
    restored = unpacked(json.loads(json.dumps(packed(value))))
    assert restored == value
    assert repr(restored) == repr(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", [1, [lambda: 0]]])
def test_values_without_a_form_in_json_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot broadcast a value of type"):
        packed(value)

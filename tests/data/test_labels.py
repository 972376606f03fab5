"""Texts become labels by one rule: whole numbers stay, other texts are classes, none becomes 0."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.data.labels import encode_labels, label_text, whole_labels


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1), st.sampled_from(["{}", "{}.0", " {} "]))
def test_whole_numbers_stay_however_they_are_written(numbers: list[int], form: str) -> None:
    texts = [form.format(number) for number in numbers]
    encoding = encode_labels(texts)
    assert [encoding.numbers[text] for text in texts] == numbers
    assert not encoding.classes
    assert not encoding.missing


@given(st.lists(st.text(st.sampled_from("abc_1"), min_size=1), min_size=1))
def test_names_are_classes_in_alphabetical_order(names: list[str]) -> None:
    names = [*names, "1_0"]  # Python's int() takes it for 10.
    encoding = encode_labels(names)
    assert encoding.classes == sorted(set(names))
    assert [encoding.classes[encoding.numbers[name]] for name in names] == names


def test_fractions_are_classes_in_the_order_of_numbers() -> None:
    assert encode_labels(["10.5", "2.5"]).classes == ["2.5", "10.5"]


def test_what_is_missing_is_said_and_not_numbered() -> None:
    assert encode_labels(["1", "nan", "", "3"]).missing == {"nan", ""}
    encoding = encode_labels(["NA", "DE", " "])  # Namibia.
    assert encoding.classes == ["DE", "NA"]
    assert encoding.missing == {" "}
    assert encode_labels([""]).missing == {""}


def test_values_of_json_are_texts() -> None:
    given_values = [2, 2.0, "cat", None, float("nan")]
    assert [label_text(value) for value in given_values] == ["2", "2.0", "cat", "", ""]
    with pytest.raises(ValueError, match="not a label"):
        label_text([1])


def test_arrays_of_whole_numbers_are_labels_whatever_their_ones() -> None:
    for shape in ((3,), (3, 1), (3, 1, 1)):
        labels = whole_labels(np.array([2.0, 0, 1]).reshape(shape))
        assert labels is not None
        assert labels.tolist() == [2, 0, 1]
    assert whole_labels(np.array([0.5])) is None
    assert whole_labels(np.array([np.nan])) is None
    assert whole_labels(np.zeros((2, 2))) is None

"""Which fields of arrays a network gets, and which it predicts."""

import pytest

from dlio.data.schema import Schema
from dlio.errors import UsageError
from dlio.train.array_fields import array_fields, is_arrays
from dlio.train.tasks.array_tasks import usual_task


@pytest.mark.parametrize(
    ("fields", "target", "expected"),
    [
        # The largest field is the input; of equal ones, the one that is not named as a target.
        ({"classes": "uint8[8,9]", "x": "uint8[8,9]"}, None, ("x", "classes", 1, (8, 9))),
        ({"x": "float32[2,8,9,7]", "y": "float32"}, None, ("x", "y", 2, (8, 9, 7))),
        ({"x": "float32[2,8,9]", "label": "int64", "y": "int64"}, "y", ("x", "y", 2, (8, 9))),
        ({"x": "float32[20,8,9]", "label": "int64"}, None, ("x", "label", 1, (20, 8, 9))),
        ({"x": "int16[12,8,9]", "mask": "uint8[12,8,9]"}, None, ("x", "mask", 1, (12, 8, 9))),
        ({"x": "float32[8,9]", "other": "int64[1]"}, None, ("x", "other", 1, (8, 9))),
    ],
)
def test_fields_follow_from_shapes_and_names(
    fields: dict[str, str], target: str | None, expected: tuple[object, ...]
) -> None:
    schema = Schema(tuple(fields.items()))
    assert is_arrays(schema)
    chosen = array_fields("data", schema, target)
    assert (chosen.input, chosen.target, chosen.channels, chosen.sides) == expected
    kind = schema.kinds[chosen.target]
    wanted = "segment" if len(kind.shape) > 1 else "regress" if "float" in kind.text else "classify"
    assert usual_task(chosen) == wanted


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"x": "float32[64,64,3]", "label": "int64"}, "channels last"),
        ({"x": "float32[8,9]", "a": "int64", "b": "int64"}, "give --target"),
        (
            {"x": "float32[8,9]", "label": "int64[4]"},
            "predicts a number, or whole numbers of shape",
        ),
        ({"x": "float32[8,9]", "mask": "float32[8,9]"}, "predicts a number, or whole numbers"),
        ({"x": "float32[2,2,2,8,9]", "label": "int64"}, "give arrays of"),
        ({"x": "float32[8,9]", "label": "text"}, "label is text"),
    ],
)
def test_fields_that_no_task_takes_are_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        array_fields("data", Schema(tuple(fields.items())), None)


@pytest.mark.parametrize(
    "fields",
    [{"image": "jpeg", "mask": "uint8[8,9]"}, {"x": "float32[9]", "y": "int64"}, {"x": "float32"}],
)
def test_pictures_and_tables_are_no_arrays(fields: dict[str, str]) -> None:
    assert not is_arrays(Schema(tuple(fields.items())))

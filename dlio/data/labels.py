"""Labels, the same for all formats: the names of their fields, and how texts become numbers.

A reader takes the first of `LABEL_NAMES` among its fields. Formats with a convention of their own
have a list of their own here, next to the common one.

Labels that are all whole numbers are those numbers, also where they are written as 2.0. All others
are classes, sorted, and a label is the number of its class. Nothing becomes 0 for want of a label:
`LabelEncoding.missing` has the texts that are none, and a reader refuses their samples by name.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

# The last one is the second item of a sample that is a tuple, such as (image, label).
# fmt: off
LABEL_NAMES: Final = (
    "label", "labels", "cls", "class", "target", "targets", "fine_label", "y", "1"
)
# fmt: on
"""Label fields, in the order of preference."""
TAR_LABEL_NAMES: Final = ("label", "cls", "class", "id", "index")
"""Suffixes of tar members: WebDataset's `cls`, and the number where a sample has nothing else."""
TABLE_LABEL_NAMES: Final = ("label", "class", "target", "category", "labels")
"""Columns of the table of labels that may lie in an image folder (labels.csv, metadata.csv)."""
MAX_CLASSES: Final = 1 << 16
"""Most different texts of a column that are taken for classes."""
# fmt: off
MISSING: Final = frozenset((
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND",
    "1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
))
# fmt: on
"""Texts that stand for a missing value in a column of numbers, as in pandas. Among texts, only an
empty one does: NA is also a country."""
_WHOLE: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
# Python's float() takes 1_0 as well, and digits of other alphabets.
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_MOST_DIGITS: Final = 400


@dataclass(frozen=True, slots=True)
class LabelEncoding:
    """The label of each text in a column."""

    numbers: dict[str, int]
    """Label by text, as the text is written."""
    classes: list[str]
    """Names of the classes that the labels number; empty if the texts are whole numbers."""
    missing: frozenset[str]
    """Those of the texts that stand for a missing label."""


def encode_labels(texts: Iterable[str]) -> LabelEncoding:
    """Return the labels that the texts of a column are, given each different text once or more.

    Spaces around a text do not count.
    """
    different = {text: text.strip() for text in texts}
    values = {text: value for text, value in different.items() if value not in MISSING}
    if values and all(map(is_number, values.values())):
        missing = frozenset(different.keys() - values.keys())
        whole = {text: whole_number(value) for text, value in values.items()}
        numbers = {text: value for text, value in whole.items() if value is not None}
        if len(numbers) == len(values):
            return LabelEncoding(numbers, [], missing)
        ordered = sorted(set(values.values()), key=lambda value: (float(value), value))
    else:
        missing = frozenset(text for text, value in different.items() if not value)
        values = {text: value for text, value in different.items() if value}
        ordered = sorted(set(values.values()))
    place = {name: number for number, name in enumerate(ordered)}
    return LabelEncoding({text: place[v] for text, v in values.items()}, ordered, missing)


def is_number(text: str) -> bool:
    """True for a number in decimal digits, with a fraction and an exponent or without."""
    return len(text) <= _MOST_DIGITS and _NUMBER.fullmatch(text) is not None


def whole_number(text: str) -> int | None:
    """Return the whole number that a text is, as 2 or as 2.0; None for others, and beyond int64."""
    if len(text) > _MOST_DIGITS:
        return None
    if _WHOLE.fullmatch(text) is not None:
        number = int(text)
    elif is_number(text) and float(text).is_integer() and abs(float(text)) < 2**53:
        number = int(float(text))
    else:
        return None
    return number if abs(number) < 2**63 else None


def label_text(value: object) -> str:
    """Return a label out of JSON as text, empty for one that is missing.

    Raises ValueError for lists and objects.
    """
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"{str(value)[:40]!r} is not a label: give a number or a name")


def whole_labels(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64] | None:
    """Return the labels of an array of numbers of shape (samples,), (samples, 1) or (samples, 1,
    1) and so on; None if it has other shapes, or numbers that are not whole."""
    if values.ndim < 1 or values.size != len(values) or values.dtype.kind not in "biuf":
        return None
    flat = values.reshape(-1)
    if flat.dtype.kind == "f":
        wide = flat.astype(np.float64)
        if not (np.isfinite(wide) & (np.abs(wide) < 2**53) & (wide == np.trunc(wide))).all():
            return None
    return flat.astype(np.int64)


def first_missing(texts: Sequence[str], missing: frozenset[str]) -> int:
    """Return the number of the first text that stands for a missing label; -1 for none."""
    return next((k for k, text in enumerate(texts) if text in missing), -1)

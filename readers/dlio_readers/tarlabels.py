"""Indexes of tars in memory, and labels: texts of members, numbered over all tars of a data set."""

import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays
from dlio.data.index_memory import GrowingColumn, Names
from dlio.data.labels import encode_labels, label_name
from dlio.data.schema import WholeNumbers
from dlio.util.structured_text import parse_json

BLOCK: Final = 512
"""Bytes of which a tar's headers and members take whole numbers."""
_PLAIN: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_NUMBERED: Final = re.compile(r"([0-9]+)\.(.+)", re.ASCII | re.DOTALL)
TarHead: TypeAlias = Any
"""Fields in a tar's index, as a dictionary."""


class TextMembers:
    """A field whose members are texts: numbers, or names of classes, or any.

    As long as all are plain numbers such as 17, these are kept; then each different text is.
    """

    def __init__(self) -> None:
        self.numbers: GrowingColumn | None = GrowingColumn(signed=True)
        """The numbers, if all texts are plain ones; otherwise None."""
        self.texts: dict[str, int] = {}
        self.plain = False
        """True if one of them is too long for a label."""
        self.codes = GrowingColumn()

    def add(self, text: str | None) -> None:
        if self.numbers is not None:
            if text is not None and _PLAIN.fullmatch(text) and abs(int(text)) < 2**63:
                self.numbers.append(int(text))
                return
            numbers, self.numbers = self.numbers, None
            for number in numbers.spread().tolist():
                self._add(str(number))
        self.plain = self.plain or text is None
        self._add(text or "")

    def _add(self, text: str) -> None:
        self.codes.append(self.texts.setdefault(text, len(self.texts)))


def merged_keys(names: Sequence[str], samples: int) -> str:
    """Return the words about fields such as `001.jpg` and `002.jpg`, which may be of samples whose
    names have a dot in them; "" without such."""
    numbered = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    several = [each for each in numbered if sum(each[2] == other[2] for other in numbered) > 1]
    if not several or (samples > 1 and all(len(each[1]) == 1 for each in several)):
        return ""
    shown = " and ".join(each[0] for each in several[:2])
    return (
        f"a sample has the fields {shown}, as a name's first dot ends its key, in WebDataset as "
        "well: if each is a sample, write its number before that dot, as in img_001.jpg"
    )


class TarIndex:
    """The index of one tar: where the fields of its samples lie, and labels.

    Fields are numbered as in `order`, which has the place of each among those that the index has.
    """

    def __init__(self, part: Arrays, order: Sequence[int]) -> None:
        self._part, self._order = part, order
        self._first = part["first"]
        self._places = [
            (self._column("shift", k), self._column("size", k)) for k in range(len(order))
        ]
        self._numbers = [self._column("number", k) for k in range(len(order))]
        self.is_array = [bool(part["npy"][place]) for place in order]
        """True for each field that is a .npy file."""
        self.names = Names(part["names"], part["name_ends"])

    def __len__(self) -> int:
        return len(self._first)

    def _column(self, kind: str, k: int) -> WholeNumbers:
        """Return a column, shape (samples,) or (1,) if its values are equal."""
        return self._part[f"{kind}{self._order[k]}"]

    def _rows(self, kind: str, k: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        column = self._column(kind, k)
        return column[rows if len(column) == len(self) else rows * 0].astype(np.int64)

    def firsts(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the offset of the first member of samples, shape (n,)."""
        return self._first[rows].astype(np.int64) * BLOCK

    def places(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (offsets, bytes) of the members of samples; both of shape (n, fields)."""
        fields = range(len(self._order))
        shifts = [self._rows("shift", k, rows) * BLOCK for k in fields]
        sizes = [self._rows("size", k, rows) for k in fields]
        return self.firsts(rows)[:, None] + np.stack(shifts, 1), np.stack(sizes, 1)

    def place(self, row: int) -> tuple[list[int], list[int]]:
        """Return (offset, bytes) of each member of a sample."""
        first, count = int(self._first[row]), len(self._first)
        begins, sizes = [], []
        for shift, size in self._places:
            begins.append((first + int(shift[row if len(shift) == count else 0])) * BLOCK)
            sizes.append(int(size[row if len(size) == count else 0]))
        return begins, sizes

    def bodies(self, k: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of a field's values in samples: of an array those of its data."""
        return self._rows("body" if self.is_array[k] else "size", k, rows)

    def number(self, k: int, row: int) -> int:
        """Return the number that a field is in a sample."""
        column = self._numbers[k]
        return int(column[row if len(column) == len(self._first) else 0])

    def numbers_at(self, k: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers that a field is in samples, shape (n,)."""
        numbers = self._numbers[k]
        whole = len(numbers) == len(self)
        return (numbers[rows] if whole else np.full(len(rows), numbers[0])).astype(np.int64)

    def numbers(self, k: int) -> npt.NDArray[np.int64]:
        """Return the numbers that a field is, shape (samples,)."""
        numbers = self._numbers[k].astype(np.int64)
        return numbers if len(numbers) == len(self) else np.full(len(self), numbers[0])

    def renumber(self, k: int, numbers: npt.NDArray[np.int64]) -> None:
        """Replace the numbers of a field."""
        column = GrowingColumn(signed=True)
        column.extend(numbers)
        self._numbers[k] = column.values()


def number_classes(
    parts: list[TarIndex], heads: Sequence[TarHead], names: Sequence[str], label: str | None
) -> list[str]:
    """Return the classes of a label that is text in some of the tars, and number them there."""
    if label is None or not any(label in head["texts"] for head in heads):
        return []  # As all are numbers, written the same way.
    k = names.index(label)
    own = [
        head["texts"].get(label) or [str(n) for n in np.unique(part.numbers(k)).tolist()]
        for part, head in zip(parts, heads, strict=True)
    ]
    encoding = encode_labels(text for texts in own for text in texts)
    for part, head, texts in zip(parts, heads, own, strict=True):
        new = np.array([encoding.numbers[text] for text in texts], np.int64)
        old = part.numbers(k)
        codes = old if label in head["texts"] else np.searchsorted(np.unique(old), old)
        part.renumber(k, new[codes])
    return encoding.classes


def label_in_json(data: bytes) -> str:
    """Say which value of a sample's JSON may be a label; empty without one."""
    try:
        values = parse_json(data, "a sample's JSON")
    except ValueError:
        return ""
    name = label_name(values) if isinstance(values, dict) else None
    return f"its {name} is in json, which is read as a field: store it as .cls" if name else ""

"""Labels, the same for all formats: the names of their fields, and how texts become numbers.

A reader takes the first of `LABEL_NAMES` among its fields. Formats with a convention of their own
have a list of their own here, next to the common one.

Labels that are all whole numbers are those numbers, also where they are written as 2.0, and truth
values are 0 and 1. Texts such as 01 next to 1 are none of them (`are_alike`). Other texts are
classes, sorted, and a label is the number of its class. Numbers with fractions give no labels, but
are to be predicted. Nothing becomes 0 for want of a label: `LabelEncoding.missing` has the texts
that are none, and a reader refuses their samples by name.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.index_memory import GrowingColumn
from dlio.errors import SourceError, UsageError
from dlio.util.arguments import listed, nearest
from dlio.util.printable import tell_once
from dlio.util.units import counted

# The last one is the second item of a sample that is a tuple, such as (image, label).
# fmt: off
LABEL_NAMES: Final = (
    "label", "labels", "cls", "class", "target", "targets", "fine_label", "y", "category",
    "label_id", "class_id", "category_id", "1",
)
# fmt: on
"""Label fields, in the order of preference; see `label_name`."""
TAR_LABEL_NAMES: Final = ("label", "cls", "class", "id", "index")
"""Suffixes of tar members: WebDataset's `cls`, and the number where a sample has nothing else."""
_LIKELY: Final = ("label", "class", "category", "target", "arr_1")
"""Parts of the names of fields that may be labels, by which a user is told of them; the last one is
that of the second array which `numpy.savez` is given."""
# fmt: off
_USUAL: Final = frozenset((
    "survived", "churn", "churned", "exited", "outcome", "diagnosis", "species", "quality",
    "default", "fraud", "spam", "sentiment", "emotion", "toxic", "attrition", "defaulted", "breed",
))
# fmt: on
"""Words by which people call labels."""
_INPUTS: Final = frozenset(("smiles", "selfies", "inchi", "sequence", "sentence", "text"))
"""Names of texts from which others are predicted."""
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
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
_TRUTHS: Final = {"False": 0, "false": 0, "FALSE": 0, "True": 1, "true": 1, "TRUE": 1}
"""Truth values as numpy, JSON and R write them, which are numbers in other formats."""
_WHOLE: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
# Python's float() takes 1_0 as well, and digits of other alphabets.
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_MOST_DIGITS: Final = 400
_SINGLE: Final = re.compile(r"(u?int|float)\d+|bool|text")
"""Kinds of fields with one value a sample."""
_ID: Final = re.compile(
    r"(?:^|[^A-Za-z])(?i:id|idx|index|row|time|date|year)s?$|[a-z](?:I[dD]|Index|Time|Date|Year)$"
)
_BETWEEN_LABELS: Final = ("|", ";", ",", " ")
_MOSTLY: Final = 0.75
_SELDOM: Final = 0.25
"""Parts of some rows: of different values of a text, and of a label."""
_FEW_WORDS: Final = 2
"""Classes for each of their words, above which these seem to be labels themselves."""


@dataclass(frozen=True, slots=True)
class LabelEncoding:
    """The label of each text in a column."""

    numbers: dict[str, int]
    """Label by text, as the text is written."""
    classes: list[str]
    """Names of the classes that the labels number; empty if the texts are whole numbers."""
    missing: frozenset[str]
    """Those of the texts that stand for a missing label."""


@dataclass(frozen=True, slots=True)
class SampleLabels:
    """The labels that a field gives."""

    numbers: npt.NDArray[np.int64] | None
    """Label of each sample, shape (samples,); None if the field's values give no labels."""
    classes: list[str]
    """Names that the labels number; empty if the values are numbers."""
    reason: str = ""
    """Why the values give no labels; follows the field's name."""


class LabelColumn:
    """The values of a label field, gathered part by part, of one kind: texts or numbers."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        """Gather labels; `given` are the classes that the source names, in its order."""
        self._given = list(given)
        self._numbers = GrowingColumn(signed=True)
        self._texts: dict[str, int] = {}
        self._gaps: list[int] = []
        """Samples whose number is missing (NaN)."""
        self._reason = ""
        self._count = 0

    @property
    def is_refused(self) -> bool:
        """True once a value is not a label."""
        return bool(self._reason)

    def add_texts(self, texts: Iterable[str | bytes | memoryview]) -> None:
        """Add texts, which are UTF-8 if they are bytes; others give no labels."""
        try:
            plain = [text if isinstance(text, str) else bytes(text).decode() for text in texts]
        except UnicodeDecodeError:
            self.refuse("is bytes that are not UTF-8")
            return
        different = list(dict.fromkeys(plain))
        place = {text: k for k, text in enumerate(different)}
        self.add_codes(different, np.array([place[text] for text in plain], np.int64))

    def add_codes(self, different: Sequence[str], codes: npt.NDArray[np.int64]) -> None:
        """Add texts as places, shape (n,), in a list of different ones."""
        self._count += len(codes)
        if self._reason:
            return
        own = [self._texts.setdefault(text, len(self._texts)) for text in different]
        if len(self._texts) > MAX_CLASSES:
            self._reason = f"has over {MAX_CLASSES} different texts, too many for classes"
        self._numbers.extend(np.array(own, np.int64)[codes] if own else codes)

    def add_numbers(self, values: npt.NDArray[np.generic]) -> None:
        """Add numbers of shape (n,), (n, 1) and so on; others give no labels."""
        first, self._count = self._count, self._count + len(values)
        if self._reason:
            return
        gaps = np.zeros(len(values), bool)
        if values.dtype.kind == "f" and values.size == len(values):
            gaps = np.isnan(values.reshape(-1))
            values = np.where(gaps, 0, values.reshape(-1))
        numbers = whole_labels(values)
        if numbers is None:
            self._reason = _why_none(values)
            return
        self._numbers.extend(numbers)
        self._gaps += (np.flatnonzero(gaps) + first).tolist()

    def refuse(self, reason: str) -> None:
        """Have the values be no labels, for a reason that follows the field's name."""
        self._reason = self._reason or reason

    def labels(self, name: str, where: Callable[[int], str]) -> SampleLabels:
        """Return the labels of all samples that were added.

        Raises SourceError for a missing one, unless numbers have fractions, and are to be
        predicted; `where` names a sample, `name` is the field's.
        """
        if self._reason or not self._numbers:
            return SampleLabels(None, [], self._reason)
        numbers = self._numbers.spread().astype(np.int64)
        if not self._texts:
            if self._gaps:
                raise _missing(name, where, self._gaps, len(numbers))
            return SampleLabels(numbers, self._given)
        encoding = encode_labels(self._texts)
        place = {text: k for k, text in enumerate(self._given)}
        if self._texts.keys() <= place.keys():
            encoding = LabelEncoding(place, self._given, frozenset())
        gaps = [self._texts[text] for text in encoding.missing]
        missing = np.flatnonzero(np.isin(numbers, gaps)).tolist()
        if missing:
            raise _missing(name, where, missing, len(numbers))
        new = np.array([encoding.numbers[text] for text in self._texts], np.int64)
        return SampleLabels(new[numbers], encoding.classes)


def _missing(
    name: str, where: Callable[[int], str], samples: Sequence[int], count: int
) -> SourceError:
    return SourceError(
        f"{where(samples[0])}: its {name} is empty, as in {len(samples)} of "
        f"{counted(count, 'sample')}: fill it, drop the sample, or name the fields to read without "
        "it"
    )


def _why_none(values: npt.NDArray[np.generic]) -> str:
    """Return why numbers give no labels."""
    sides = ",".join(str(size) for size in np.shape(values)[1:])
    if values.size != len(values) or values.dtype.kind not in "biuf":
        return not_scalar(f"{values.dtype.name}[{sides}]")
    if values.dtype.kind == "f":
        return "holds numbers with fractions: they are to be predicted, and not classes"
    return "holds numbers beyond 64 bits with a sign, too large for class numbers"


def not_scalar(kind: str) -> str:
    """Return why a field of a kind, which is neither a number nor text, gives no labels."""
    kinds = "masks, several labels or one-hot" if "[" in kind else "not text"
    gaps = ", or missing in some samples" if "[?]" in kind else ""
    return f"is {kind}, {kinds}{gaps}"


def label_names(names: Iterable[str], chosen: str | None = None) -> list[str]:
    """Return those of the names of fields that are of labels, in the order of `LABEL_NAMES`; the
    `chosen` one alone.

    In small letters or, where none is, in capitals. The label is the first whose values are labels.
    """
    if chosen is not None:
        return [chosen]
    known = list(names)
    exact: list[str] = [name for name in LABEL_NAMES if name in known]
    if exact:
        return exact
    small: dict[str, str] = {}
    for name in known:
        small.setdefault(name.lower(), name)
    return [small[name] for name in LABEL_NAMES if name in small]


def label_name(names: Iterable[str], chosen: str | None = None) -> str | None:
    """Return the first of `label_names`, None without one."""
    return next(iter(label_names(names, chosen)), None)


def with_label(names: Sequence[str], label: str | None) -> tuple[str, ...]:
    """Return the fields that a user names, none for all, with the one that `label=` chooses."""
    added = () if not names or label is None or label in names else (label,)
    return (*names, *added)


def field_named(name: str, label: str | None) -> str:
    """Return the field of a column or array: `label` for the one that `label=` chooses."""
    return LABEL_NAMES[0] if name == label else name


def no_such_label(path: str, names: Collection[str], label: str) -> UsageError:
    """Return the error for a `label=` that is none of the names of columns or arrays."""
    parts = [part.strip() for part in label.split(",")]
    if len(parts) > 1 and set(parts) <= set(names):
        return UsageError(
            f"label={label!r}: a label is one field: leave label= out, and several labels of a "
            f"sample stay fields of their own; {path}::{','.join(parts)} reads them alone"
        )
    return UsageError(
        f"label={label!r}: {path} has {listed(names)}, and nothing of that name"
        f"{nearest(label, names)}"
    )


def check_label(path: str, names: Collection[str], label: str | None) -> None:
    """Raise UsageError if `label=` chooses none of the names of columns or arrays that are read, or
    if another one is called `label`."""
    if label is None:
        return
    if label not in names:
        raise no_such_label(path, names, label)
    if label != LABEL_NAMES[0] and LABEL_NAMES[0] in names:
        raise UsageError(
            f"label={label!r}: {path} has a {LABEL_NAMES[0]!r} as well, and the chosen one takes "
            f"that name: name the others to read behind {path}::"
        )


def first_labels(
    columns: Mapping[str, LabelColumn], where: Callable[[int], str]
) -> tuple[str | None, SampleLabels]:
    """Return (field, its labels) of the first of some fields that gives labels; without one
    (None, why the first does not).

    Raises SourceError for a missing label; `where` names a sample.
    """
    reason = ""
    for name, column in columns.items():
        labelling = column.labels(name, where)
        if labelling.numbers is not None:
            return name, labelling
        reason = reason or (labelling.reason and f"its {name} {labelling.reason}")
    return None, SampleLabels(None, [], reason)


def likely_label(names: Iterable[str]) -> str | None:
    """Return a field that may be a label by its name, such as `image/class/text`; None without."""
    return next((name for name in names if any(part in name.lower() for part in _LIKELY)), None)


def most_likely_label(names: Sequence[str]) -> str:
    """Return that of some fields which is most likely a label by its name; without one the last,
    as a label mostly stands last in a table."""
    truths = [name for name in names if _words(name)[:1] in (["is"], ["has"])]
    return label_like(names) or next(reversed(truths), None) or likely_label(names) or names[-1]


def label_like(names: Iterable[str]) -> str | None:
    """Return the first of some fields with a word by which people call labels; None without one."""
    known = {*LABEL_NAMES, *_USUAL} - {"y"}  # Of a place, as in `centre_y`.
    clear = [name for name in names if not known.isdisjoint(_words(name))]
    return next(filter(_is_usual, clear), None) or next(iter(clear), None)


def _is_usual(name: str) -> bool:
    return not _USUAL.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def label_candidates(kinds: Mapping[str, str], is_wide: bool) -> list[str]:
    """Return the fields that may be labels, given the kinds of all: by their names, and of a wide
    table whole numbers and, next to numbers, texts; but no ids and times."""
    single = {
        name: kind
        for name, kind in kinds.items()
        if _SINGLE.fullmatch(kind) and name.lower() not in _INPUTS
    }
    likely = [name for name in single if likely_label([name]) or _is_usual(name)]
    if not is_wide or all(kind == "text" for kind in single.values()):
        return likely  # Texts to learn from, or about pictures.
    return likely + [
        name
        for name, kind in single.items()
        if not kind.startswith("float")
        and not is_index(name)
        and not _ID.search(name)
        and name not in likely
    ]


def repeating_fields(kinds: Mapping[str, str], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the fields of one value a sample, such as `sentiment`, that have few different values
    in some rows, while another field, such as `review`, differs from row to row."""
    single = [name for name, kind in kinds.items() if _SINGLE.fullmatch(kind)]
    values = {name: {_comparable(row[name]) for row in rows} for name in single}
    differs = len(single) < len(kinds) or any(
        len(own) >= _MOSTLY * len(rows) for own in values.values()
    )
    few = [name for name in single if 1 < len(values[name]) <= _SELDOM * len(rows)]
    few = [name for name in few if not kinds[name].startswith("float")]
    return [name for name in few if not is_index(name) and not _ID.search(name)] if differs else []


def _comparable(value: object) -> object:
    return bytes(value) if isinstance(value, memoryview) else value


def several_labels(classes: Sequence[str]) -> str:
    """Return the first of some classes that seems to be several labels, such as `cat|dog`, or
    `cat dog` next to classes `cat` and `dog`; "" without one."""
    known = set(classes)
    for name in classes:
        for mark in _BETWEEN_LABELS:
            parts = [part.strip() for part in name.split(mark)]
            if len(parts) > 1 and all(parts) and (mark in "|;" or known.issuperset(parts)):
                return name
    # Such as `clear primary`, `haze primary road` and so on, of few words.
    words = {word for name in classes for word in name.split(" ")}
    return "" if _FEW_WORDS * len(words) >= len(known) else next(n for n in classes if " " in n)


def twins_in_case(classes: Sequence[str]) -> str:
    """Return the words about the first two of some classes that differ only in case; "" without
    such."""
    small: dict[str, str] = {}
    for name in classes:
        other = small.setdefault(name.lower(), name)
        if other != name:
            return f"{other} and {name} are two classes, and differ only in case"
    return ""


def is_index(name: str) -> bool:
    """True for the name that pandas gives the column of its row numbers, in files or read again."""
    return not name or name.startswith(("Unnamed: ", "__index_level_"))


def one_hot(where: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return for each row the name of its only column that is 1 while the others are 0, and tell
    so; [] unless that holds for all rows, and several columns."""
    made: list[str] = []
    for row in rows:
        texts = [str(value).strip() for value in row]
        marks = [_TRUTHS.get(text, whole_number(text)) for text in texts]
        if marks.count(1) != 1 or marks.count(0) != len(names) - 1:
            return []
        made.append(names[marks.index(1)])
    if len(set(made)) < 2:
        return []
    tell_once(
        f"{where}: its columns {', '.join(names)} are one-hot: a label is the name of the column "
        "that is 1"
    )
    return made


def encode_labels(texts: Iterable[str]) -> LabelEncoding:
    """Return the labels that the texts of a column are, given each different text once or more.

    Spaces around a text do not count.
    """
    different = {text: text.strip() for text in texts}
    present = {text: value for text, value in different.items() if value}
    if present and all(value in _TRUTHS for value in present.values()):
        numbers = {text: _TRUTHS[value] for text, value in present.items()}
        return LabelEncoding(numbers, [], frozenset(different.keys() - present.keys()))
    values = {text: value for text, value in different.items() if value not in MISSING}
    if values and all(map(is_number, values.values())) and are_alike(values.values()):
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


def are_alike(numbers: Iterable[str]) -> bool:
    """True for numbers that are written the same way: without leading zeros, or with them to one
    width. Others are texts, such as `01` next to `1`, which is told."""
    digits = {text: text.lstrip("+-").partition(".")[0] for text in numbers}
    padded = next((text for text, own in digits.items() if own[:1] == "0" and len(own) > 1), None)
    if padded is None:
        return True
    width = len(digits[padded])
    odd = next(
        (
            text
            for text, own in digits.items()
            if len(own) < width or (len(own) > width and own[0] == "0")
        ),
        None,
    )
    if odd is not None:
        tell_once(
            f"labels that are numbers written in several ways, such as {padded} and {odd}, are "
            "taken for names of classes: write them alike if they are numbers"
        )
    return odd is None


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
    if flat.dtype.kind == "u" and (flat.astype(np.uint64) > np.iinfo(np.int64).max).any():
        return None
    if flat.dtype.kind == "f":
        wide = flat.astype(np.float64)
        if not (np.isfinite(wide) & (np.abs(wide) < 2**53) & (wide == np.trunc(wide))).all():
            return None
    return flat.astype(np.int64)


def first_missing(texts: Sequence[str], missing: frozenset[str]) -> int:
    """Return the number of the first text that stands for a missing label; -1 for none."""
    return next((k for k, text in enumerate(texts) if text in missing), -1)

"""Columns of a table as input of a network, and their description in weights and checkpoints."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from dlio.errors import SourceError

MISSING: Final = frozenset(
    ("", "?", "NA", "N/A", "n/a", "nan", "NaN", "null", "NULL", "None", "<NA>", "#N/A")
)
"""Texts that stand for a missing value."""


def is_missing(text: str) -> bool:
    """True for a text that stands for a missing value."""
    return text.strip() in MISSING


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers. A network gets (x - mean) / std, and 0 for a missing value."""

    name: str
    mean: float
    """Mean of the values that are there, over the training data."""
    std: float
    """Standard deviation; 1 for a constant column."""
    missing: int
    """Number of missing values in the training data: if there are any, the network also gets a
    column that is 1 where the value is missing."""


@dataclass(frozen=True, slots=True)
class CategoryColumn:
    """A column of categories: value k is number k + 1; 0 for a missing or unknown value."""

    name: str
    values: tuple[str, ...]
    """All values of the training data, sorted."""
    missing: int

    @property
    def codes(self) -> Mapping[str, int]:
        """Numbers of the values."""
        return {value: number for number, value in enumerate(self.values, 1)}


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """The column to predict: classes, or a number in standard deviations from its mean."""

    name: str
    classes: tuple[str, ...]
    """Names of the classes in the order of their numbers; empty for a number."""
    mean: float
    std: float

    @property
    def codes(self) -> Mapping[str, int]:
        """Numbers of the classes."""
        return {value: number for number, value in enumerate(self.classes)}


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns that a network is trained on, with their statistics over the training data."""

    numbers: tuple[NumberColumn, ...]
    categories: tuple[CategoryColumn, ...]
    target: TargetColumn

    @property
    def features(self) -> tuple[NumberColumn | CategoryColumn, ...]:
        """All columns but the target, in the order in which the network gets them."""
        return (*self.numbers, *self.categories)

    @property
    def width(self) -> int:
        """Number of columns that the network gets."""
        return len(self.features)

    def to_json(self) -> str:
        """Return the text that `from_json` parses."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "TableColumns":
        """Parse the description of columns. Raises SourceError for anything else."""
        try:
            parsed = json.loads(text)
            target = parsed["target"]
            return cls(
                tuple(
                    NumberColumn(str(each["name"]), *_scale(each), int(each["missing"]))
                    for each in parsed["numbers"]
                ),
                tuple(
                    CategoryColumn(str(each["name"]), _texts(each["values"]), int(each["missing"]))
                    for each in parsed["categories"]
                ),
                TargetColumn(str(target["name"]), _texts(target["classes"]), *_scale(target)),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise SourceError(f"the description of the columns is damaged: {error!r}") from error


def _scale(column: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and standard deviation of a column. Raises ValueError, TypeError."""
    mean, std = float(column["mean"]), float(column["std"])
    if not (math.isfinite(mean) and 0 < std < math.inf):
        raise ValueError(f"a mean of {mean} and a standard deviation of {std}")
    return mean, std


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)

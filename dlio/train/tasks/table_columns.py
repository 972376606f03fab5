"""Columns of a table as input of a network: their description in weights, and the first layer."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

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


# The first layer: rows become normalised numbers and embeddings

COLUMNS: Final = "encoder.columns"
"""Name of the columns' description in a network's state: JSON as uint8."""
_ONE_HOT: Final = 8
"""Most values of a category that become one number each; more are embedded."""
_WIDEST: Final = 32


class TableEncoder(nn.Module):
    """Normalise numbers and encode categories.

    Input: float64 (n, columns.width), NaN for missing numbers, see `CategoryColumn` for categories.
    Output: float32 (n, outputs): numbers, 1 for each missing number of columns that lacked some in
    training, and each category as one-hot numbers, or as an embedding of up to 32 numbers if it has
    many values (Guo and Berkhahn, arXiv 1604.06737; width as in fastai).

    The description of the columns, with all statistics, is a part of the state: weights are of no
    use without it.
    """

    columns: torch.Tensor

    def __init__(self, columns: TableColumns) -> None:
        super().__init__()
        text = np.frombuffer(columns.to_json().encode(), np.uint8).copy()
        self.register_buffer("columns", torch.from_numpy(text))
        self._numbers = len(columns.numbers)
        wide = torch.float64
        mean = torch.tensor([each.mean for each in columns.numbers], dtype=wide)
        std = torch.tensor([each.std for each in columns.numbers], dtype=wide)
        lacks = torch.tensor([k for k, each in enumerate(columns.numbers) if each.missing])
        for name, value in (("_mean", mean), ("_std", std), ("_lacks", lacks.long())):
            self.register_buffer(name, value, persistent=False)
        self._sizes = [len(each.values) + 1 for each in columns.categories]
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, min(_WIDEST, round(1.6 * size**0.56)))
            for size in self._sizes
            if size > _ONE_HOT + 1
        )
        one_hot = sum(size for size in self._sizes if size <= _ONE_HOT + 1)
        embedded = sum(_table(each).embedding_dim for each in self.embeddings)
        self.outputs = self._numbers + len(lacks) + one_hot + embedded
        """Numbers of a row for the next layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: float64 (n, columns.width) -> float32 (n, outputs)
        mean, std = self.get_buffer("_mean"), self.get_buffer("_std")
        numbers = ((x[:, : self._numbers] - mean) / std).float()
        missing = ~numbers.isfinite()  # Also where float32 ends.
        parts = [numbers.masked_fill(missing, 0.0)]
        parts.append(missing.index_select(1, self.get_buffer("_lacks")).float())
        embeddings = iter(self.embeddings)
        for place, size in enumerate(self._sizes, self._numbers):
            codes = x[:, place].long()
            if size > _ONE_HOT + 1:
                parts.append(next(embeddings)(codes))
            else:
                parts.append(nn.functional.one_hot(codes, size).float())
        return torch.cat(parts, 1)


class TableNetwork(nn.Module):
    """A network behind a `TableEncoder`. Input as the encoder's, output as the network's."""

    def __init__(self, encoder: TableEncoder, network: nn.Module) -> None:
        super().__init__()
        self.encoder, self.network = encoder, network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: float64 (n, columns.width) -> (n, classes), or (n, 1)
        outputs: torch.Tensor = self.network(self.encoder(x))
        return outputs


def columns_in(state: Mapping[str, torch.Tensor]) -> TableColumns | None:
    """Return the columns that a network's state describes; None if it is not one of a table.

    Raises SourceError for a damaged description.
    """
    described = state.get(COLUMNS)
    if described is None:
        return None
    if described.dtype is not torch.uint8:
        raise SourceError("the description of the columns is damaged: it is not text")
    return TableColumns.from_json(described.cpu().numpy().tobytes())


def _table(module: nn.Module) -> nn.Embedding:
    assert isinstance(module, nn.Embedding)
    return module

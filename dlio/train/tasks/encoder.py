"""The first layer of a network on a table: its rows become normalised numbers and embeddings."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import nn

from dlio.errors import SourceError
from dlio.train.tasks.table_columns import TableColumns

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

"""Batches without samples: of ranks that an epoch's last, small global batch does not reach."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class EmptyAware:
    """A collate_fn that also knows what no samples are: what it makes of one, cut to none."""

    collate: Callable[[list[Any]], Any]
    dataset: Any

    def __call__(self, items: list[Any]) -> Any:
        if len(items):
            return self.collate(items)
        return emptied(self.collate([self.dataset[0]]))


def emptied(data: Any) -> Any:
    """A batch of any structure with no samples left in it."""
    if isinstance(data, torch.Tensor):
        return data[:0] if data.ndim else data
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(emptied(item) for item in data))
    if isinstance(data, dict):
        return {key: emptied(item) for key, item in data.items()}
    if isinstance(data, tuple | list):
        nested = data and isinstance(data[0], torch.Tensor | dict | tuple | list)
        return type(data)(emptied(item) for item in data) if nested else type(data)()
    return data

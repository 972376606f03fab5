"""Data sets of torch's two kinds, for tests of the loader."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"index": index, "square": torch.tensor([index * index]), "name": f"n{index}"}


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.count, step))


def plain(value: Any) -> Any:
    """Tensors as lists, so that batches compare."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value).__name__, [plain(item) for item in value]
    return value

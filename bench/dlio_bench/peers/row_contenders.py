"""The contenders that load rows with dlio's own environment: dlio, torch, Hugging Face, NumPy.

`python -m dlio_bench.peers.row_contenders NAME` serves one of them. The files of a task are a NumPy
array of shape (samples, columns), an HDF5 file with the same as `features` and a `label` for each,
a folder packed of it without compression, and, where the rows are windows, a NumPy file of their
tokens, one after another. Windows have no labels: their first tokens take the place.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio_bench.bench_data import ram_tier
from dlio_bench.peers.standalone.runners.protocol import Pass, Task, serve

_Pair = tuple[torch.Tensor, torch.Tensor]


def _labelled(task: Task) -> bool:
    return len(task.files) == 3


def _array(task: Task) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(task.files[0], mmap_mode="r")
    return array


def _pairs(batches: Callable[[], Iterator[Any]]) -> Pass:
    """Make (rows, labels) of the batches that loaders give."""

    def run() -> Iterator[tuple[Any, Any]]:
        for batch in batches():
            if isinstance(batch, dict):
                rows = batch["features"] if "features" in batch else batch["data"]
                yield rows, batch["label"] if "label" in batch else rows[:, 0]
            elif isinstance(batch, torch.Tensor):
                yield batch, batch[:, 0]
            else:
                yield batch[0], batch[1]

    return run


def _dlio(task: Task, packed: bool = False, tier: bool = False) -> Pass:
    """dlio's loader: over HDF5 or windows of tokens, through a RAM tier or not, or over packed rows
    that no tier holds."""
    import dlio

    tiers = ram_tier(_array(task).nbytes + 8 * len(task.labels)) if tier else "none"
    if packed:
        data = dlio.open(task.files[2], tiers=tiers)
    elif _labelled(task):
        data = dlio.open(f"{task.files[1]}::features,label", tiers=tiers)
    else:
        columns = _array(task).shape[1]
        data = dlio.open(task.files[3], window=(columns, columns), tiers=tiers)
    loader = dlio.DataLoader(
        data, task.batch_size, shuffle=True, num_workers=task.workers, persistent_workers=True
    )
    return _pairs(lambda: iter(loader))


# Ways to have torch's loader load rows


class MappedRows(torch.utils.data.Dataset[Any]):
    """Rows of a memory map, one by one: (row, label), or a row where it has none."""

    def __init__(self, task: Task) -> None:
        self.rows = _array(task)
        self.labels = np.asarray(task.labels, np.int64) if _labelled(task) else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = torch.from_numpy(np.array(self.rows[index]))
        return row if self.labels is None else (row, int(self.labels[index]))


class GatheredRows(MappedRows):
    """The same rows, gathered for a whole batch by one call of NumPy."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor | _Pair:
        rows = torch.from_numpy(self.rows[indices])
        return rows if self.labels is None else (rows, torch.from_numpy(self.labels[indices]))


class Hdf5Rows(MappedRows):
    """The same rows, each read from an HDF5 file, which every process opens for itself."""

    _file: Any = None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._path = task.files[1]

    def __getitem__(self, index: int) -> Any:
        import h5py

        if self._file is None:
            self._file = h5py.File(self._path, "r")
        row = torch.from_numpy(self._file["features"][index])
        return row if self.labels is None else (row, int(self._file["label"][index]))


def _as_it_is(batch: Any) -> Any:
    return batch


def _torch(task: Task, kind: type[MappedRows]) -> Pass:
    loader = torch.utils.data.DataLoader(
        kind(task),
        task.batch_size,
        shuffle=True,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
        collate_fn=_as_it_is if kind is GatheredRows else None,
    )
    return _pairs(lambda: iter(loader))


def _hugging_face(task: Task) -> Pass:
    """A table in Hugging Face's format, whose rows torch's loader asks for by batches."""
    import datasets

    columns: dict[str, Any] = {"features": np.array(_array(task))}
    if _labelled(task):
        columns["label"] = np.asarray(task.labels, np.int64)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(f"{task.scratch}/table")
    data: Any = datasets.load_from_disk(f"{task.scratch}/table")
    data.set_format("torch")
    sampler = torch.utils.data.RandomSampler(data)
    loader: Any = torch.utils.data.DataLoader(
        data,
        batch_size=None,
        sampler=torch.utils.data.BatchSampler(sampler, task.batch_size, drop_last=False),
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )
    return _pairs(lambda: iter(loader))


def _numpy(task: Task, checked: bool) -> Pass:
    """The limit: one thread gathers rows that lie in memory into memory that is used again, and
    takes the checksum of each as dlio does."""
    import xxhash

    rows, labels = np.array(_array(task)), np.asarray(task.labels, np.int64)
    memory = np.empty((task.batch_size, rows.shape[1]), rows.dtype)
    random = np.random.default_rng(0)

    def run() -> Iterator[tuple[Any, Any]]:
        order = random.permutation(len(rows))
        for begin in range(0, len(order), task.batch_size):
            chosen = order[begin : begin + task.batch_size]
            # Without a mode that checks nothing, NumPy gathers into a copy first.
            batch = rows.take(chosen, 0, memory[: len(chosen)], "clip")
            if checked:
                _checksums(xxhash.xxh3_64_intdigest, batch)
            yield batch, labels[chosen]

    return run


def _checksums(digest: Callable[[Any], int], rows: Sequence[Any] | npt.NDArray[Any]) -> list[int]:
    return [digest(row) for row in rows]


MAKERS: Final[dict[str, Callable[[Task], Pass]]] = {
    "dlio": partial(_dlio, tier=True),
    "file": _dlio,
    "packed": partial(_dlio, packed=True),
    "torch_getitems": partial(_torch, kind=GatheredRows),
    "torch_h5py": partial(_torch, kind=Hdf5Rows),
    "torch_collate": partial(_torch, kind=MappedRows),
    "hugging_face": _hugging_face,
    "numpy": partial(_numpy, checked=False),
    "numpy_checked": partial(_numpy, checked=True),
}
"""Functions that prepare a contender and return its pass, by name."""


if __name__ == "__main__":
    serve(MAKERS[sys.argv[1]], ())

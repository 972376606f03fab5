"""Grain: worker processes that decode with Pillow, or its threads that take rows."""

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from .crops import cropped
from .files import read
from .protocol import Pass, Task


def grain(task: Task) -> Pass:
    """Return a pass over the files, in uint8 HWC."""
    import grain.python as gp

    class Source:
        def __len__(self) -> int:
            return len(task.files)

        def __getitem__(self, index: Any) -> Any:
            return read(task.files[index]), task.labels[index]

    class Crop(gp.MapTransform):  # type: ignore[misc, unused-ignore]
        def map(self, element: Any) -> Any:
            return cropped(io.BytesIO(element[0]), task.size), element[1]

    def run() -> Iterator[tuple[Any, Any]]:
        sampler = gp.IndexSampler(
            num_records=len(task.files),
            shuffle=True,
            seed=random.randint(0, 1 << 30),
            num_epochs=1,
            shard_options=gp.NoSharding(),
        )
        loader = gp.DataLoader(
            data_source=Source(),
            sampler=sampler,
            operations=[Crop(), gp.Batch(task.batch_size)],
            worker_count=task.workers,
        )
        yield from loader

    return run


def grain_rows(task: Task) -> Pass:
    """Return a pass over the rows of a memory map, in batches of (rows, labels)."""
    import grain.python as gp

    rows, labels = np.load(task.files[0], mmap_mode="r"), np.asarray(task.labels, np.int64)

    class Source:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: Any) -> Any:
            return np.array(rows[index]), labels[index]

    def run() -> Iterator[tuple[Any, Any]]:
        shuffled = gp.MapDataset.source(Source()).shuffle(seed=random.randint(0, 1 << 30))
        batches = shuffled.to_iter_dataset().batch(task.batch_size)
        if task.workers:
            options = gp.MultiprocessingOptions(num_workers=task.workers)
            batches = batches.mp_prefetch(options)
        yield from batches

    return run

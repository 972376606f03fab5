"""Grain: worker processes that decode with Pillow."""

import io
import random
from collections.abc import Iterator
from typing import Any

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

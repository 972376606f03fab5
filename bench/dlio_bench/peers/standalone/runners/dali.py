"""NVIDIA DALI's pipeline on the processor: crops are drawn, then only they are decoded."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .protocol import Pass, Task


def dali(task: Task) -> Pass:
    """Return a pass of a pipeline that reads the files and ends in uint8 HWC."""
    from nvidia.dali import fn, pipeline_def, types

    def pictures() -> Any:
        encoded, labels = fn.readers.file(
            files=task.files,
            labels=task.labels,
            random_shuffle=True,
            initial_fill=min(1024, len(task.files)),
            pad_last_batch=True,
            name="reader",
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
        )
        images = fn.resize(
            images, size=[task.size, task.size], interp_type=types.INTERP_LINEAR, antialias=False
        )
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    make: Any = pipeline_def(
        pictures, batch_size=task.batch_size, num_threads=task.workers, device_id=None, seed=1
    )
    pipeline = make()
    pipeline.build()

    def run() -> Iterator[tuple[Any, Any]]:
        left = len(task.files)
        while left > 0:
            images, labels = pipeline.run()
            # The reader fills the last batch by repetition.
            count = min(left, task.batch_size)
            left -= count
            yield (
                np.asarray(images.as_tensor())[:count],
                np.asarray(labels.as_tensor()).reshape(-1)[:count],
            )

    return run

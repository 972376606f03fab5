"""NVIDIA DALI's pipeline: crops are drawn, then only they are decoded."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .protocol import Pass, Task


def pipeline_of(
    reader: Mapping[str, object],
    size: int,
    batch_size: int,
    workers: int,
    device: int | None = None,
    **decoder: float,
) -> tuple[int, Callable[[], object]]:
    """Return the samples of a pass, and a function that makes the next batch of one: random
    resized crops of files, of which only the crops are decoded, by a GPU or by the processor.
    DALI's reader of files and its decoder get further arguments."""
    from nvidia.dali import fn, pipeline_def, types

    def pictures() -> Any:
        encoded, labels = fn.readers.file(
            random_shuffle=True, pad_last_batch=True, name="reader", **reader
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu" if device is None else "mixed",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
            **decoder,
        )
        images = fn.resize(
            images, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=False
        )
        flipped = fn.flip(images, horizontal=fn.random.coin_flip())
        return flipped, labels if device is None else labels.gpu()

    make: Any = pipeline_def(
        pictures, batch_size=batch_size, num_threads=workers, device_id=device, seed=1
    )
    pipeline = make()
    pipeline.build()
    return int(pipeline.epoch_size("reader")), pipeline.run


def dali(task: Task) -> Pass:
    """Return a pass of a pipeline on the processor that ends in uint8 HWC."""
    fill = min(1024, len(task.files))
    reader = {"files": task.files, "labels": task.labels, "initial_fill": fill}
    _, next_batch = pipeline_of(reader, task.size, task.batch_size, task.workers)

    def run() -> Iterator[tuple[Any, Any]]:
        left = len(task.files)
        while left > 0:
            batch: Any = next_batch()
            images, labels = batch
            # The reader fills the last batch by repetition.
            count = min(left, task.batch_size)
            left -= count
            yield (
                np.asarray(images.as_tensor())[:count],
                np.asarray(labels.as_tensor()).reshape(-1)[:count],
            )

    return run

"""SPDL: a pipeline of threads that decode with FFmpeg."""

import random
from collections.abc import Iterator
from typing import Any

from .crops import box
from .files import read
from .protocol import Pass, Task


def spdl(task: Task) -> Pass:
    """Return a pass of a pipeline that reads the files and ends in uint8 HWC."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def decode(index: int) -> Any:
        packets = spdl.io.demux_image(read(task.files[index]))
        top, left, height, width = box(packets.height, packets.width)
        steps = [
            f"crop={width}:{height}:{left}:{top}",
            f"scale={task.size}:{task.size}:flags=bilinear",
            *(["hflip"] if random.random() < 0.5 else []),
            "format=pix_fmts=rgb24",
        ]
        return spdl.io.decode_packets(packets, filter_desc=",".join(steps)), task.labels[index]

    def batch(samples: list[Any]) -> Any:
        frames = [frame for frame, _ in samples]
        return (
            spdl.io.to_numpy(spdl.io.convert_frames(frames)),
            [label for _, label in samples],
        )

    def run() -> Iterator[tuple[Any, Any]]:
        order = list(range(len(task.files)))
        random.shuffle(order)
        builder = PipelineBuilder().add_source(order)
        builder = builder.pipe(decode, concurrency=task.workers).aggregate(task.batch_size)
        pipeline = builder.pipe(batch).add_sink(3).build(num_threads=task.workers)
        with pipeline.auto_stop():
            yield from pipeline

    return run

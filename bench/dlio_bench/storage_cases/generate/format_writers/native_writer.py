"""The writer of native shards, with fields `image` and `label`."""

from typing import Final

import numpy as np

from dlio.data.schema import Schema
from dlio.plan.layout import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, MIN_BLOCKS
from dlio_bench.storage_cases.generate.format_writers.part import FilePart
from dlio_bench.storage_cases.generate.stamp import digest_of
from dlio_staging.pack_writers import NativeWriter, ShardRequest

_SCHEMA: Final = Schema((("image", "bytes"), ("label", "int64")))


def write_native(path: str, part: FilePart) -> None:
    """Write a shard; every file has as many blocks, about as large as those of `dlio pack`."""
    workload, count = part.workload, len(part.sizes)
    file_bytes = workload.samples_per_file * workload.sample_bytes
    target = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, file_bytes * workload.files / MIN_BLOCKS))
    blocks = int(max(1, min(count, round(file_bytes / target))))
    ends = np.cumsum([len(each) for each in np.array_split(np.arange(count), blocks)]).tolist()
    first = part.number * blocks
    shard = ShardRequest(
        schema=_SCHEMA,
        classes=(),
        fingerprint=digest_of(workload),
        number=part.number,
        shards=workload.files,
        first=part.first,
        total=workload.samples,
        blocks=tuple(range(first, first + blocks)),
        samples=count,
        compress="none",
    )
    writer = NativeWriter(path, shard)
    try:
        held: list[bytes | memoryview] = []
        done = 0
        for data in part.payloads():
            held.append(_SCHEMA.join({"image": data.tobytes(), "label": part.label}))
            if part.first + done + len(held) == part.first + ends[0]:
                names = [f"{part.first + done + row:09d}" for row in range(len(held))]
                writer.write(first, held, names, [part.label] * len(held))
                first, done, held = first + 1, ends.pop(0), []
        writer.finish()
    finally:
        writer.close()

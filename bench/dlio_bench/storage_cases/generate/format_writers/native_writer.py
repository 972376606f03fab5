"""The writer of native shards, with fields `image` and `label`."""

import io
import tarfile
from typing import Final

import h5py
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


# The writer of class folders: PPM images of random pixels


def write_folder(path: str, part: FilePart) -> None:
    """Write a file, which is one sample."""
    (data,) = part.payloads()
    with open(path, "xb") as file:
        file.write(data.data)


# The writer of HDF5 files with data sets `records_0` and `labels`, as DLIO's generator names them


def write_hdf5(path: str, part: FilePart) -> None:
    """Write a file, contiguous and without filters, one sample at a time."""
    with h5py.File(path, "x", libver="latest") as file:
        shape = (len(part.sizes), int(part.sizes[0]), 1)
        records = file.create_dataset("records_0", shape, np.uint8)
        for row, data in enumerate(part.payloads()):
            records[row] = data[:, np.newaxis]
        file.create_dataset("labels", data=np.full(len(part.sizes), part.label, np.int64))


# The writer of .npz files with arrays `x` and `y`, as DLIO's generator names them


def write_npz(path: str, part: FilePart) -> None:
    """Write a file without compression."""
    rows = list(part.payloads())
    x = rows[0].reshape(-1, 1, 1) if len(rows) == 1 else np.stack(rows)
    with open(path, "xb") as file:
        np.savez(file, x=x, y=np.full(len(rows), part.label, np.int64))


# The writer of WebDataset tars, with members such as `000042.bin` and `000042.cls`


def write_tar(path: str, part: FilePart) -> None:
    """Write a tar whose members are named by the numbers of their samples."""
    with tarfile.open(path, "x") as archive:
        for row, data in enumerate(part.payloads()):
            key = f"{part.first + row:09d}"
            for extension, body in (("image", data.tobytes()), ("cls", b"%d" % part.label)):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))

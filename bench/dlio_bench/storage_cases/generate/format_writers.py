"""Writers of one file of a workload, one for each format; WRITERS names them."""

import io
import os
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from dlio.data.schema import Buffer, Schema
from dlio.plan.layout import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, MIN_BLOCKS
from dlio_bench.storage_cases.generate.content import payload
from dlio_bench.storage_cases.generate.stamp import digest_of
from dlio_bench.storage_cases.workload import Format, Workload
from dlio_readers.tfrecord import FOOT, masked
from dlio_staging.pack_writers import NativeWriter, PackedRows, ShardRequest

_SCHEMA: Final = Schema((("image", "bytes"), ("label", "int64")))
_GROUP_BYTES: Final = 16 << 20
"""Approximate bytes of a row group of Parquet."""
_LENGTH: Final = struct.Struct("<Q")
_BYTES_LIST, _INT64_LIST = 1, 3


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file to write: its samples, and their workload."""

    workload: Workload
    number: int
    """Number of the file."""
    label: int
    """Label of its samples."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each of its samples."""
    first: int
    """Number of its first sample."""

    def payloads(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the bytes of each sample, in order."""
        for row, size in enumerate(self.sizes.tolist()):
            yield payload(self.workload, self.first + row, size)


# Native shards, with fields `image` and `label`


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
        compress="none",
    )
    writer = NativeWriter(path, shard)
    try:
        held: list[Buffer] = []
        done = 0
        for data in part.payloads():
            held.append(_SCHEMA.join({"image": data.tobytes(), "label": part.label}))
            if done + len(held) == ends[0]:
                names = [f"{part.first + done + row:09d}" for row in range(len(held))]
                digests = [xxhash.xxh3_64_intdigest(payload) for payload in held]
                labels = [part.label] * len(held)
                rows = PackedRows(held, names, labels, digests)
                writer.write(first, rows, [0, len(held)])
                first, done, held = first + 1, ends.pop(0), []
        writer.finish()
    finally:
        writer.close()


# Class folders: PPM images of random pixels


def write_folder(path: str, part: FilePart) -> None:
    """Write a file, which is one sample."""
    (data,) = part.payloads()
    with open(path, "xb") as file:
        file.write(data.data)


# HDF5 files with data sets `records_0` and `labels`, as DLIO's generator names them


def write_hdf5(path: str, part: FilePart) -> None:
    """Write a file, contiguous and without filters, one sample at a time."""
    with h5py.File(path, "x", libver="latest") as file:
        shape = (len(part.sizes), int(part.sizes[0]), 1)
        records = file.create_dataset("records_0", shape, np.uint8)
        for row, data in enumerate(part.payloads()):
            records[row] = data[:, np.newaxis]
        file.create_dataset("labels", data=np.full(len(part.sizes), part.label, np.int64))


# .npz files with arrays `x` and `y`, as DLIO's generator names them


def write_npz(path: str, part: FilePart) -> None:
    """Write a file without compression."""
    rows = list(part.payloads())
    x = rows[0].reshape(-1, 1, 1) if len(rows) == 1 else np.stack(rows)
    with open(path, "xb") as file:
        np.savez(file, x=x, y=np.full(len(rows), part.label, np.int64))


# WebDataset tars, with members such as `000042.bin` and `000042.cls`


def write_tar(path: str, part: FilePart) -> None:
    """Write a tar whose members are named by the numbers of their samples."""
    with tarfile.open(path, "x") as archive:
        for row, data in enumerate(part.payloads()):
            key = f"{part.first + row:09d}"
            for extension, body in (("image", data.tobytes()), ("cls", b"%d" % part.label)):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))


# Parquet files with columns `image` and `label`


def write_parquet(path: str, part: FilePart) -> None:
    """Write a file without compression and dictionaries, row group by row group."""
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    rows = max(1, _GROUP_BYTES // max(1, int(part.sizes.mean())))
    payloads = part.payloads()
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while held := [data.tobytes() for data in islice(payloads, rows)]:
            labels = [part.label] * len(held)
            writer.write_table(pa.table({"image": held, "label": labels}, schema))


# TFRecord files of tf.train.Example, with features `image`, `size` and `label`
#
# DLIO's generator writes `image` and `size`. Messages are encoded here: their format is two dozen
# bytes, and the library that knows it is TensorFlow.


def write_tfrecord(path: str, part: FilePart) -> None:
    """Write a file of one record for each sample."""
    with open(path, "xb") as file:
        for data in part.payloads():
            features = {
                "image": _field(_BYTES_LIST, _field(1, data.tobytes())),
                "label": _field(_INT64_LIST, _field(1, _varint(part.label))),
                "size": _field(_INT64_LIST, _field(1, _varint(len(data)))),
            }
            entries = (
                _field(1, _field(1, name.encode()) + _field(2, feature))
                for name, feature in features.items()
            )
            record = _field(1, b"".join(entries))
            length = _LENGTH.pack(len(record))
            file.write(length + FOOT.pack(masked(length)))
            file.write(record)
            file.write(FOOT.pack(masked(record)))


def _field(number: int, body: bytes) -> bytes:
    """Encode a field of protobuf's type LEN."""
    return b"".join((_varint(number << 3 | 2), _varint(len(body)), body))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# A Zarr store, version 3, with arrays `x` and `y`: its shards are the files
#
# x: uint8, (samples, size), one chunk for each sample. y: int64, (samples,), one chunk.


def make_store(path: str, workload: Workload, labels: npt.NDArray[np.int64], size: int) -> None:
    """Write the store's description and its labels."""
    import zarr

    group = zarr.open_group(path, mode="a", zarr_format=3)
    _samples_array(group, workload.samples, workload.samples_per_file, size)
    group.create_array(
        "y",
        data=labels,
        chunks=labels.shape,
        compressors=None,
        config={"write_empty_chunks": True},
        overwrite=True,
    )


def write_zarr(path: str, part: FilePart) -> None:
    """Write a shard, as Zarr makes it of a store that holds these samples only."""
    import zarr

    count, size = len(part.sizes), int(part.sizes[0])
    store = f"{path}.store"
    shutil.rmtree(store, ignore_errors=True)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        group = zarr.open_group(store, mode="w", zarr_format=3)
        array = _samples_array(group, count, count, size)
        array[:] = np.stack(list(part.payloads()))
        os.rename(os.path.join(store, "x", "c", "0", "0"), path)
    finally:
        shutil.rmtree(store, ignore_errors=True)


def _samples_array(group: Any, samples: int, per_file: int, size: int) -> Any:
    return group.create_array(
        "x",
        shape=(samples, size),
        dtype="uint8",
        chunks=(1, size),
        shards=(per_file, size) if per_file > 1 else None,
        compressors=None,
        config={"write_empty_chunks": True},
        overwrite=True,
    )


WRITERS: Final[dict[Format, Callable[[str, FilePart], None]]] = {
    "folder": write_folder,
    "npz": write_npz,
    "hdf5": write_hdf5,
    "zarr": write_zarr,
    "parquet": write_parquet,
    "tar": write_tar,
    "tfrecord": write_tfrecord,
    "native": write_native,
}
"""Each is called with the path to write, which does not exist, and the samples to write there."""

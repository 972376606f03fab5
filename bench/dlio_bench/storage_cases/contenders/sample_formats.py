"""Data sets of each format for torch's DataLoader, by the format's own library.

A sample is (its number, its bytes as a tensor, seconds that it took).
"""

import itertools
import struct
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from dlio_bench.storage_cases.contenders.rank_loader import LoaderShare

Timed = tuple[int, torch.Tensor, float]
Bytes = npt.NDArray[np.uint8]
_LENGTH: Final = struct.Struct("<Q")
_LEN: Final = 2
"""Protobuf's wire type of a field that begins with its length."""


class IndexedSamples(torch.utils.data.Dataset[Timed]):
    """Samples by number: folder, npz, hdf5, zarr and native. Files stay open in each worker."""

    def __init__(self, place: LoaderShare) -> None:
        self._place = place
        self._open: dict[str, Any] = {}
        self._read = _READERS[place.workload.format]

    def __len__(self) -> int:
        return self._place.workload.samples

    def __getitem__(self, sample: int) -> Timed:
        began = time.perf_counter()
        data = torch.from_numpy(self._read(self._place, self._open, sample))
        return sample, data, time.perf_counter() - began


class SequentialSamples(torch.utils.data.IterableDataset[Timed]):
    """Samples in the order of their files: tar, tfrecord and parquet.

    Files are shuffled, and dealt to the workers of all ranks.
    """

    def __init__(self, place: LoaderShare, epoch: int, workers: int) -> None:
        self._place, self._epoch, self._workers = place, epoch, max(1, workers)

    def files_of(self, worker: int) -> list[int]:
        """Return the numbers of a worker's files, in the order of the epoch."""
        workload = self._place.workload
        order = np.arange(workload.files)
        if workload.shuffle:
            np.random.default_rng((workload.seed, self._epoch)).shuffle(order)
        mine = order[self._place.rank :: self._place.ranks]
        return [int(number) for number in mine[worker :: self._workers]]

    def __iter__(self) -> Iterator[Timed]:
        worker = torch.utils.data.get_worker_info()
        generated = self._place.generated
        per_file = generated.workload.samples_per_file
        stream = _STREAMS[generated.workload.format]
        for number in self.files_of(worker.id if worker is not None else 0):
            samples = stream(generated.files[number])
            for row in itertools.count():
                began = time.perf_counter()
                data = next(samples, None)
                if data is None:
                    break
                tensor = torch.from_numpy(np.array(data))
                yield number * per_file + row, tensor, time.perf_counter() - began


def is_sequential(format_name: str) -> bool:
    """True if the format is read in the order of its files."""
    return format_name in _STREAMS


def _folder(place: LoaderShare, _: dict[str, Any], sample: int) -> Bytes:
    return np.fromfile(place.generated.files[sample], np.uint8)


def _npz(place: LoaderShare, _: dict[str, Any], sample: int) -> Bytes:
    number, row = divmod(sample, place.workload.samples_per_file)
    with np.load(place.generated.files[number]) as file:
        x: Bytes = file["x"]
    return x if place.workload.samples_per_file == 1 else x[row]


def _hdf5(place: LoaderShare, opened: dict[str, Any], sample: int) -> Bytes:
    import h5py

    number, row = divmod(sample, place.workload.samples_per_file)
    path = place.generated.files[number]
    if place.workload.samples_per_file == 1:
        with h5py.File(path) as file:
            return np.asarray(file["records_0"])
    if path not in opened:
        opened[path] = h5py.File(path)
    return np.asarray(opened[path]["records_0"][row])


def _zarr(place: LoaderShare, opened: dict[str, Any], sample: int) -> Bytes:
    import zarr

    if "group" not in opened:
        opened["group"] = zarr.open_group(place.generated.source.partition("::")[0], mode="r")
    return np.asarray(opened["group"]["x"][sample])


def _native(place: LoaderShare, opened: dict[str, Any], sample: int) -> Bytes:
    import dlio

    if "data" not in opened:
        opened["data"] = dlio.open(place.generated.source, tiers="none", image_size=None)
    return np.frombuffer(bytearray(opened["data"][sample]["image"]), np.uint8)


_READERS: Final[dict[str, Callable[[LoaderShare, dict[str, Any], int], Bytes]]] = {
    "folder": _folder,
    "npz": _npz,
    "hdf5": _hdf5,
    "zarr": _zarr,
    "native": _native,
}


def _tar(path: str) -> Iterator[Bytes]:
    with tarfile.open(path, "r|") as archive:
        for member in archive:
            if member.name.endswith(".image"):
                stream = archive.extractfile(member)
                assert stream is not None
                yield np.frombuffer(stream.read(), np.uint8)


def _parquet(path: str) -> Iterator[Bytes]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64, columns=["image"]):
            for value in batch.column(0):
                yield np.frombuffer(value.as_buffer(), np.uint8)


def _tfrecord(path: str) -> Iterator[Bytes]:
    with open(path, "rb") as file:
        while header := file.read(12):
            record = file.read(_LENGTH.unpack(header[:8])[0])
            file.seek(4, 1)
            yield np.frombuffer(_image_of(memoryview(record)), np.uint8)


def _image_of(record: memoryview) -> memoryview:
    """Return the value of the feature `image` of a serialized tf.train.Example."""
    for entry in _fields(next(_fields(record))):
        key, value = _fields(entry)
        if bytes(key) == b"image":
            return next(_fields(next(_fields(value))))
    raise ValueError("a record without the feature image")


def _fields(message: memoryview) -> Iterator[memoryview]:
    """Yield the fields of a message that begin with their length."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        size, at = _varint(message, at)
        if tag & 7 == _LEN:
            yield message[at : at + size]
            at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


_STREAMS: Final[dict[str, Callable[[str], Iterator[Bytes]]]] = {
    "tar": _tar,
    "parquet": _parquet,
    "tfrecord": _tfrecord,
}

"""Loaders that `dlio bench storage` measures: torch's, with a data set per format, dlio's, and a
user's own; and reads without a loader, the most that the storage gives."""

import importlib
import itertools
import os
import struct
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import xxhash

import dlio
from dlio.data.requests import observed_requests
from dlio.errors import SourceError, UsageError
from dlio.util.trusted_files import closing_descriptor
from dlio_bench.storage_cases.generate import GeneratedData
from dlio_bench.storage_cases.workload import Workload

# The contract between the benchmark and a loader

Payload: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8] | torch.Tensor
"""A sample as a loader gives it."""
Received: TypeAlias = tuple[Sequence[int], Sequence[Payload]]
"""Numbers of a batch's samples, and their bytes: tensors, arrays or bytes, one for each."""


@dataclass(frozen=True, slots=True)
class LoaderShare:
    """The data that a rank's loader reads, and its share."""

    generated: GeneratedData
    rank: int
    ranks: int
    tiers: str | None = None
    """Tiers of dlio; None for its default."""

    @property
    def workload(self) -> Workload:
        """The workload."""
        return self.generated.workload

    @property
    def steps(self) -> int:
        """Whole batches of each rank in an epoch."""
        return self.workload.samples // (self.workload.batch_size * self.ranks)

    def order(self, count: int, epoch: int) -> list[int]:
        """Return this rank's part of the numbers below `count`, in the order of an epoch."""
        order = np.arange(count)
        if self.workload.shuffle:
            np.random.default_rng((self.workload.seed, epoch)).shuffle(order)
        mine: list[int] = order[self.rank :: self.ranks].tolist()
        return mine


@dataclass(slots=True)
class PassCounts:
    """Counts of a loader's last pass."""

    request_s: list[float] = field(default_factory=list)
    """Seconds of the requests to storage, or of single samples where a loader has no others."""
    source_bytes: int | None = None
    """Bytes of samples that came from the files, and not from a tier; None if all did."""
    request_kind: str = "sample"
    """`request` to the file system, or `sample`: all that a sample took."""


class RankLoader:
    """A loader of one rank, made before the first epoch and used for all of them."""

    steps: int
    """Steps of an epoch: the same on all ranks."""
    left_out = 0
    """Samples of all ranks that an epoch leaves out, beyond an incomplete last batch."""

    def batches(self, epoch: int) -> Iterator[object]:
        """Begin a pass; epochs count from 0. Yields at least `steps` batches."""
        raise NotImplementedError

    def received(self, batch: object) -> Received:
        """Return the samples of a batch."""
        raise NotImplementedError

    def passed(self) -> PassCounts:
        """Return the counts of the pass that has ended."""
        return PassCounts()

    def close(self) -> None:
        """End its processes and threads."""


def body(workload: Workload, data: Payload) -> npt.NDArray[np.uint8]:
    """Return a sample's bytes without an image's header, as a flat array; a tensor of an image has
    shape (3, height, width)."""
    if isinstance(data, torch.Tensor):
        image = workload.format == "folder" and data.ndim == 3
        array = (data.permute(1, 2, 0) if image else data).contiguous().numpy()
    elif isinstance(data, bytes | bytearray | memoryview):
        array = np.frombuffer(data, np.uint8)
    else:
        array = data
    flat: npt.NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1)
    if workload.format != "folder" or bytes(flat[:3]) != b"P6\n":
        return flat
    header = bytes(flat[:64]).split(b"\n", 3)
    width, height = map(int, header[1].split())
    first = sum(len(line) + 1 for line in header[:3])
    return flat[first : first + 3 * width * height]


def digest(workload: Workload, data: Payload) -> int:
    """Return the 63-bit digest of a sample's bytes."""
    return xxhash.xxh3_64_intdigest(body(workload, data).data) >> 1


# Data sets of each format for torch's DataLoader, by the format's own library

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
        mine = self._place.order(self._place.workload.files, self._epoch)
        return mine[worker :: self._workers]

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


# torch's DataLoader with worker processes, as a user of torch writes it


_Batch = tuple[list[int], Any, list[float]]
"""Numbers of the samples, their bytes, seconds of each."""


class _RankSampler(torch.utils.data.Sampler[int]):
    """A rank's samples of an epoch: every rank-th of a permutation, whole batches only."""

    def __init__(self, place: LoaderShare) -> None:
        self._place = place
        self.epoch = 0

    def __len__(self) -> int:
        return self._place.steps * self._place.workload.batch_size

    def __iter__(self) -> Iterator[int]:
        yield from self._place.order(self._place.workload.samples, self.epoch)[: len(self)]


class TorchLoader(RankLoader):
    """torch's DataLoader; workers live on from epoch to epoch where samples have numbers."""

    def __init__(self, place: LoaderShare) -> None:
        self._place = place
        self._workers = place.workload.workers
        self._request_s: list[float] = []
        workload = place.workload
        self._loader: Any = None
        self.steps = place.steps
        if workload.format in _STREAMS:
            if workload.files < place.ranks:
                raise UsageError(
                    f"{workload.format} is read file by file: {place.ranks} ranks need at least "
                    f"as many files, and there are {workload.files} (--files)"
                )
            self.steps = self._sequential_steps()
            if not self.steps:
                raise UsageError(
                    f"the files of one of torch's workers have less than a batch of "
                    f"{workload.batch_size}: give more --files, fewer --workers or a smaller "
                    "--batch-size"
                )
            self.left_out = (place.steps - self.steps) * workload.batch_size * place.ranks
        else:
            self._sampler = _RankSampler(place)
            self._loader = self._loader_of(IndexedSamples(place), sampler=self._sampler)

    def batches(self, epoch: int) -> Iterator[object]:
        self._request_s = []
        if self._loader is not None:
            self._sampler.epoch = epoch
            return iter(self._loader)
        return iter(self._loader_of(SequentialSamples(self._place, epoch, self._workers)))

    def received(self, batch: object) -> Received:
        numbers, data, seconds = cast(_Batch, batch)
        self._request_s += seconds
        return numbers, data

    def passed(self) -> PassCounts:
        return PassCounts(self._request_s)

    def close(self) -> None:
        # Its workers end with its iterator.
        self._loader = None

    def _loader_of(self, data: Any, **options: Any) -> Any:
        return torch.utils.data.DataLoader(
            data,
            self._place.workload.batch_size,
            num_workers=self._workers,
            persistent_workers=self._workers > 0 and "sampler" in options,
            drop_last=True,
            collate_fn=_collate,
            multiprocessing_context="fork" if self._workers else None,
            **options,
        )

    def _sequential_steps(self) -> int:
        """Return the steps that every rank has: each worker fills batches of its own files."""
        per_file, batch = self._place.workload.samples_per_file, self._place.workload.batch_size

        def steps_of(rank: int) -> int:
            data = SequentialSamples(replace(self._place, rank=rank), 0, self._workers)
            workers = range(max(1, self._workers))
            return sum(len(data.files_of(k)) * per_file // batch for k in workers)

        return min(map(steps_of, range(self._place.ranks)))


def _collate(samples: Sequence[Timed]) -> _Batch:
    """Stack samples of one size; a list of tensors otherwise."""
    numbers, data, seconds = zip(*samples, strict=True)
    alike = len({each.shape for each in data}) == 1
    joined = torch.utils.data.default_collate(list(data)) if alike else list(data)
    return list(numbers), joined, list(seconds)


# Parallel reads of a data set's files without a loader: the most that the storage gives


THREADS: Final = (1, 4, 16, 64)
"""Numbers of threads per rank that are tried."""
_PIECE: Final = 1 << 20


def bare_rate(
    place: LoaderShare, threads: int, seconds: float, barrier: Callable[[], object]
) -> float:
    """Return the bytes per second at which this rank's threads read its share of the files.

    Files are read in pieces of 1 MiB, from a rank's own files, in order, from the barrier on for
    some seconds. Each piece opens its file, as loaders do that cannot keep millions open.
    """
    files = place.generated.files[place.rank :: place.ranks]
    pieces = [
        (path, offset) for path in files for offset in range(0, os.stat(path).st_size, _PIECE)
    ]
    barrier()
    began = time.perf_counter()

    def read(worker: int) -> int:
        count = 0
        for path, offset in pieces[worker::threads]:
            if time.perf_counter() - began > seconds:
                break
            with closing_descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                count += len(os.pread(descriptor, _PIECE, offset))
        return count

    try:
        with ThreadPoolExecutor(threads, "dlio-bench-bare") as pool:
            total = sum(pool.map(read, range(threads)))
    except OSError as error:
        raise SourceError(f"{error.filename}: {error.strerror}") from error
    return total / (time.perf_counter() - began)


# A loader of the user's own, or of another library, named as `module:function`


class FactoryLoader(RankLoader):
    """A loader that a function makes."""

    def __init__(self, name: str, place: LoaderShare) -> None:
        """Raises UsageError if the function cannot be imported."""
        module, _, attribute = name.partition(":")
        try:
            make: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"--loaders {name}: {error}; name a function as module:function, in a folder of "
                "PYTHONPATH"
            ) from error
        workload = place.workload
        self.steps = place.steps
        self._batches = make(
            files=list(place.generated.files),
            samples_per_file=workload.samples_per_file,
            batch_size=workload.batch_size,
            rank=place.rank,
            ranks=place.ranks,
            workers=workload.workers,
            seed=workload.seed,
        )

    def batches(self, epoch: int) -> Iterator[object]:
        return iter(self._batches(epoch))

    def received(self, batch: object) -> Received:
        numbers, data = cast(Received, batch)
        return [int(number) for number in numbers], data

    def close(self) -> None:
        if callable(close := getattr(self._batches, "close", None)):
            close()


# dlio.DataLoader


class StorageDlioLoader(RankLoader):
    """dlio's loader over `dlio.open`, with tiers."""

    def __init__(self, place: LoaderShare) -> None:
        workload, generated = place.workload, place.generated
        self._field = generated.field
        self.steps = place.steps
        # Samples of one size are stacked, as the other loaders do it.
        alike = bool((generated.sizes == generated.sizes[0]).all())
        with ExitStack() as stack:
            self._data = stack.enter_context(
                dlio.open(
                    generated.source,
                    tiers=place.tiers,
                    image_size=None,
                    seed=workload.seed,
                    **generated.options,
                )
            )
            self._loader = stack.enter_context(
                dlio.DataLoader(
                    self._data,
                    workload.batch_size,
                    shuffle=workload.shuffle,
                    num_workers=workload.workers,
                    drop_last=True,
                    collate_fn=None if alike else list,
                    persistent_workers=True,
                )
            )
            self._request_s = stack.enter_context(observed_requests())
            self._stack = stack.pop_all()

    def batches(self, epoch: int) -> Iterator[object]:
        self._request_s.clear()
        self._loader.set_epoch(epoch)
        return iter(self._loader)

    def received(self, batch: object) -> Received:
        numbers = [int(number) for number in self._loader.last_samples]
        if isinstance(batch, list):
            return numbers, [each[self._field] for each in batch]
        stacked = cast(Mapping[str, torch.Tensor | list[bytes]], batch)[self._field]
        return numbers, list(stacked)

    def passed(self) -> PassCounts:
        counts = self._loader.stats().get("bytes", {})
        return PassCounts(list(self._request_s), counts.get("source"), "request")

    def close(self) -> None:
        self._stack.close()

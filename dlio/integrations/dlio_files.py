"""The files that Argonne's DLIO benchmark generates, as a reader and a recipe of its samples.

DLIO names the format and says how many samples a file has. A file of one sample is read whole, by
one request, and kept as it is; of a file of several, each sample's bytes are cut out, those that
are asked for together by one request. Sample k of the file number f, in the order of the names, is
sample `f * samples_per_file + k`, as DLIO numbers them.
"""

import io
import math
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator
from dlio.data.index import fingerprint_of
from dlio.data.npy import read_npy_head
from dlio.data.schema import MAX_PAYLOAD, Buffer, Schema
from dlio.data.source import File
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.image.decoder import decode_whole
from dlio.plan.layout import Layout, cut_blocks
from dlio.plan.order import Order
from dlio.util.memory import new_memory
from dlio.util.units import counted

FORMATS: Final = ("npz", "npy", "hdf5", "jpeg", "png", "csv", "indexed_binary")
"""Formats of DLIO that are read; `mmap_indexed_binary` has the files of `indexed_binary`."""
_IMAGES: Final = ("jpeg", "png")
_STRIDED: Final = ("npz", "npy")
"""Formats whose samples lie along the last dimension, so that all of a file are read at once."""
_SEED: Final = 0xD110
_VERSION: Final = 1
_HEAD_BYTES: Final = 1 << 12
_LOCAL: Final = struct.Struct("<26xHH")
"""Lengths of a zip member's name and extra field, in its local header."""
_SIZES: Final = ".sz.idx"
"""Ends the name of the file with an indexed binary file's sizes."""

_FACTS: Final = np.dtype(
    [(name, np.int64) for name in ("size", "changed_ns", "at", "record", "item")]
)
"""The facts about a file: its bytes, the time of its last change, the offset of its first sample's
bytes, the bytes of a sample, and those of an element of an array."""

_U8 = npt.NDArray[np.uint8]
_I64 = npt.NDArray[np.int64]


class DlioFiles:
    """A reader of files that DLIO generated.

    A payload is a whole file where a file is one sample or an image, and otherwise the bytes of one
    sample: the elements of its arrays in C order, or its line of a CSV file.

    The paths of `files` are in DLIO's order, that of their names; `form` is one of `FORMATS`. With
    `comm`, the ranks share the work of looking at the files. Collective then.

    Raises UsageError for a format that dlio does not read, SourceError for a file that is missing,
    is damaged or has another number of samples.
    """

    objects: bool
    classes: Sequence[str] = ()

    def __init__(
        self,
        files: Sequence[str],
        form: str,
        samples_per_file: int,
        comm: Communicator | None = None,
    ) -> None:
        if form not in FORMATS:
            raise UsageError(
                f"format {form}: dlio reads {', '.join(FORMATS)} of DLIO's formats: generate the "
                "data in one of them, or use DLIO's own loader"
            )
        if not files:
            raise SourceError("DLIO has handed over no files: generate them first")
        self._files, self._form, self._per_file = list(files), form, samples_per_file
        self.format = f"dlio-{form}"
        self.path = f"{files[0]} and {counted(len(files) - 1, 'more file')}"
        self.schema = Schema((("file", "bytes"),))
        self.whole = samples_per_file == 1 or form in _IMAGES
        """True if payloads are whole files."""
        self.objects = self.whole
        self._facts = _gathered(self._files, self._look, comm)
        sizes = self._facts["size" if self.whole else "record"]
        if (most := int(sizes.max())) > MAX_PAYLOAD:
            raise SourceError(
                f"{files[int(sizes.argmax())]}: a sample of {most} bytes; dlio has at most "
                f"{MAX_PAYLOAD}: generate smaller ones"
            )
        self.sizes: _I64 = np.repeat(sizes, samples_per_file)
        self.labels: _I64 = np.zeros(len(self.sizes), np.int64)
        self.layout = self._cut()
        self.fingerprint = fingerprint_of(
            "dlio_benchmark",
            _VERSION,
            form,
            f"{samples_per_file}",
            *self._files,
            np.ascontiguousarray(self._facts["size"]),
            np.ascontiguousarray(self._facts["changed_ns"]),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, sample: int) -> str:
        file, place = divmod(sample, self._per_file)
        return self._files[file] if self._per_file == 1 else f"{self._files[file]}::{place}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        owners = np.asarray(samples) // self._per_file
        for owner in np.unique(owners).tolist():
            here = np.flatnonzero(owners == owner)
            places = np.asarray(samples)[here] % self._per_file
            parts: Mapping[int, bytes | memoryview]
            parts = {0: self._file(owner)} if self.whole else self._cut_out(owner, places)
            for k, place in zip(here.tolist(), places.tolist(), strict=True):
                payloads[k] = parts[0 if self.whole else place]
        return payloads

    def close(self) -> None:
        """Do nothing: files are opened for each request."""

    def _file(self, owner: int) -> memoryview:
        memory = new_memory(int(self._facts["size"][owner]))
        File(self._files[owner]).read_into(0, memory)
        return memory

    def _cut_out(self, owner: int, places: _I64) -> Mapping[int, bytes | memoryview]:
        """Return the bytes of samples of one file, by their place in it."""
        _, _, at, record, item = self._facts[owner].tolist()
        file = File(self._files[owner])
        if self._form == "hdf5":
            with closing(file.open()) as stream:
                return _records(stream, places, file.name)
        if self._form in _STRIDED:
            memory = new_memory(record * self._per_file)
            file.read_into(at, memory)
            table = np.frombuffer(memory, np.uint8).reshape(record // item, self._per_file, item)
            return {k: np.ascontiguousarray(table[:, k]).data.cast("B") for k in places.tolist()}
        first, last = int(places.min()), int(places.max()) + 1
        memory = new_memory(record * (last - first))
        file.read_into(at + record * first, memory)
        cut = {k: memory[(k - first) * record : (k - first + 1) * record] for k in places.tolist()}
        if self._form == "csv" and any(bytes(each[-1:]) != b"\n" for each in cut.values()):
            raise SourceError(f"{file.name}: its lines differ in length, and DLIO's do not")
        return cut

    def _cut(self) -> Layout:
        count, per_file = len(self.sizes), self._per_file
        if self.whole:
            return cut_blocks(self.sizes, Order(count, _SEED, shuffled=True))
        starts = np.arange(0, count + 1, per_file, dtype=np.int64)
        order = Order(count, _SEED, shuffled=False)
        if self._form in _STRIDED:
            return Layout(starts, order)
        return cut_blocks(self.sizes, order, starts)

    def _look(self, url: str) -> tuple[int, ...]:
        """Return the facts about one file. Raises SourceError."""
        file, count = File(url), self._per_file
        at, record, item = 0, file.size, 1
        if not self.whole:
            if self._form in _STRIDED:
                at, shape, item = _array_head(file, self._form)
                record = math.prod(shape[:-1]) * item
                if not shape or shape[-1] != count:
                    raise SourceError(
                        f"{file.name} has arrays of shape {list(shape)}, and not "
                        f"{counted(count, 'sample')} along the last dimension: set "
                        "num_samples_per_file as it was generated"
                    )
            elif self._form == "hdf5":
                record = _hdf5_record(file, count)
            elif self._form == "csv":
                record = file.size // count
                if record * count != file.size:
                    raise SourceError(f"{file.name} has not {count} lines of one length")
            else:
                record = int(np.frombuffer(File(url + _SIZES).read(0, 8), "<u8")[0])
        changed = int(file.times) if file.times.isdecimal() else 0
        return file.size, changed, at, record, item


class PayloadFitter:
    """Makes DLIO's samples of payloads: the sample's bytes, cut or filled up with zeros.

    DLIO hands out one random array for every sample, of the size `record_length_bytes_resize`. Here
    it is the sample itself in that shape, so that batches are those of the data that was read.

    Payloads may be `whole` files; `name` returns a sample's name, for errors; `prepare` is called
    for each sample, as long as preparing one takes.
    """

    functions: Sequence[object] = ()

    def __init__(
        self,
        form: str,
        whole: bool,
        name: Callable[[int], str],
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._form, self._whole, self._name = form, whole, name
        self._shape, self._dtype, self._prepare = shape, np.dtype(dtype), prepare

    def __call__(self, payload: Buffer, sample: int, /) -> torch.Tensor:
        data = self._decoded(memoryview(payload), sample)
        made = np.empty(math.prod(self._shape) * self._dtype.itemsize, np.uint8)
        used = min(len(data), len(made))
        made[:used], made[used:] = data[:used], 0
        if self._prepare is not None:
            self._prepare()
        return torch.from_numpy(made.view(self._dtype).reshape(self._shape))

    def _decoded(self, payload: memoryview, sample: int) -> _U8:
        """Return the bytes of a sample's elements. Raises SourceError, DecodeError."""
        name = self._name(sample)
        if self._form in _IMAGES:
            return np.ascontiguousarray(decode_whole(payload, name)[..., 0]).reshape(-1)
        if self._form == "csv":
            return _csv_values(payload, name)
        if not self._whole or self._form == "indexed_binary":
            return np.frombuffer(payload, np.uint8)
        if self._form == "hdf5":
            return np.frombuffer(
                _records(io.BytesIO(payload), np.zeros(1, np.int64), name)[0], np.uint8
            )
        start = _member(payload, name) if self._form == "npz" else 0
        offset, shape, item = _npy_head(payload[start : start + _HEAD_BYTES], name)
        count = math.prod(shape) * item
        data = payload[start + offset : start + offset + count]
        if len(data) != count:
            raise SourceError(f"{name} is cut off: generate it again")
        return np.frombuffer(data, np.uint8)


def _gathered(
    files: Sequence[str], look: Callable[[str], tuple[int, ...]], comm: Communicator | None
) -> npt.NDArray[np.void]:
    """Return the facts about all files, each looked at by one rank; shape (files,). Collective with
    `comm`."""
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    mine: list[tuple[int, ...]] = []
    fault: str | None = None
    try:
        mine += map(look, files[rank::ranks])
    except SourceError as error:
        fault = str(error)
    parts = [(mine, fault)] if comm is None or ranks == 1 else comm.allgather((mine, fault))
    for _, fault in parts:
        if fault is not None:
            raise SourceError(fault)
    table = np.empty(len(files), _FACTS)
    for other, (rows, _) in enumerate(parts):
        table[other::ranks] = [tuple(row) for row in rows]
    return table


def _array_head(file: File, form: str) -> tuple[int, tuple[int, ...], int]:
    """Return (offset of the elements, shape, bytes of an element) of an array in a file."""
    head = memoryview(file.read(0, _HEAD_BYTES))
    start = 0
    if form == "npz":
        # numpy writes the array x first, and not compressed unless it is told to.
        if len(head) < 30 or bytes(head[:4]) != b"PK\3\4" or bytes(head[8:10]) != b"\0\0":
            raise SourceError(
                f"{file.name} is compressed, or not a .npz file: with several samples in a file, "
                "generate with workload.dataset.compression=none"
            )
        start = 30 + sum(_LOCAL.unpack_from(head))
    offset, shape, item = _npy_head(head[start:], file.name)
    return start + offset, shape, item


def _npy_head(head: memoryview, name: str) -> tuple[int, tuple[int, ...], int]:
    """Return (bytes of the header, shape, bytes of an element) of an array in C order."""
    try:
        # The data after the header is compared with its own length where it is read.
        parsed = read_npy_head(head, sys.maxsize)
    except CorruptBlock as error:
        raise SourceError(f"{name} is not an array of numpy, or is damaged: {error}") from error
    if parsed.fortran and len(parsed.shape) > 1:
        raise SourceError(f"{name} holds an array in Fortran order: generate it anew")
    return parsed.offset, parsed.shape, np.dtype(parsed.descr).itemsize


def _member(payload: memoryview, name: str) -> int:
    """Return the offset of the array `x` in a .npz file. Raises SourceError."""
    import pyarrow

    try:
        with zipfile.ZipFile(pyarrow.BufferReader(payload)) as archive:  # It copies no payload.
            entry = archive.getinfo("x.npy")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise SourceError(
                f"{name} is compressed: generate with workload.dataset.compression=none"
            )
        lengths = _LOCAL.unpack_from(payload, entry.header_offset)
    except (zipfile.BadZipFile, KeyError, struct.error, EOFError) as error:
        raise SourceError(f"{name} is not a .npz file of DLIO, or is damaged: {error}") from error
    start: int = entry.header_offset + 30 + sum(lengths)
    return start


def _records(stream: Any, places: _I64, name: str) -> dict[int, bytes]:
    """Return samples' elements of all data sets `records_0`, `records_1`, ... of a file."""
    with _hdf5(stream, name) as file:
        parts = _record_sets(file, name)
        try:
            return {k: b"".join(part[k].tobytes() for part in parts) for k in places.tolist()}
        except (OSError, ValueError, IndexError) as error:
            raise SourceError(f"{name} cannot be read: {error}; generate it again") from error


def _hdf5_record(file: File, count: int) -> int:
    """Return the bytes of a sample. Raises SourceError for another number of samples."""
    with closing(file.open()) as stream, _hdf5(stream, file.name) as opened:
        parts = _record_sets(opened, file.name)
        if any(len(part) != count for part in parts):
            raise SourceError(
                f"{file.name} has {counted(len(parts[0]), 'sample')} and not {count}: set "
                "num_samples_per_file as it was generated"
            )
        return sum(part.dtype.itemsize * math.prod(part.shape[1:]) for part in parts)


def _hdf5(stream: Any, name: str) -> AbstractContextManager[Any]:
    import h5py

    try:
        opened: AbstractContextManager[Any] = h5py.File(stream, "r")
    except OSError as error:
        raise SourceError(f"{name} is not an HDF5 file, or is damaged: {error}") from error
    return opened


def _record_sets(file: Any, name: str) -> list[Any]:
    names = [each for each in file if each.startswith("records_")]
    names.sort(key=lambda each: (len(each), each))  # By number.
    if not names:
        raise SourceError(f"{name} has no data sets records_0, records_1, ...: is it of DLIO?")
    return [file[each] for each in names]


def _csv_values(payload: memoryview, name: str) -> _U8:
    line = bytes(payload).split(b"\n", 1)[0]
    try:
        values = np.array(line.split(b","), np.float64)
    except ValueError as error:
        raise SourceError(f"{name} is not a line of numbers: {error}") from error
    return values.view(np.uint8) if (values % 1).any() else values.astype(np.uint8)

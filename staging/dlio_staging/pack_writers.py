"""Writers of packed data, one for each format; all take payloads block by block.

Besides the samples, tar, HDF5 and Zarr files hold a description, `dlio_schema`, from which dlio's
readers restore the payloads byte by byte. To other programs these are ordinary files of their
formats.
"""

import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.data.boxes import BoxCounts
from dlio.data.schema import IMAGES, Buffer, Kind, Schema
from dlio.errors import UsageError
from dlio.storage.block import encode_block
from dlio.storage.shard_file import SUFFIX, ShardIndex, ShardWriter
from dlio.util.limits import open_unchecked
from dlio.util.trusted_files import closing_descriptor
from dlio.util.whole_files import PUBLIC_FILE, open_own
from dlio_readers.columns import ENDS, SCHEMA, SHAPE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

CHUNK_BYTES: Final = 1 << 20
"""Approximate size of a chunk in HDF5 files."""
_ZARR_CHUNK_BYTES: Final = 256 << 10
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL
_EXTENSIONS: Final = {
    "jpeg": "jpg",
    "png": "png",
    "webp": "webp",
    "text": "txt",
    "json": "json",
    "bytes": "bin",
}
_MAGICS: Final = (
    (b"\xff\xd8", "jpg"),
    (b"\x89PNG", "png"),
    (b"RIFF", "webp"),
    (b"BM", "bmp"),
    (b"II", "tiff"),
    (b"MM", "tiff"),
    (b"P", "ppm"),
)


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """Description of one file to write: its samples, and its place in the data set."""

    schema: Schema
    classes: tuple[str, ...]
    fingerprint: str
    number: int
    shards: int
    first: int
    """Position of its first sample in the data set."""
    total: int
    """Samples of the data set."""
    blocks: tuple[int, ...]
    """Numbers of its blocks."""
    compress: str
    """`auto`, `lz4` or `none`."""

    @property
    def lz4(self) -> bool:
        """True if payloads are compressed; `auto` compresses data sets without images."""
        images = any(kind.text in IMAGES for kind in self.schema.kinds.values())
        return self.compress == "lz4" or (self.compress == "auto" and not images)

    @property
    def description(self) -> str:
        """Schema and class names as JSON, for formats that have no fields for them."""
        rows = json.loads(self.schema.to_json())
        return json.dumps({"schema": rows, "classes": list(self.classes)})


class PackedRows(NamedTuple):
    """Samples to write: their payloads, names, classes, and the xxh3_64 of the payloads."""

    payloads: list[Buffer]
    names: list[str]
    labels: list[int]
    digests: list[int]


class FormatWriter(Protocol):
    """Writer of one file. Used by one thread, which calls `close` after `finish` or to give up."""

    def write(self, first: int, rows: PackedRows, starts: Sequence[int]) -> None:
        """Append blocks, numbered from `first` on, which hold the rows from each of `starts` up to
        the next one."""

    def finish(self) -> None:
        """Complete the file, and wait until it is on the disk."""

    def close(self) -> None:
        """Close the file; without `finish` before, it stays incomplete."""


class NativeWriter:
    """Writer of native shards; see dlio/storage/FORMAT.md."""

    def __init__(self, path: str, shard: ShardRequest) -> None:
        self._shard = shard
        self._writer = ShardWriter(path)
        self._counts: list[int] = []
        self._sizes: list[int] = []
        self._labels: list[int] = []
        self._names: list[bytes] = []
        self._boxes = BoxCounts(shard.schema)

    def write(self, first: int, rows: PackedRows, starts: Sequence[int]) -> None:
        shard, payloads = self._shard, rows.payloads
        blocks = []
        for block, (start, end) in enumerate(itertools.pairwise(starts), first):
            pieces = encode_block(
                payloads[start:end],
                block=block,
                fingerprint=shard.fingerprint,
                schema=shard.schema,
                compress=shard.lz4,
                digests=rows.digests[start:end],
            )
            blocks.append(pieces)
            self._counts.append(end - start)
        self._writer.write_blocks(blocks)
        self._boxes.add(payloads)
        self._sizes += [len(payload) for payload in payloads]
        self._labels += rows.labels
        self._names += [name.encode("utf-8", "replace") for name in rows.names]

    def finish(self) -> None:
        shard = self._shard
        ends = np.cumsum([len(name) for name in self._names], dtype=np.uint64)
        self._writer.finish(
            ShardIndex(
                fingerprint=shard.fingerprint,
                schema=shard.schema,
                classes=shard.classes,
                shard=shard.number,
                shards=shard.shards,
                first=shard.first,
                total=shard.total,
                offsets=np.array(self._writer.offsets, np.uint64),
                counts=np.array(self._counts, np.uint32),
                sizes=np.array(self._sizes, np.uint32),
                labels=np.array(self._labels, np.int64),
                names=np.frombuffer(b"".join(self._names), np.uint8),
                name_ends=ends,
                boxes=tuple(self._boxes.counts.tolist()) if self._boxes.is_known else None,
            )
        )

    def close(self) -> None:
        self._writer.close()


class TarWriter:
    """Writer of WebDataset tars with members such as `000000042.jpg` and `000000042.cls`."""

    def __init__(self, path: str, shard: ShardRequest) -> None:
        self._path, self._shard = path, shard
        self._file: Any = os.fdopen(open_own(path, _NEW, PUBLIC_FILE), "wb")
        self._stream: Any = self._file
        if shard.compress == "lz4":
            import lz4.frame

            self._stream = lz4.frame.LZ4FrameFile(
                self._file, "wb", block_size=lz4.frame.BLOCKSIZE_MAX256KB, block_linked=False
            )
        self._tar = tarfile.TarFile(fileobj=self._stream, mode="w", format=tarfile.PAX_FORMAT)
        self._extensions = _extensions(shard.schema)
        self._next = shard.first
        members = {}
        for name, extension in self._extensions.items():
            possible = [each for _, each in _MAGICS] + ["img"] if extension == "" else [extension]
            members.update({_dotted(name, each, shard.schema): name for each in possible})
        description = {
            **json.loads(shard.description),
            "members": members,
            "npy": [n for n, e in self._extensions.items() if e.endswith("npy")],
        }
        self._add("__dlio__/schema.json", json.dumps(description).encode())

    def write(self, first: int, rows: PackedRows, starts: Sequence[int]) -> None:
        schema = self._shard.schema
        for payload in rows.payloads:
            key = f"{self._next:09d}"
            values = schema.split(payload)
            for name, _ in schema.fields:
                value, extension = values[name], self._extensions[name]
                if extension == "":
                    head = bytes(value[:4])
                    image = next((e for magic, e in _MAGICS if head.startswith(magic)), "img")
                    extension = _dotted(name, image, schema)
                if extension.endswith("npy"):
                    memory = io.BytesIO()
                    plain = np.asarray(value, schema.kinds[name].dtype)
                    np.save(memory, plain, allow_pickle=False)
                    value = memory.getbuffer()
                elif extension == "cls":
                    value = str(value).encode()
                self._add(f"{key}.{extension}", value)
            self._next += 1

    def finish(self) -> None:
        self._tar.close()
        if self._stream is not self._file:
            self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _add(self, name: str, data: Buffer) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        info.mode = 0o644
        self._tar.addfile(info, io.BytesIO(data))


AppendableArray: TypeAlias = Any
"""An array of h5py or zarr, which have no types; rows are appended along its first dimension."""


class ColumnsWriter:
    """Writer of one array per field, in which row i is sample i; for HDF5 and Zarr.

    Values of variable length are joined into a flat array. `<name>__ends` holds the end of each
    value, and `<name>__shape` its shape if it is an array.

    `make` creates an empty array, given its name, the shape of a row, and its type. `append`
    appends rows to one; its third argument is True for the last ones.
    """

    def __init__(
        self,
        shard: ShardRequest,
        make: Callable[[str, tuple[int, ...], np.dtype[np.generic]], AppendableArray],
        append: Callable[[AppendableArray, npt.NDArray[np.generic], bool], None],
    ) -> None:
        self._schema = shard.schema
        self._append = append
        self._arrays: dict[str, AppendableArray] = {}
        self._ends = dict.fromkeys(shard.schema.kinds, 0)
        for name, kind in shard.schema.kinds.items():
            if name.endswith((ENDS, SHAPE)):
                raise UsageError(f"field {name!r}: names that end so are reserved: rename it")
            if kind.fixed:
                assert kind.dtype is not None
                sizes = tuple(size or 0 for size in kind.shape)
                self._arrays[name] = make(name, sizes, kind.dtype)
                continue
            self._arrays[name] = make(name, (), kind.dtype or np.dtype(np.uint8))
            self._arrays[name + ENDS] = make(name + ENDS, (), np.dtype(np.int64))
            if kind.dtype is not None:
                dims = (len(kind.shape),)
                self._arrays[name + SHAPE] = make(name + SHAPE, dims, np.dtype(np.int64))

    def write(self, payloads: Sequence[Buffer]) -> None:
        """Append samples, given as payloads."""
        rows = [self._schema.split(payload) for payload in payloads]
        for name, kind in self._schema.kinds.items():
            self._write_column(name, kind, [row[name] for row in rows])

    def flush(self) -> None:
        """Write the rows that `append` has held back."""
        for array in self._arrays.values():
            self._append(array, np.empty((0, *array.shape[1:]), array.dtype), True)

    def _write_column(self, name: str, kind: Kind, values: list[Any]) -> None:
        if kind.fixed:
            self._append(self._arrays[name], np.array(values, kind.dtype), False)
            return
        if kind.dtype is None:
            flat = [np.frombuffer(value, np.uint8) for value in values]
        else:
            flat = [value.reshape(-1) for value in values]
            shapes = np.array([value.shape for value in values], np.int64)
            self._append(self._arrays[name + SHAPE], shapes, False)
        ends = self._ends[name] + np.cumsum([len(each) for each in flat], dtype=np.int64)
        self._ends[name] = int(ends[-1])
        self._append(self._arrays[name], np.concatenate(flat), False)
        self._append(self._arrays[name + ENDS], ends, False)


class Hdf5Writer:
    """Writer of an HDF5 file, chunked and without filters, which any HDF5 library can read."""

    def __init__(self, path: str, shard: ShardRequest) -> None:
        import h5py

        self._disk = UnfailingFile(path)
        self._file = h5py.File(self._disk, "w", libver="latest")
        self._file.attrs[SCHEMA] = shard.description

        def make(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            row = max(1, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
            rows = max(1, CHUNK_BYTES // row)
            chunk = (rows, *(max(1, size) for size in shape))
            # HDF5 refuses chunks in a dimension of size 0 that cannot grow.
            largest = (None, *(size or None for size in shape))
            return self._file.create_dataset(
                name, (0, *shape), dtype, maxshape=largest, chunks=chunk
            )

        def append(array: Any, rows: npt.NDArray[Any], _: bool) -> None:
            before = array.shape[0]
            if len(rows):
                array.resize(before + len(rows), axis=0)
                array[before:] = rows

        self._columns = ColumnsWriter(shard, make, append)

    def write(self, first: int, rows: PackedRows, starts: Sequence[int]) -> None:
        self._columns.write(rows.payloads)
        self._disk.check()

    def finish(self) -> None:
        self._file.close()
        self._disk.check()
        self._disk.sync()

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            self._disk.close()
        self._disk.check()


class ZarrWriter:
    """Writer of a Zarr store of version 3, in shards, so that it consists of few files.

    Empty chunks are written too, so that a missing chunk is always damage.
    """

    def __init__(self, path: str, shard: ShardRequest) -> None:
        import zarr

        if any("/" in name for name in shard.schema.kinds):
            raise UsageError("fields with / in their names cannot be written as Zarr: rename them")
        self._path = path
        root = zarr.open_group(path, mode="w-", zarr_format=3)
        root.attrs[SCHEMA] = shard.description
        waiting: dict[str, list[npt.NDArray[Any]]] = {}

        def make(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            row = max(1, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
            rows = max(1, _ZARR_CHUNK_BYTES // row)
            rest = tuple(max(1, size) for size in shape)
            waiting[name] = []
            return root.create_array(
                name,
                shape=(0, *shape),
                dtype=dtype,
                chunks=(rows, *rest),
                shards=(32 * rows, *rest),
                config={"write_empty_chunks": True},
            )

        def append(array: Any, rows: npt.NDArray[Any], last: bool) -> None:
            held = waiting[array.basename]
            held.append(rows)
            count, whole = sum(map(len, held)), array.shards[0]
            # Only whole shards are written, each of them once.
            ready = count if last else count // whole * whole
            if ready:
                data = np.concatenate(held)
                before = array.shape[0]
                array.resize((before + ready, *array.shape[1:]))
                array[before:] = data[:ready]
                held[:] = [data[ready:]]

        self._columns = ColumnsWriter(shard, make, append)

    def write(self, first: int, rows: PackedRows, starts: Sequence[int]) -> None:
        self._columns.write(rows.payloads)

    def finish(self) -> None:
        self._columns.flush()
        for folder, _, names in os.walk(self._path):
            for name in names:
                _fsync(os.path.join(folder, name))
            _fsync(folder)

    def close(self) -> None:
        pass


WRITERS: Final[dict[str, Callable[[str, ShardRequest], FormatWriter]]] = {
    "native": NativeWriter,
    "tar": TarWriter,
    "hdf5": Hdf5Writer,
    "zarr": ZarrWriter,
}


def file_name(format_: str, number: int, compress: str) -> str:
    """Return the file name of shard `number`."""
    if format_ == "zarr":
        return "data.zarr"
    suffix = {"native": SUFFIX, "hdf5": ".h5"}.get(format_, ".tar")
    packed = ".lz4" if format_ == "tar" and compress == "lz4" else ""
    return f"shard-{number:05d}{suffix}{packed}"


def _extensions(schema: Schema) -> dict[str, str]:
    """Return the extension of each field's members in a tar.

    It is "" for fields of any image format, for which the first bytes of each image decide.
    """
    extensions: dict[str, str] = {}
    for name, kind in schema.kinds.items():
        if name == "label" and kind.text == "int64":
            extensions[name] = "cls"
        elif kind.dtype is not None:
            extensions[name] = f"{_plain(name)}.npy"
        elif kind.text == "image":
            extensions[name] = ""
        else:
            extensions[name] = _dotted(name, _EXTENSIONS[kind.text], schema)
    texts = list(extensions.values())
    if len(set(texts) - {""}) + texts.count("") < len(texts):
        # Names that differ only in other characters got the same extension: number the fields.
        extensions = {
            name: f"f{k}.{extension.rpartition('.')[2] or 'img'}"
            for k, (name, extension) in enumerate(extensions.items())
        }
    return extensions


def _dotted(name: str, extension: str, schema: Schema) -> str:
    """Return `jpg` for a sample's only image, `name.jpg` if it has several; others likewise."""
    if "." in extension:
        return extension
    alike = [n for n, k in schema.kinds.items() if k.text == schema.kinds[name].text]
    images = [n for n, k in schema.kinds.items() if k.text in IMAGES]
    alone = len(images) == 1 if name in images else len(alike) == 1
    return extension if alone else f"{_plain(name)}.{extension}"


def _plain(name: str) -> str:
    """Replace characters that WebDataset's names cannot have."""
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name.lower())


def _fsync(path: str) -> None:
    with closing_descriptor(open_unchecked(path)) as descriptor:
        os.fsync(descriptor)


# A file whose errors are kept for later


class UnfailingFile(io.FileIO):
    """A new binary file, which takes everything after an error and writes nothing more.

    It has the methods that h5py calls, which asks for no place beyond those that it has set, and
    works as a context manager.

    Raises OSError if it cannot be created.
    """

    def __init__(self, path: str) -> None:
        super().__init__(open_own(path, _NEW, PUBLIC_FILE), "r+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error of the file, if there was one."""
        if self._error is not None:
            raise self._error

    def readinto(self, into: "WriteableBuffer", /) -> int:
        """Fill `into`; with zeros where nothing was written."""
        view = memoryview(into)
        done = 0
        try:
            while self._error is None and (count := super().readinto(view[done:])):
                done += count
        except OSError as error:
            self._error = error
        view[done:] = bytes(len(view) - done)
        return len(view)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write bytes, unless an error came before."""
        view = memoryview(data)
        done = 0
        try:
            while self._error is None and done < len(view):
                done += super().write(view[done:]) or 0
        except OSError as error:
            self._error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size, unless an error came before."""
        try:
            if self._error is None:
                super().truncate(size)
        except OSError as error:
            self._error = error
        return size or 0

    def sync(self) -> None:
        """Wait until the bytes are on the disk. Raises OSError."""
        os.fsync(self.fileno())

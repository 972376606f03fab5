"""One HDF5 file: its data sets as columns and as arrays with chunks.

References to other files are refused: external storage, external links, and virtual data sets of
other files. Contiguous data sets are read in parallel without the HDF5 library. Chunked ones go
through the library, one read at a time because of its global lock.
"""

import gc
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import ChunkedArray, plain_chunks
from dlio.data.labels import label_name
from dlio.data.schema import Schema, Value, array_kind, parse_kind
from dlio.data.source import File, ReadErrors, Source
from dlio.data.splits import WHOLE
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import MAX_BLOCK_BYTES
from dlio.util.decompression_limits import exceeds
from dlio.util.forks import new_rlock
from dlio.util.limits import MAX_ABSENT_ROWS, check_claim, is_trusted, parsing
from dlio.util.printable import tell_once
from dlio.util.units import counted
from dlio_readers.array_names import (
    check_groups,
    chosen_arrays,
    splits_of_arrays,
    tell_of_attributes,
)
from dlio_readers.columns import (
    ENDS,
    HEAD_BYTES,
    SCHEMA,
    SHAPE,
    Column,
    PlainColumn,
    RaggedColumn,
    Select,
    SingleValue,
    TextArrayColumn,
    choose,
    looks_like,
    parse_schema,
    slab,
    storable,
)
from dlio_readers.ranges import StoredArray
from dlio_readers.rehearsal import note_opening

# Chunks of HDF5 data sets, checked before the HDF5 library takes memory for them

_DEFLATE: Final = 1
"""H5Z_FILTER_DEFLATE."""
_MAX_INFLATION: Final = 1032
"""Bytes that one byte of deflate can become at most."""
_FREE_BYTES: Final = 256 << 20
_SLACK: Final = 1 << 14
Handle: TypeAlias = Any
"""An h5py.File or h5py.Dataset, which have no types."""


class _UncollectedReads(io.RawIOBase):
    """A stream whose reads no garbage collection interrupts.

    h5py holds its lock while it waits for fsspec's thread. That thread would wait for the lock, for
    ever, if it collected an object of h5py's meanwhile.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream: Any = stream

    def readinto(self, into: Any) -> int:
        collects = gc.isenabled()
        gc.disable()
        try:
            count: int = self._stream.readinto(into)
        finally:
            if collects:
                gc.enable()
        return count

    def seek(self, offset: int, whence: int = 0) -> int:
        place: int = self._stream.seek(offset, whence)
        return place

    def tell(self) -> int:
        place: int = self._stream.tell()
        return place

    def close(self) -> None:
        self._stream.close()
        super().close()


class Chunks:
    """Declared and stored sizes of a data set's chunks.

    HDF5 inflates all that a chunk holds, also if that is more than a chunk. Those that might become
    256 MiB more than they should are inflated once without keeping the result, to count.

    Raises SourceError, which begins with `where`, if the data set declares rows that are not
    stored, or a chunk is larger than declared.
    """

    def __init__(self, dataset: Handle, where: str) -> None:
        self._where = where
        self._suspects: dict[int, list[tuple[int, ...]]] = {}
        """Offsets of chunks that have to be counted, by their first row."""
        rows = dataset.shape[0] if dataset.shape else 0
        self._rows = rows
        self._rows_per_chunk = dataset.chunks[0] if dataset.chunks else 1
        if dataset.chunks is None:
            absent = rows if not dataset.id.get_storage_size() else 0
        else:
            self._chunk = dataset.dtype.itemsize * math.prod(dataset.chunks)
            check_claim(self._chunk, dataset.id.get_storage_size(), f"{where}: a chunk")
            self._look_at_stored(dataset)
            counts = zip(dataset.shape, dataset.chunks, strict=True)
            chunks = math.prod(-(-n // c) for n, c in counts)
            here = dataset.id.get_num_chunks() if chunks else 0
            absent = rows * (chunks - here) // chunks if chunks else 0
        if absent > MAX_ABSENT_ROWS and not is_trusted():
            raise SourceError(
                f"{where}: {absent} of its {counted(rows, 'row')} are not stored in the file: if "
                "they are to be the fill value, give --trust (in Python, trust=True); else write "
                "them"
            )

    def _look_at_stored(self, dataset: Handle) -> None:
        made = dataset.id.get_create_plist()
        filters = [made.get_filter(k)[0] for k in range(made.get_nfilters())]
        if not filters:
            return
        if filters.count(_DEFLATE) > 1:
            raise SourceError(f"{self._where} is deflated twice: store it with one deflate filter")
        largest = 0

        def look(info: Any) -> None:
            nonlocal largest
            largest = max(largest, info.size)
            if _DEFLATE in filters and info.size * _MAX_INFLATION > self._chunk + _FREE_BYTES:
                offset = tuple(info.chunk_offset)
                self._suspects.setdefault(offset[0], []).append(offset)

        dataset.id.chunk_iter(look)
        if largest > self._chunk + self._chunk // 64 + _SLACK:
            raise SourceError(
                f"{self._where}: a chunk takes {largest} bytes, and becomes {self._chunk}: refused"
            )

    def check(self, dataset: Handle, key: object) -> None:
        """Count what the chunks become of rows that are about to be read with a key.

        Raises SourceError if a chunk becomes more than it should.
        """
        if not self._suspects:
            return
        part = key[0] if isinstance(key, tuple) else key
        first, last = 0, self._rows
        if isinstance(part, slice):
            first, last, _ = part.indices(self._rows)
        inside = [k for k in self._suspects if k < last and first < k + self._rows_per_chunk]
        for start in inside:
            for offset in self._suspects[start]:
                _, stored = dataset.id.read_direct_chunk(offset)
                if exceeds("zlib", stored, self._chunk + _SLACK):
                    raise SourceError(
                        f"{self._where}: the chunk at row {start} becomes more than its "
                        f"{self._chunk} bytes, which is a way to take all memory: refused"
                    )
            del self._suspects[start]


# Files

HDF5_SUFFIXES: Final = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".mat")
_OLD_MATLAB: Final = b"MATLAB 5.0"
_OLD_NETCDF: Final = b"CDF"
_MATLAB: Final = ("#refs#", "#subsystem#")
"""Groups to which MATLAB's cells and objects refer."""
_WRITTEN: Final = ("unable to lock file", "already open for write", "already open for read")
"""Parts of the library's errors for files that are being written."""
_MAX_SETS: Final = 1 << 12
_MAX_GROUPS: Final = 1 << 12


def is_old_matlab(source: Source, name: str) -> bool:
    """True for a file of MATLAB before 7.3, which is not HDF5."""
    return source.read(name, 0, len(_OLD_MATLAB)) == _OLD_MATLAB


class Hdf5File:
    """One file, opened when needed, and again after `close`."""

    def __init__(self, file: File, split: str | None = None, label: str | None = None) -> None:
        self.file, self.split = file, split
        self._label = label
        """The data set that the user chose as the label."""
        self.count = 0
        self.classes: list[str] = []
        self.packed_schema: Schema | None = None
        """The schema that `dlio pack` wrote, if it wrote the file."""
        self.lock = new_rlock()
        self.chunked: dict[str, ChunkedArray] = {}
        """Arrays of numbers, with their chunks."""
        self._opened: Any = None

    def handle(self) -> Handle:
        """Return the h5py file; call with the lock held."""
        if self._opened is None:
            import h5py

            note_opening(self.file.name)
            with ReadErrors(self.file.name, "cannot be opened as an HDF5 file"):
                try:
                    with self.file.for_library() as opened:
                        stream = opened if isinstance(opened, str) else _UncollectedReads(opened)
                        self._opened = h5py.File(stream, "r", rdcc_nbytes=8 << 20)
                except OSError as error:
                    raise self._refusal(str(error)) from error
        self.file.check()
        return self._opened

    def _refusal(self, reason: str) -> SourceError:
        """Return the error for a file that the library does not open."""
        name = self.file.name
        if any(each in reason for each in _WRITTEN):
            return SourceError(
                f"{name} is open for writing elsewhere, or its writer has not closed it: close it "
                "there, and open it again; after a crash `h5clear -s` unlocks it; on a file system "
                f"without locks set HDF5_USE_FILE_LOCKING=FALSE ({reason})"
            )
        if self.file.read(0, len(_OLD_MATLAB)) == _OLD_MATLAB:
            return SourceError(
                f"{name} is of an older MATLAB format, which is not HDF5: write it again with "
                "save(..., '-v7.3'), or read it with scipy.io.loadmat and write numpy.savez"
            )
        if self.file.read(0, len(_OLD_NETCDF)) == _OLD_NETCDF:
            return SourceError(
                f"{name} is of NetCDF 3, which is not HDF5: convert it with nccopy -k nc4"
            )
        if "truncated file" in reason:
            return SourceError(f"{name} is cut off: restore it ({reason})")
        return SourceError(f"{name} is not an HDF5 file, or is damaged: {reason}")

    def close(self) -> None:
        with self.lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
        self.file.close()

    def arrays(self) -> dict[str, ChunkedArray]:
        """Return all data sets that are arrays of numbers, of any shapes, with their chunks.

        Raises SourceError if the file is damaged or holds other data sets.
        """
        with self.lock, parsing(self.file.name):
            arrays = {}
            for name, dataset in self._find(self.handle(), ()).items():
                where = f"{self.file.name}::{name}"
                if not storable(dataset.dtype) or dataset.shape is None:
                    raise UsageError(f"{where} is {dataset.dtype}, which samples cannot have")
                arrays[name] = self._array(dataset, Chunks(dataset, where)).chunked(where)
            return arrays

    def splits(self, names: Sequence[str], split: str | None) -> list[str | None]:
        """Return the splits to read of those that names of data sets say; [None] without any.

        Raises UsageError if there are several and none is chosen, or no such one.
        """
        with self.lock, parsing(self.file.name):
            root = self.handle()
            own = [] if names or SCHEMA in root.attrs else list(self._find(root, ()))
        known = splits_of_arrays(own)
        chosen_arrays(self.file.name, dict.fromkeys(own), split)
        if split == WHOLE and known:
            return list(known)
        return [split if known else None]

    def columns(self, names: Sequence[str], select: Select) -> dict[str, Column]:
        """Return the columns that samples are made of, by field. Raises SourceError, UsageError."""
        with self.lock, parsing(self.file.name):
            root = self.handle()
            sets = self._find(root, names)
            shapes = {
                name: tuple(each.shape) for name, each in sets.items() if each.shape is not None
            }
            empty = label_name(name for name, each in sets.items() if each.shape is None)
            if empty is not None:
                tell_once(f"{self.file.name}: its {empty} is empty, and no label (`targets` are 0)")
            packed = parse_schema(root.attrs.get(SCHEMA), self.file.name)
            tell_of_attributes(self.file.name, root.attrs if packed is None else ())
            if packed is not None:
                self.packed_schema, self.classes = packed
                names = names or [name for name, _ in self.packed_schema.fields]
            elif self.split is not None:
                (sets,) = chosen_arrays(self.file.name, sets, self.split)
                shapes = {name: tuple(each.shape or ()) for name, each in sets.items()}
            elif not names:
                every = {name: tuple(each.shape or ()) for name, each in sets.items()}
                check_groups(self.file.name, every)
            chosen, self.count = choose(self.file.name, shapes, names, label=self._label)
            columns: dict[str, Column] = {}
            for name in chosen:
                dataset = sets[name]
                if "classes" in dataset.attrs:
                    self.classes = [
                        text.decode() if isinstance(text, bytes) else str(text)
                        for text in dataset.attrs["classes"]
                    ]
                columns[name] = self._column(name, dataset, sets, select)
            return columns

    def _column(self, name: str, dataset: Any, sets: Mapping[str, Any], select: Select) -> Column:
        import h5py

        where = f"{self.file.name}::{name}"
        if not dataset.shape:
            return SingleValue(dataset[()], where)
        chunks = Chunks(dataset, where)
        if name + ENDS in sets:
            ends, shapes = (self._integers(name + each, sets) for each in (ENDS, SHAPE))
            assert ends is not None
            schema = self.packed_schema
            kind = schema.kinds[name].text if schema and name in schema.kinds else None
            return RaggedColumn(self._array(dataset, chunks), ends, shapes, kind or "bytes", where)
        vlen = h5py.check_vlen_dtype(dataset.dtype)
        texts = h5py.check_string_dtype(dataset.dtype) is not None
        if (texts or vlen is not None) and set(dataset.shape[1:]) - ({1} if texts else set()):
            raise UsageError(
                f"{where} has {'texts' if texts else 'values of varying length'} of shape "
                f"{tuple(dataset.shape)}, and a sample can have one: leave it out, by naming the "
                "others, as in x.h5::image,label"
            )
        if texts:
            return _ValuesColumn(_ChunkedDataset(self, dataset, chunks), self.count, "text")
        if vlen is not None:
            if np.dtype(vlen) != np.uint8:
                if not storable(np.dtype(vlen)):
                    raise UsageError(f"{where} is {vlen} of varying length: name the others")
                if not np.dtype(vlen).isnative:
                    raise UsageError(
                        f"{where} has values of varying length in this machine's other byte order, "
                        "which h5py returns wrong: write them in its own"
                    )
                kind = array_kind(vlen, [None])
                return _ValuesColumn(_ChunkedDataset(self, dataset, chunks), self.count, kind)
            chunks.check(dataset, slice(0, 1))
            first = bytes(dataset[0][:HEAD_BYTES]) if self.count else b""
            kind = looks_like(first)
            return _ValuesColumn(_ChunkedDataset(self, dataset, chunks), self.count, kind)
        members = h5py.check_enum_dtype(dataset.dtype)
        if members and name == label_name(sets, self._label):
            named = {int(value): text for text, value in members.items()}
            if sorted(named) != list(range(len(named))):
                values = self._integers(name, sets)
                assert values is not None
                own = [named.get(value, str(value)) for value in values.reshape(-1).tolist()]
                texts_array: Any = np.array(own, np.str_)
                return TextArrayColumn(texts_array)
            self.classes = [named[value] for value in range(len(named))]
        if not storable(dataset.dtype):
            others = [n for n, each in sets.items() if storable(each.dtype) and each.shape]
            store = (
                "each of its columns as a data set" if dataset.dtype.names else "numbers or texts"
            )
            rest = (
                f", or name others, as in {self.file.name}::{','.join(others[:2])}"
                if others
                else ""
            )
            raise UsageError(
                f"{where} is {dataset.dtype}, which samples cannot have: store {store}{rest}"
            )
        tell_of_attributes(where, dataset.attrs, is_root=False)
        unit = dataset.chunks[0] if dataset.chunks else 1
        # Do not decode chunks together that exceed a few blocks.
        row = max(1, dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64)))
        unit = unit if unit * row <= 4 * MAX_BLOCK_BYTES else 1
        array = self._array(dataset, chunks)
        if select is None:
            self.chunked[name] = array.chunked(where)
        return PlainColumn(array, unit, slab(select, name, tuple(dataset.shape[1:])))

    def _integers(self, name: str, sets: Mapping[str, Any]) -> npt.NDArray[np.int64] | None:
        if name not in sets:
            return None
        Chunks(sets[name], f"{self.file.name}::{name}").check(sets[name], Ellipsis)
        return np.asarray(sets[name][...]).astype(np.int64)

    def _array(self, dataset: Any, chunks: Chunks) -> Any:
        """Return an array that reads a contiguous local data set directly, others through HDF5."""
        offset = dataset.id.get_offset() if dataset.chunks is None else None
        plain = dataset.dtype.isnative and dataset.nbytes > 0
        if offset is not None and self.file.local_path is not None and plain:
            if offset + dataset.nbytes > self.file.size:
                raise SourceError(f"{self.file.name} is cut off: restore it")
            return StoredArray(self.file, offset, tuple(dataset.shape), dataset.dtype)
        return _ChunkedDataset(self, dataset, chunks)

    def _find(self, root: Any, names: Sequence[str]) -> dict[str, Any]:
        """Return the data sets of the file, or the named ones.

        Raises SourceError for links and references to other files.
        """
        import h5py

        sets: dict[str, Any] = {}
        links: list[str] = []
        groups = 0

        def look(group: Any, prefix: str) -> None:
            nonlocal groups
            groups += 1  # A group may hold itself, or hold another under several names.
            if groups > _MAX_GROUPS:
                raise UsageError(f"{self.file.name} holds over {_MAX_GROUPS} groups, or a loop")
            for key in group:
                name = prefix + key
                if name in _MATLAB and name not in names:
                    continue
                link = group.get(key, getlink=True)
                asked = not names or any(
                    n == name or n.startswith(f"{name}/") or name in (n + ENDS, n + SHAPE)
                    for n in names
                )
                if not asked:
                    continue
                child = _linked(root, group, key, link)
                if child is None:
                    if names:
                        raise SourceError(
                            f"{self.file.name}::{name} is a link to a group, to nothing or to "
                            "another file, which dlio does not follow: name its target instead"
                        )
                    links.append(name)
                    continue
                if isinstance(child, h5py.Group):
                    if prefix.count("/") < 16:
                        look(child, f"{name}/")  # noqa: F821 - until the end
                elif isinstance(child, h5py.Dataset):
                    self._check(name, child)
                    sets[name] = child
                    if len(sets) > _MAX_SETS:
                        raise UsageError(f"{self.file.name} holds over {_MAX_SETS} data sets")

        try:
            look(root, "")
        finally:
            del look  # It holds itself, and by `root` the open file, until Python looks for cycles.
        if links:
            tell_once(
                f"{self.file.name}: {counted(len(links), 'link')} to groups, nothing or other "
                f"files left out, such as {links[0]}: name their targets to read them"
            )
        return sets

    def _check(self, name: str, dataset: Any) -> None:
        import h5py

        where = f"{self.file.name}::{name}"
        if dataset.external:
            raise SourceError(f"{where} lies in another file (external storage): refused")
        if dataset.is_virtual:
            others = {source.file_name for source in dataset.virtual_sources()} - {"."}
            if others:
                shown = ", ".join(sorted(others)[:2])
                raise SourceError(
                    f"{where} is a virtual data set of {counted(len(others), 'other file')} "
                    f"({shown}), which dlio does not read: open a list of those files instead, or "
                    "write it whole with h5py"
                )
            for each in dataset.virtual_sources():
                part = _linked(dataset.file, dataset.file, "", h5py.SoftLink(each.dset_name))
                if not isinstance(part, h5py.Dataset) or part.is_virtual or part.external:
                    raise SourceError(
                        f"{where} is a virtual data set of {each.dset_name}, which is not a data "
                        "set in the same file (h5py reads fill values there): write it whole with "
                        "h5py"
                    )


def _linked(root: Any, group: Any, key: str, link: Any) -> Any:
    """Return a group's member of a name; None if it is a link that is not followed.

    Soft links are followed to data sets of the file, by hard links alone: no other file is opened.
    """
    import h5py

    if isinstance(link, h5py.HardLink):
        return group[key]
    if not isinstance(link, h5py.SoftLink):
        return None
    node = root if link.path.startswith("/") else group
    for step in link.path.split("/"):
        if step in ("", "."):
            continue
        if not isinstance(node, h5py.Group) or not isinstance(
            node.get(step, getlink=True), h5py.HardLink
        ):
            return None
        node = node[step]
    return node if isinstance(node, h5py.Dataset) else None


class _ChunkedDataset:
    """A data set that is read through the HDF5 library."""

    def __init__(self, file: Hdf5File, dataset: Any, chunks: Chunks) -> None:
        self._file, self._name, self._chunks = file, dataset.name, chunks
        self.shape, self.dtype = tuple(dataset.shape), dataset.dtype
        self._sides = dataset.chunks

    def __getitem__(self, key: Any) -> Any:
        with self._file.lock:
            dataset = self._file.handle()[self._name]
            self._chunks.check(dataset, key)
            with ReadErrors(f"{self._file.file.name}::{self._name.lstrip('/')}"):
                return dataset[key]

    def chunked(self, where: str) -> ChunkedArray:
        """Return the array with its chunks, or with parts in their place if it has none."""
        sides = self._sides or plain_chunks(self.shape, self.dtype.itemsize)
        return ChunkedArray(where, self.shape, self.dtype, sides, self.__getitem__)


class _ValuesColumn:
    """Strings or arrays of variable length, in HDF5's own types."""

    unit = 1

    def __init__(self, dataset: _ChunkedDataset, count: int, kind: str) -> None:
        self._dataset, self._count = dataset, count
        self.kind = kind

    def bodies(self) -> npt.NDArray[np.int64]:
        sizes = [
            getattr(value, "nbytes", len(value))
            for start in range(0, self._count, 1024)
            for value in self.rows(start, min(start + 1024, self._count))
        ]
        return np.array(sizes, np.int64)

    def rows(self, start: int, stop: int) -> list[Value]:
        values = self._dataset[start:stop].reshape(-1)
        if "[" in self.kind:
            dtype = parse_kind(self.kind).dtype
            return [np.asarray(value).astype(dtype) for value in values]
        return [value.encode() if isinstance(value, str) else bytes(value) for value in values]

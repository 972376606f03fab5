"""The reader of Zarr stores, version 2 and 3, sharded or not, with any codec that zarr supports."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from dlio.data.chunked_array import ChunkedArray
from dlio.data.identity import store_sample
from dlio.data.labels import with_label
from dlio.data.reader_contract import PathRules
from dlio.data.source import ReadErrors, Source, file_at, is_remote, own_name, split_fields
from dlio.data.splits import no_splits
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import MAX_BLOCK_BYTES
from dlio.util.limits import MAX_ABSENT_ROWS, is_trusted
from dlio.util.units import counted
from dlio_readers.array_names import check_groups, chosen_arrays, tell_of_attributes
from dlio_readers.columns import (
    ENDS,
    SCHEMA,
    SHAPE,
    Column,
    ColumnReader,
    PlainColumn,
    RaggedColumn,
    Select,
    TextArrayColumn,
    VolumeColumn,
    choose,
    parse_schema,
    slab,
    storable,
)
from dlio_readers.omezarr import ome_images

# fmt: off
_OBJECT_CODECS: Final = (
    "pickle", "json", "json2", "msgpack", "msgpack2", "categorize", "vlen-bytes", "vlen-array",
)
# fmt: on
_TEXT_CODEC: Final = "vlen-utf8"
_MAX_CHUNKS: Final = 1 << 22
_MAX_CHUNK: Final = 256 << 20
_MAX_TEXTS: Final = 16 << 20
"""Bytes of a chunk of texts beyond those of its array; they may become eight times as many."""
_DEEPEST: Final = 8
"""Levels of groups below a store whose own group holds no arrays."""
_ARCHIVE: Final = ".zarr.zip"
_MOST_FOLDERS: Final = 32
"""Folders of an array that are listed to count its chunks."""
_MARKS: Final = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


class ZarrReader(ColumnReader):
    """Read a Zarr array, or arrays of a group whose row i is sample i: `x.zarr::images,labels`.

    Args:
        path: path of the store, with the names of arrays after `::`; by default all arrays, which
            then need the same number of rows.
        select: part of every sample to read; only its chunks are read.
        missing: treatment of missing chunks: `fill` for the fill value, as zarr does, or `error`.
            Zarr does not distinguish a chunk that was never written from a lost one. The default is
            `error` for stores written by `dlio pack`, which writes all chunks, else `fill`.
        split: which of several splits that names of arrays say, as `train_images` does.
        label: the array that is the label, whatever its name; the field is called `label`.

    Of OME-Zarr a sample is an image at full resolution; see `dlio_readers.omezarr`.

    Raises SourceError for damaged stores, UsageError if the choice of arrays is ambiguous.
    """

    format = "zarr"
    path_rules = PathRules(one_path=True)

    def __init__(
        self,
        path: str,
        select: Select = None,
        missing: Literal["error", "fill"] | None = None,
        split: str | None = None,
        label: str | None = None,
    ) -> None:
        url, names = split_fields(path)
        names = with_label(names, label)
        url, archive = _in_archive(url)
        root = self._open(url)
        packed = parse_schema(root.attrs.get(SCHEMA), path)
        self._names: list[str] = []
        self._missing = missing or ("error" if packed is not None else "fill")
        images = ome_images(root, url) if packed is None and not names else {}
        if split is not None and (images or packed is not None or names):
            raise no_splits(split, path)
        if images:
            if label is not None:
                raise UsageError(
                    f"label=: the samples of {url} are images of OME-Zarr: leave it out"
                )
            self._use_images(url, archive, images, select)
            return
        arrays = self._arrays(root)
        if packed is None and not names:
            parts = chosen_arrays(path, arrays, split)
            if len(parts) > 1:
                raise UsageError(f"split={split!r}: {path}: open its splits one by one")
            if split is None and len(arrays) == len(parts[0]):
                check_groups(path, {name: tuple(each.shape) for name, each in arrays.items()})
            arrays = parts[0]
        classes: list[str] = []
        schema = None
        if packed is None:
            tell_of_attributes(path, root.attrs)
        else:
            schema, classes = packed
            names = names or tuple(name for name, _ in schema.fields)
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        chosen, count = choose(path, shapes, names, by_file=False, label=label)
        columns: dict[str, Column] = {}
        for name in chosen:
            array = arrays[name]
            where = f"{url}::{name}"
            for each in (name, name + ENDS, name + SHAPE):
                if each in arrays:
                    self._check_array(arrays[each], f"{url}::{each}", missing)
            self._check_chunks(array, where)
            classes = [str(each) for each in array.attrs.get("classes", classes)]
            if name + ENDS in arrays:
                ends = self._whole(arrays[name + ENDS], where).astype(np.int64)
                shape = arrays.get(name + SHAPE)
                kind = schema.kinds[name].text if schema and name in schema.kinds else "bytes"
                sizes = None if shape is None else self._whole(shape, where).astype(np.int64)
                columns[name] = RaggedColumn(array, ends, sizes, kind, where)
                continue
            if array.dtype.kind in "TUS" and not set(array.shape[1:]) - {1}:
                columns[name] = TextArrayColumn(array)
                continue
            if not storable(array.dtype):
                raise UsageError(f"{where} is {array.dtype}, which samples cannot have")
            tell_of_attributes(where, array.attrs, is_root=False)
            part = slab(select, name, tuple(array.shape[1:]))
            columns[name] = PlainColumn(array, _unit(array), part)
        self._by_field = {
            name: [_chunked(arrays[name], f"{url}::{name}")]
            for name, column in columns.items()
            if isinstance(column, PlainColumn) and select is None
        }
        whole = schema is not None and len(schema.fields) == len(columns)
        self._setup(
            columns,
            count,
            [url, archive, self._stamp(), repr((select, split)) if split else repr(select)],
            classes,
            schema.structure if schema is not None and whole else None,
            select,
            label=label,
        )

    def name(self, sample: int) -> str:
        return self._names[sample] if self._names else super().name(sample)

    def _use_images(
        self, url: str, archive: str, images: Mapping[str, Mapping[str, Any]], select: Select
    ) -> None:
        """Use the images of OME-Zarr as samples. Raises SourceError, UsageError."""
        if select is not None:
            raise UsageError(f"select=: the samples of {url} are images: give patch=")
        parts: dict[str, list[PlainColumn]] = {}
        self._by_field, self._files_are_samples = {}, True
        for path, fields in images.items():
            for name, array in fields.items():
                where = f"{url}::{array.path}"
                if not storable(array.dtype):
                    raise UsageError(f"{where} is {array.dtype}, which samples cannot have")
                self._check_array(array, where, None)
                self._check_chunks(array, where)
                parts.setdefault(name, []).append(PlainColumn(array, 1))
                self._by_field.setdefault(name, []).append(_chunked(array, where))
            self._names.append(path or own_name(url).rstrip("/").rpartition("/")[2])
        for name, each in parts.items():
            kinds = {(column.dtype, len(column.shape)) for column in each}
            if len(kinds) > 1:
                raise UsageError(f"{url}: its images differ in {name}: open them alone")
        columns = {name: VolumeColumn(each) for name, each in parts.items()}
        self._setup(columns, len(images), [url, archive, self._stamp()])

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(path)[0]
        source = Source(url)
        if own_name(url).rstrip("/").endswith((".zarr", _ARCHIVE)) or any(
            source.exists(mark) for mark in _MARKS
        ):
            return None
        return "holds no zarr.json, .zgroup or .zarray"

    def _chunked(self) -> dict[str, list[ChunkedArray]]:
        return self._by_field

    def _open(self, url: str) -> Any:
        import zarr

        from dlio_readers.zarrstore import LocalFiles, RemoteFiles

        self._source = source = Source(url)
        with ReadErrors(url, "is not a Zarr store, or is damaged"):
            self._store: Any = (LocalFiles if source.local else RemoteFiles).at(source)
            return zarr.open(self._store, mode="r")

    def _arrays(self, root: Any) -> dict[str, Any]:
        import zarr

        if isinstance(root, zarr.Array):
            return {root.basename or "data": root}
        with ReadErrors(self.path, "has an array that zarr cannot open"):
            own = dict(sorted(root.arrays()))
            if own:
                return own
            below = root.members(max_depth=_DEEPEST)
            return dict(sorted((n, each) for n, each in below if isinstance(each, zarr.Array)))

    def _whole(self, array: Any, where: str) -> Any:
        with ReadErrors(where):
            self._check_chunks(array, where)
            return np.asarray(array[...])

    def _check_chunks(self, array: Any, where: str) -> None:
        if self._missing != "error":
            return
        stored, wanted = _stored_chunks(self._source, array)
        if stored < wanted:
            kind = "shards" if array.shards else "chunks"
            raise SourceError(
                f"{where}: {wanted - stored} of its {wanted} {kind} are missing: restore them, or "
                'use the fill value for them with missing="fill"'
            )
        self._store.limits.refuse_gaps(array.path)

    def _check_array(self, array: Any, where: str, missing: str | None) -> None:
        """Refuse codecs that make objects, and limit what the others may take memory for.

        Raises SourceError.
        """
        codecs = _codecs(array)
        bad = [each for each in codecs if each in _OBJECT_CODECS]
        texts = array.dtype.kind == "T"
        if bad or (array.dtype.hasobject and not texts) or (_TEXT_CODEC in codecs and not texts):
            runs = (
                ", whose data may run code when they are read: refused" if "pickle" in bad else ""
            )
            raise SourceError(
                f"{where} holds objects ({', '.join(bad) or array.dtype}){runs}: store numbers or "
                "texts, or name the other arrays to read, as in x.zarr::image,label"
            )
        size = array.dtype.itemsize
        chunk = size * math.prod(array.chunks)
        whole = size * math.prod(array.shards or array.chunks)
        if texts:
            chunk, whole = chunk + _MAX_TEXTS, whole + _MAX_TEXTS
        elif whole > _MAX_CHUNK:
            raise SourceError(f"{where}: a chunk of {whole} bytes is too large: store smaller ones")
        self._store.limits.add(array.path, whole, chunk, codecs[-1] if codecs else "")
        if array.nchunks > _MAX_CHUNKS:
            raise SourceError(f"{where} has {array.nchunks} chunks: store larger ones")
        rows = array.shape[0] if array.shape else 0
        if missing != "fill" and rows > MAX_ABSENT_ROWS and not is_trusted():
            stored, wanted = _stored_chunks(self._source, array)
            absent = rows * (wanted - stored) // max(1, wanted)
            if absent > MAX_ABSENT_ROWS:
                raise SourceError(
                    f"{where}: {absent} of its {counted(rows, 'row')} are not stored: use the fill "
                    "value for "
                    'them with missing="fill", or restore its chunks'
                )

    def _stamp(self) -> str:
        """Identify a state of the store: by its metadata, times of its folders, and `store_sample`.

        A chunk that is overwritten in place changes it if it is one of those that are sampled.
        """
        source = self._source
        metadata = [source.read(mark).decode("latin-1") for mark in _MARKS if source.exists(mark)]
        names: Sequence[str] = ["", *[e.name for e in source.listing() if e.folder]]
        times = [f"{name} {source.modified_ns(name)}" for name in names]

        def opened(name: str, flags: int) -> int:
            return source.open(source.path(name), flags)

        with ReadErrors(source.url):
            content = store_sample(source.root, opened) if source.local else ""
        return " ".join([*metadata, *times, content])


def _stored_chunks(source: Source, array: Any) -> tuple[int, int]:
    """Return (chunks or shards of an array that are stored, those that it has).

    Folders are listed once, up to 32 of them: where each chunk has a folder of its own, those that
    are there are taken to be full, which a read finds out. Raises SourceError.
    """
    units = array.shards or array.chunks
    sides = [-(-size // unit) for size, unit in zip(array.shape, units, strict=True)]
    key = array.metadata.encode_chunk_key((0,) * len(sides))
    total = math.prod(sides)
    if not total or not sides:
        return total, total
    folder = array.path
    if key.startswith("c/"):
        folder, key = f"{folder}/c".lstrip("/"), key[2:]
    levels = [[side] for side in sides] if "/" in key else [sides]
    folders, listed = [folder] if source.is_folder(folder) else [], 0
    for depth, level in enumerate(levels):
        listed += len(folders)
        if listed > _MOST_FOLDERS:
            return len(folders) * math.prod(sides[depth:]), total
        folders = [
            f"{each}/{name}"
            for each in folders
            for name, _ in source.names(each)
            if _is_place(name.removeprefix("c."), level)
        ]
    return len(folders), total


def _is_place(name: str, sides: Sequence[int]) -> bool:
    """True if a name such as 3.0 is the place of a chunk in a grid."""
    parts = name.split(".")
    return len(parts) == len(sides) and all(
        part.isascii() and part.isdecimal() and len(part) < 19 and int(part) < side
        for part, side in zip(parts, sides, strict=True)
    )


def _in_archive(url: str) -> tuple[str, str]:
    """Return the place of a store, which may be in an archive (`x.zarr.zip`), and the archive's
    stamp.
    """
    if not own_name(url).endswith(_ARCHIVE):
        return url, ""
    stamp = file_at(url).opened().stamp
    archive = url if is_remote(url) else os.path.abspath(os.path.expanduser(url))
    with ReadErrors(url, "is not a zip archive, or is damaged"):
        whole = Source(f"zip://::{archive}")
        is_store = any(map(whole.exists, _MARKS))
        inner = [] if is_store else whole.folders()
    own = next(iter(inner), "")
    return f"zip://{own}::{archive}", stamp


def _codecs(array: Any) -> list[str]:
    """Return the names of an array's codecs, in the order in which they encode."""
    plain = array.metadata.to_dict()
    if plain.get("zarr_format") == 2:
        rows = [
            *(plain.get("filters") or ()),
            *([plain["compressor"]] if plain["compressor"] else ()),
        ]
    else:
        rows = list(plain["codecs"])
        if rows and rows[-1]["name"] == "sharding_indexed":
            rows += rows[-1]["configuration"]["codecs"]
    names = [
        (row.get("id") or row["name"]) if isinstance(row, dict) else getattr(row, "codec_id", row)
        for row in rows
    ]
    return [str(name).removeprefix("numcodecs.") for name in names]


def _chunked(array: Any, where: str) -> ChunkedArray:
    """Return an array with its chunks; those inside shards, which are read by ranges."""
    shape, sides = tuple(map(int, array.shape)), tuple(map(int, array.chunks))
    return ChunkedArray(where, shape, np.dtype(array.dtype), sides, array.__getitem__)


def _unit(array: Any) -> int:
    """Rows that are decoded together; 1 if they exceed a few blocks."""
    rows = int((array.shards or array.chunks)[0])
    size = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    if rows * size > 4 * MAX_BLOCK_BYTES:
        rows = int(array.chunks[0])
    return rows if rows * size <= 4 * MAX_BLOCK_BYTES else 1

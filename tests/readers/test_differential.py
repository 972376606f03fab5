"""Files drawn over the features of their formats hold what the format's own library reads.

A file with a feature that samples cannot have is refused in one line, which calls no sound file
damaged.
"""

import bz2
import gzip
import io
import json
import lzma
import math
import os
import posixpath
import shutil
import string
import tarfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

from dlio.data.reader import open_reader
from dlio.errors import DlioError
from tests.readers.mds_rows import mds_rows

DAILY, NIGHTLY = 3, 200
Values = dict[str, list[Any]]
Drawn = tuple[str, Values, bool]
"""Path of a file, its values by field as its library reads them, and True if it has features that
samples cannot have."""
Draw = Callable[[np.random.Generator, Path], Drawn]


def _same(ours: Any, theirs: Any) -> bool:
    ours, theirs = (bytes(x) if isinstance(x, memoryview) else x for x in (ours, theirs))
    if isinstance(ours, bytes) and isinstance(theirs, np.ndarray):
        ours = np.asarray(Image.open(io.BytesIO(ours)))
    if isinstance(ours, bytes) and isinstance(theirs, list):  # Of texts.
        return bool(json.loads(ours) == [text or "" for text in theirs])
    if isinstance(theirs, float | list | np.ndarray | np.number | np.bool_ | int | bool):
        left, right = np.asarray(ours), np.asarray(theirs)
        if left.size == right.size == 0:
            return True
        return left.shape == right.shape and bool(np.array_equal(left, right, equal_nan=True))
    if isinstance(theirs, bytes):
        return bytes(ours) == theirs
    return bool(ours.decode() == str(theirs))


def _read(path: str) -> Values:
    reader = open_reader(path)
    try:
        payloads = reader.read(np.arange(len(reader)))
        rows = [reader.schema.split(payload) for payload in payloads]
        alone = reader.schema.split(reader.read(np.array([len(reader) - 1]))[0])
        assert all(_same(alone[name], rows[-1][name]) for name in alone)
        return {name: [row[name] for row in rows] for name, _ in reader.schema.fields}
    finally:
        reader.close()


def _count(rng: np.random.Generator) -> int:
    return int(rng.integers(1, 40))


def _words(rng: np.random.Generator, count: int) -> list[str]:
    letters = np.array(list(string.ascii_letters + "äß語 ,\"'\n"))
    return ["".join(rng.choice(letters, rng.integers(0, 12))) for _ in range(count)]


def _numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 100, shape).astype(dtype)


# Arrow and Parquet


def _arrow_column(rng: np.random.Generator, count: int) -> tuple[pa.Array, bool]:
    """Return a column, and True if samples cannot have it."""
    kinds = ("number", "number", "text", "bytes", "list", "nested", "words", "texts", "other")
    kind = str(rng.choice(kinds))
    gaps = rng.random(count) < 0.2 if rng.random() < 0.4 else np.zeros(count, bool)
    if kind == "number":
        dtype = str(rng.choice(["int8", "uint8", "int32", "int64", "float32", "float64", "bool"]))
        return pa.array(_numbers(rng, dtype, (count,)), mask=gaps), False
    if kind in ("text", "words"):
        words = (
            _words(rng, count) if kind == "text" else rng.choice(["a", "bc", ""], count).tolist()
        )
        types = [pa.string(), pa.large_string(), pa.string_view()]
        if kind == "words":
            types = [pa.dictionary(pa.int8(), pa.string())]
        column = pa.array([None if gap else word for gap, word in zip(gaps, words, strict=True)])
        if kind == "words":
            return column.dictionary_encode().cast(types[0]), False
        return column.cast(types[int(rng.integers(len(types)))]), False
    if kind == "bytes":
        size = int(rng.integers(1, 9))
        types = [pa.binary(), pa.large_binary(), pa.binary(size), pa.binary_view()]
        return pa.array([rng.bytes(size) for _ in range(count)], types[rng.integers(4)]), False
    if kind == "list":
        dtype = str(rng.choice(["int16", "float32", "int64"]))
        width = int(rng.integers(1, 4))
        fixed = rng.random() < 0.5
        sizes = [width if fixed else int(rng.integers(0, 5)) for _ in range(count)]
        rows = [_numbers(rng, dtype, (size,)).tolist() for size in sizes]
        inner = pa.from_numpy_dtype(np.dtype(dtype))
        types = [pa.list_(inner), pa.large_list(inner), *([pa.list_(inner, width)] * fixed)]
        return pa.array(rows, types[rng.integers(len(types))]), False
    if kind == "texts":
        words = [*_words(rng, 9), None]
        rows = [rng.choice(words, rng.integers(0, 4)).tolist() for _ in range(count)]
        types = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
        make = pa.list_ if rng.random() < 0.5 else pa.large_list
        column = pa.array(rows, pa.list_(pa.string()))
        return column.cast(make(types[int(rng.integers(3))])), False
    if kind == "nested":
        ragged = rng.random() < 0.2
        width = int(rng.integers(1, 4))
        rows = [
            _numbers(rng, "int64", (int(rng.integers(1, 4)), width)).tolist() for _ in range(count)
        ]
        if ragged:
            rows[-1] = [[1], [1, 2]]
        return pa.array(rows, pa.list_(pa.list_(pa.int64()))), ragged
    others = [
        (pa.array([1] * count, pa.timestamp("us")), True),
        (pa.array([1] * count, pa.decimal128(5, 2)), False),
        (pa.array([{"a": 1}] * count), True),
        (pa.nulls(count), False),
    ]
    return others[int(rng.integers(len(others)))]


def _arrow_table(rng: np.random.Generator) -> tuple[pa.Table, bool]:
    count = _count(rng)
    drawn = [_arrow_column(rng, count) for _ in range(rng.integers(1, 4))]
    table = pa.table({f"c{k}": column for k, (column, _) in enumerate(drawn)})
    return table, any(odd for _, odd in drawn)


def _filled(table: pa.Table) -> Values:
    """Return the values with NaN for numbers that are missing, and empty texts."""
    filled: Values = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kinds = pa.types
        numbers = kinds.is_floating(column.type) or kinds.is_integer(column.type)
        numbers = numbers or kinds.is_boolean(column.type) or kinds.is_null(column.type)
        empty: Any = math.nan if numbers else ""
        values = [empty if value is None else value for value in column.to_pylist()]
        decimals = kinds.is_decimal(column.type)
        filled[name] = [float(value) for value in values] if decimals else values
    return filled


def parquet(rng: np.random.Generator, folder: Path) -> Drawn:
    table, odd = _arrow_table(rng)
    pq.write_table(
        table,
        folder / "a.parquet",
        compression=str(rng.choice(["none", "snappy", "zstd", "gzip"])),
        use_dictionary=bool(rng.integers(2)),
        row_group_size=int(rng.integers(1, 50)),
        data_page_version=str(rng.choice(["1.0", "2.0"])),
        store_schema=bool(rng.integers(2)),
    )
    return str(folder / "a.parquet"), _filled(pq.read_table(folder / "a.parquet")), odd


def arrow(rng: np.random.Generator, folder: Path) -> Drawn:
    table, odd = _arrow_table(rng)
    stream = bool(rng.integers(2))
    packed = [None, "lz4", "zstd"][int(rng.integers(3))]
    options = pa.ipc.IpcWriteOptions(compression=packed)
    make: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(folder / "a.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=int(rng.integers(1, 50)))
    read: Any = pa.ipc.open_stream if stream else pa.ipc.open_file
    with pa.OSFile(str(folder / "a.arrow")) as file:
        back = read(file).read_all()
    return str(folder / "a.arrow"), _filled(back), odd


def polars(rng: np.random.Generator, folder: Path) -> Drawn:
    pl = pytest.importorskip("polars")
    count = _count(rng)
    columns: dict[str, Any] = {
        "n": _numbers(rng, str(rng.choice(["int8", "int64", "float32"])), (count,)),
        "t": _words(rng, count),
        "l": [_numbers(rng, "int64", (int(rng.integers(0, 4)),)).tolist() for _ in range(count)],
        "c": pl.Series(rng.choice(["a", "b"], count).tolist(), dtype=pl.Categorical),
        "w": [_words(rng, int(rng.integers(0, 4))) for _ in range(count)],
        "m": [None if rng.random() < 0.3 else 1.5 for _ in range(count)],
    }
    names = rng.choice(sorted(columns), rng.integers(1, 7), replace=False).tolist()
    frame = pl.DataFrame({name: columns[name] for name in names})
    if "m" in names:
        frame = frame.with_columns(pl.col("m").cast(pl.Float64))
    if "l" in names:
        frame = frame.with_columns(pl.col("l").cast(pl.List(pl.Int64)))
    if "w" in names:
        frame = frame.with_columns(pl.col("w").cast(pl.List(pl.String)))
    if rng.random() < 0.5:
        path = str(folder / "a.parquet")
        frame.write_parquet(path, row_group_size=int(rng.integers(1, 50)))
        back = pl.read_parquet(path)
    else:
        path = str(folder / "a.arrow")
        frame.write_ipc(path, compression=str(rng.choice(["uncompressed", "lz4", "zstd"])))
        back = pl.read_ipc(path)
    values = {
        name: [math.nan if value is None else value for value in back[name].to_list()]
        for name in names
    }
    return path, values, False


# NumPy


def numpy(rng: np.random.Generator, folder: Path) -> Drawn:
    count, odd = _count(rng), False
    arrays: dict[str, Any] = {}
    for k in range(rng.integers(1, 4)):
        dtype = str(rng.choice(["<i4", ">i4", "<f8", ">f4", "|u1", "|b1", "<f2", "<c8"]))
        shape = (count, *rng.integers(1, 4, rng.integers(0, 3)).tolist())
        order: Any = str(rng.choice(["C", "F"]))
        arrays[f"x{k}"] = np.array(_numbers(rng, "int64", shape).astype(dtype), order=order)
    if rng.random() < 0.2:
        odd = True
        other = [np.arange(count).astype("M8[s]"), np.zeros(count, [("a", "<f4")])]
        arrays["odd"] = other[int(rng.integers(2))]
    if rng.random() < 0.3:
        np.save(folder / "a.npy", arrays["x0"])
        return str(folder / "a.npy"), {"data": list(np.load(folder / "a.npy"))}, False
    save: Any = np.savez_compressed if rng.integers(2) else np.savez
    save(folder / "a.npz", **arrays)
    path, names = str(folder / "a.npz"), sorted(arrays)
    if odd and rng.random() < 0.7:
        names, odd = [name for name in names if name != "odd"], False
        path += "::" + ",".join(names)
    with np.load(folder / "a.npz") as read:
        return path, {name: list(read[name]) for name in names}, odd


# IDX, whose judge is its description

_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def _idx_array(path: str) -> Any:
    data = Path(path).read_bytes()
    data = gzip.decompress(data) if path.endswith(".gz") else data
    sides = np.frombuffer(data, ">u4", data[3], 4).tolist()
    return np.frombuffer(data, _IDX_TYPES[data[2]], offset=4 + 4 * data[3]).reshape(sides)


def idx(rng: np.random.Generator, folder: Path) -> Drawn:
    count = _count(rng)
    parts = ["images", "labels"][: int(rng.integers(1, 3))]
    packed = bool(rng.integers(2))
    values: Values = {}
    for part in parts:
        code = int(rng.choice(sorted(_IDX_TYPES)))
        shape = (count, *rng.integers(1, 5, rng.integers(0, 4)).tolist())
        array = _numbers(rng, "int64", shape).astype(_IDX_TYPES[code])
        head = bytes([0, 0, code, len(shape)]) + np.array(shape, ">u4").tobytes()
        file = folder / f"train-{part}-idx{len(shape)}-ubyte{'.gz' * packed}"
        file.write_bytes(
            gzip.compress(head + array.tobytes()) if packed else head + array.tobytes()
        )
        values[part[:-1]] = list(_idx_array(str(file)))
    return str(folder if len(parts) > 1 else file), values, False


# HDF5


def hdf5(rng: np.random.Generator, folder: Path) -> Drawn:
    count, odd, path = _count(rng), False, folder / str(rng.choice(["a.h5", "a.mat", "a.nc"]))
    libver: Any = str(rng.choice(["earliest", "latest"]))
    with h5py.File(path, "w", libver=libver, userblock_size=int(rng.choice([0, 512]))) as file:
        for k in range(rng.integers(1, 4)):
            kind = str(rng.choice(["plain", "plain", "chunked", "text", "vlen", "absent", "other"]))
            dtype = str(rng.choice(["<i2", ">i4", "<f8", ">f4", "|u1", "bool", "<f2"]))
            shape = (count, *rng.integers(1, 5, rng.integers(0, 3)).tolist())
            data = _numbers(rng, "int64", shape).astype(dtype)
            if kind == "plain":
                file[f"g/x{k}"] = data
            elif kind == "chunked":
                packed: Any = [None, "gzip", "lzf"][int(rng.integers(3))]
                chunks = tuple(int(rng.integers(1, side + 1)) for side in shape)
                file.create_dataset(
                    f"x{k}",
                    data=data,
                    chunks=chunks,
                    compression=packed,
                    shuffle=bool(rng.integers(2)),
                    fletcher32=bool(rng.integers(2)),
                    maxshape=(None, *shape[1:]),
                )
            elif kind == "text":
                words = _words(rng, count)
                if rng.integers(2):
                    file.create_dataset(f"x{k}", data=words, dtype=h5py.string_dtype())
                else:
                    file[f"x{k}"] = np.array([word.encode() for word in words], "S40")
            elif kind == "vlen":
                made = file.create_dataset(f"x{k}", (count,), h5py.vlen_dtype(np.dtype("<i4")))
                for row in range(count):
                    made[row] = _numbers(rng, "int32", (int(rng.integers(0, 4)),))
            elif kind == "absent":
                file.create_dataset(f"x{k}", shape, dtype, fillvalue=1, chunks=True)
            else:
                odd = True
                file[f"x{k}"] = np.zeros(count, [("a", "<f4"), ("b", "<i4")])
    values: Values = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            rows = list(item[...])
            is_text = h5py.check_string_dtype(item.dtype) is not None
            values[name] = [row.decode() for row in rows] if is_text else rows

    with h5py.File(path) as file:
        file.visititems(take)
    return str(path), values, odd


# Zarr


def zarr_store(rng: np.random.Generator, folder: Path) -> Drawn:
    count, form, odd = _count(rng), int(rng.choice([2, 3])), False
    path = folder / "a.zarr"
    root: Any = zarr.open_group(str(path), mode="w", zarr_format=form)  # type: ignore[arg-type]
    for k in range(rng.integers(1, 4)):
        kind = str(rng.choice(["plain", "plain", "text", "fixed", "absent"]))
        shape = (count, *rng.integers(1, 5, rng.integers(0, 3)).tolist())
        chunks = tuple(int(rng.integers(1, side + 1)) for side in shape)
        if kind == "text":
            made = root.create_array(f"x{k}", shape=(count,), dtype=str, chunks=chunks[:1])
            made[:] = np.array(_words(rng, count), dtype=object)
        elif kind == "fixed":
            words = np.array([word.replace("\0", "") for word in _words(rng, count)], "<U20")
            made = root.create_array(f"x{k}", shape=(count,), dtype="<U20", chunks=chunks[:1])
            made[:] = words
        else:
            dtype = str(rng.choice(["<i2", "<i8", "<f8", "<f4", "|u1", "bool"]))
            more: dict[str, Any] = {}
            if form == 3 and rng.random() < 0.4:
                more["shards"] = tuple(2 * side for side in chunks)
            made = root.create_array(
                f"x{k}", shape=shape, dtype=dtype, chunks=chunks, fill_value=1, **more
            )
            if kind == "plain":
                made[...] = _numbers(rng, "int64", shape).astype(dtype)
    read: Any = zarr.open_group(str(path), mode="r")
    values = {name: np.asarray(array[...]).tolist() for name, array in read.arrays()}
    where = str(path)
    if rng.random() < 0.3:
        where = shutil.make_archive(where, "zip", path)
    return where, values, odd


# Streaming


_MDS_COLUMNS = {
    "int": lambda rng, k: k,
    "str": lambda rng, k: "aß語" * (k % 3),
    "bytes": lambda rng, k: rng.bytes(k % 9),
    "json": lambda rng, k: {"k": [k, None]},
    "png": lambda rng, k: Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)),
    "jpeg": lambda rng, k: Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)),
    "float16": lambda rng, k: np.float16(k / 3),
    "float32": lambda rng, k: np.float32(k / 3),
    "uint8": lambda rng, k: np.uint8(k),
    "int16": lambda rng, k: np.int16(-k),
    "uint64": lambda rng, k: np.uint64(2**63 + k),
    "str_int": lambda rng, k: k * 10**30,
    "str_float": lambda rng, k: k / 3,
    "ndarray": lambda rng, k: _numbers(rng, "int64", (k % 3 + 1, 2)),
    "ndarray:float16:2,3": lambda rng, k: _numbers(rng, "float16", (2, 3)),
    "ndarray:uint8:300": lambda rng, k: _numbers(rng, "uint8", (300,)),
}
_REFUSED_COLUMNS = {
    "pil": lambda rng, k: Image.new("RGB", (2, 2)),
    "pkl": lambda rng, k: {k: k},
    "ndarray:": lambda rng, k: np.zeros((2,) * (k % 2 + 1), np.float32),
}


def _stored(encoding: str, value: Any) -> Any:
    """Return a value of Streaming's as dlio gives it."""
    if isinstance(value, Image.Image):
        return np.asarray(value)
    if encoding in ("json", "str_int", "str_float"):
        return json.dumps(value) if encoding == "json" else str(value)
    return value


def mds(rng: np.random.Generator, folder: Path) -> Drawn:
    streaming = pytest.importorskip("streaming")
    count, odd = _count(rng) + 2, bool(rng.random() < 0.15)
    chosen = rng.choice(sorted(_MDS_COLUMNS), rng.integers(1, 5), replace=False).tolist()
    makers: dict[str, Any] = {each: _MDS_COLUMNS[each] for each in chosen}
    if odd:
        name = str(rng.choice(sorted(_REFUSED_COLUMNS)))
        makers[name] = _REFUSED_COLUMNS[name]
    names = {f"c{k}": encoding for k, encoding in enumerate(makers)}
    rows = [{n: makers[encoding](rng, k) for n, encoding in names.items()} for k in range(count)]
    columns = {name: encoding.rstrip(":") for name, encoding in names.items()}
    kinds = [None, "gz", "gz:9", "zstd", "zstd:7", "br", "br:3", "snappy", "bz2"]
    packed, parts = kinds[int(rng.integers(len(kinds)))], int(rng.integers(1, 4))
    hashes = [None, ["sha1", "xxh64"]][int(rng.integers(2))]
    for part in range(parts):
        out = str(folder / f"part.{part}") if parts > 1 else str(folder)
        with streaming.MDSWriter(
            out=out,
            columns=columns,
            compression=packed,
            hashes=hashes,
            size_limit=int(rng.choice([2000, 1 << 20])),
        ) as writer:
            for row in rows[part::parts]:
                writer.write(row)
    if parts > 1:
        streaming.base.util.merge_index(str(folder), keep_local=True)
    if odd:
        return str(folder), {}, True
    read = mds_rows(str(folder))
    values = {
        name: [_stored(encoding, row[name]) for row in read] for name, encoding in columns.items()
    }
    return str(folder), values, False


# Scans


def nifti(rng: np.random.Generator, folder: Path) -> Drawn:
    nibabel = pytest.importorskip("nibabel")
    shape = tuple(rng.integers(1, 7, rng.integers(3, 5)).tolist())
    dtype = str(rng.choice(["<i2", ">i2", "|u1", "<f4", ">f4", "<f8", "<u2", "<i4"]))
    kind: Any = [nibabel.Nifti1Image, nibabel.Nifti2Image][int(rng.integers(2))]
    header = kind.header_class(endianness=dtype[0].replace("|", "<"))
    header.set_data_dtype(dtype)
    header.set_data_shape(shape)
    if scaled := bool(rng.integers(2)):
        header.set_slope_inter(float(rng.choice([0.5, 2.0])), float(rng.choice([0.0, -3.0])))
    image = kind(_numbers(rng, "float64", shape), np.eye(4), header)
    if scaled:
        image.header.set_slope_inter(*header.get_slope_inter())
    path = folder / str(rng.choice(["a.nii", "a.nii.gz"]))
    nibabel.save(image, path)
    proxy = nibabel.load(path).dataobj
    data = np.asarray(proxy)
    # Scaled values are float32 here, float64 there.
    is_plain = (proxy.slope, proxy.inter) == (1.0, 0.0)
    return str(path), {"image": [data if is_plain else data.astype(np.float32)]}, False


def dicom(rng: np.random.Generator, folder: Path) -> Drawn:
    pydicom = pytest.importorskip("pydicom")
    uid = pydicom.uid
    syntax = [
        uid.ImplicitVRLittleEndian,
        uid.ExplicitVRLittleEndian,
        uid.ExplicitVRBigEndian,
        uid.DeflatedExplicitVRLittleEndian,
        uid.RLELossless,
    ][int(rng.integers(5))]
    frames, rows, columns = (
        int(rng.choice(each)) for each in ([1, 1, 3], range(1, 9), range(1, 9))
    )
    kinds = ["MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "RGB", "YBR_FULL", "floats", "bits"]
    kind = str(rng.choice(kinds[:6] if syntax == uid.RLELossless else kinds))
    samples = 3 if kind in ("RGB", "YBR_FULL") else 1
    is_wide = kind[0] == "M" and syntax != uid.RLELossless
    bits = 8 if samples == 3 else int(rng.choice([8, 16, 32] if is_wide else [8, 16]))
    stored = bits if samples == 3 else int(rng.integers(max(1, bits // 2), bits + 1))
    signed = bool(rng.integers(2)) and kind[0] == "M"
    ds = pydicom.Dataset()
    ds.file_meta = pydicom.dataset.FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    ds.SOPClassUID, ds.SOPInstanceUID = uid.SecondaryCaptureImageStorage, uid.generate_uid()
    ds.Rows, ds.Columns, ds.SamplesPerPixel = rows, columns, samples
    ds.PhotometricInterpretation = kind if kind in kinds[:5] else "MONOCHROME2"
    if frames > 1 or rng.random() < 0.2:
        ds.NumberOfFrames = frames
    if samples > 1:
        ds.PlanarConfiguration = int(rng.integers(2))
    shape = (frames, rows, columns) if samples == 1 else (frames, rows, columns, samples)
    if kind == "floats":
        ds.BitsAllocated = int(rng.choice([32, 64]))
        values: Any = rng.random(shape).astype("<f4" if ds.BitsAllocated == 32 else "<f8")
        name = "FloatPixelData" if ds.BitsAllocated == 32 else "DoubleFloatPixelData"
        setattr(ds, name, values.tobytes())
    else:
        bits, stored = (1, 1) if kind == "bits" else (bits, stored)
        ds.BitsAllocated, ds.BitsStored, ds.HighBit = bits, stored, stored - 1
        ds.PixelRepresentation = int(signed)
        low, high = (-(1 << stored - 1), 1 << stored - 1) if signed else (0, 1 << stored)
        if kind == "PALETTE COLOR":
            high = min(high, 1 << 8)
            for colour in ("Red", "Green", "Blue"):
                setattr(ds, f"{colour}PaletteColorLookupTableDescriptor", [high, 0, 16])
                table = rng.integers(0, 1 << 16, high).astype("<u2").tobytes()
                setattr(ds, f"{colour}PaletteColorLookupTableData", table)
        values = rng.integers(low, high, shape)
        if samples == 3 and ds.PlanarConfiguration:
            values = np.moveaxis(values, 3, 1)
        if bits == 1:
            ds.PixelData = pydicom.pixels.pack_bits(values.astype(np.uint8).ravel(), pad=True)
        else:
            body = values.astype(f"<{'i' if signed else 'u'}{bits // 8}").tobytes()
            ds.PixelData = body + b"\0" * (len(body) % 2)
            ds["PixelData"].VR = "OB" if bits == 8 else "OW"
    scales, each = np.ones(frames), np.zeros(frames)
    rescaled = str(rng.choice(["", "all", "empty", "frames", "table", "shared"]))
    if kind == "floats" or (rescaled == "table" and (kind != "MONOCHROME2" or signed)):
        rescaled = ""
    if rescaled in ("all", "shared", "frames"):
        count = frames if rescaled == "frames" else 1
        scales = np.resize(rng.choice([0.5, 2.0, 1.0], count), frames)
        each = np.resize(rng.choice([-1024.0, 0.0, 3.5], count), frames)
    if rescaled == "all":
        ds.RescaleSlope, ds.RescaleIntercept = scales[0], each[0]
    elif rescaled == "empty":
        ds.RescaleSlope = ds.RescaleIntercept = None
    elif rescaled in ("shared", "frames"):
        groups = []
        for k in range(frames if rescaled == "frames" else 1):
            item, group = pydicom.Dataset(), pydicom.Dataset()
            item.RescaleSlope, item.RescaleIntercept = scales[k], each[k]
            group.PixelValueTransformationSequence = [item]
            groups.append(group)
        name = "PerFrame" if rescaled == "frames" else "Shared"
        setattr(ds, f"{name}FunctionalGroupsSequence", groups)
    elif rescaled == "table":
        depth = int(rng.choice([8, 16]))
        item = pydicom.Dataset()
        item.LUTDescriptor = [min(1 << stored, 200), 0, depth]
        item.LUTData = rng.integers(0, 1 << depth, min(1 << stored, 200)).astype("<u2").tolist()
        item.ModalityLUTType = "US"
        item["LUTDescriptor"].VR = item["LUTData"].VR = "US"
        ds.ModalityLUTSequence = [item]
    path = folder / str(rng.choice(["a.dcm", "a.dicom", "IM0001"]))
    if syntax == uid.RLELossless and kind != "floats":
        ds.compress(uid.RLELossless, generate_instance_uid=False)
    else:
        ds.file_meta.TransferSyntaxUID = syntax if kind != "floats" else uid.ExplicitVRLittleEndian
        if syntax == uid.ExplicitVRBigEndian and kind not in ("floats", "bits") and bits > 8:
            ds.PixelData = np.frombuffer(ds.PixelData, f"<u{bits // 8}").byteswap().tobytes()
    ds.save_as(path, enforce_file_format=True)
    back = pydicom.dcmread(path)
    try:
        pixels = back.pixel_array
    except RuntimeError:
        return str(folder), {}, True
    if rescaled == "table":
        pixels = pydicom.pixels.apply_modality_lut(pixels, back)
    elif (scales != 1).any() or each.any():
        sides = (-1,) + (1,) * (pixels.ndim - 1)
        pixels = pixels * (scales.reshape(sides) if frames > 1 else scales[0])
        pixels = (pixels + (each.reshape(sides) if frames > 1 else each[0])).astype(np.float32)
    return str(folder), {"image": [pixels]}, False


# Tars


_PARTS: dict[str, Callable[[np.random.Generator, int], bytes]] = {
    "jpg": lambda rng, k: rng.bytes(k % 5),
    "PNG": lambda rng, k: rng.bytes(3),
    "cls": lambda rng, k: b"%d" % (k % 3),
    "txt": lambda rng, k: b"t" * (k % 4),
    "left.jpg": lambda rng, k: rng.bytes(700),
    "v2.json": lambda rng, k: b"[%d]" % k,
    "npy": lambda rng, k: _npy(_numbers(rng, "int64", (2, 3))),
    "": lambda rng, k: rng.bytes(2),
}


def _npy(array: Any) -> bytes:
    memory = io.BytesIO()
    np.save(memory, array)
    return memory.getvalue()


def tar(rng: np.random.Generator, folder: Path) -> Drawn:
    wds = pytest.importorskip("webdataset")
    forms = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]
    suffix = str(rng.choice(["", "", ".gz", ".bz2", ".xz", ".lz4"]))
    prefix = str(rng.choice(["", "./", "d.x/", "wörd and/", "deep/" * 30, "a/../b/", "__in/"]))
    names = rng.choice(sorted(_PARTS), rng.integers(1, 4), replace=False).tolist()
    plain, flat = folder / "plain.tar", folder / "flat.tar"
    gaps = {"cls": rng.random() < 0.1, "lost": rng.random() < 0.2, "twice": rng.random() < 0.1}
    odd = bool(gaps["cls"] and "cls" in names)
    rows: list[list[tuple[str, bytes]]] = []
    for k in range(_count(rng) + 1):
        stem = f"{prefix}{k // 2 if rng.random() < 0.02 else k:03d}"
        own = names if not gaps["lost"] or rng.random() < 0.9 else names[: len(names) - 1]
        rows.append([(f"{stem}.{name}", _PARTS[name](rng, k)) for name in own])
    if gaps["cls"]:
        rows[-1] = [(n, b" " if n.endswith(".cls") else body) for n, body in rows[-1]]
    if gaps["twice"]:
        stem, _, last = rows[-1][-1][0].rpartition("/") if rows[-1] else ("", "", "")
        rows[-1] += [(f"{stem}/{last.swapcase()}".lstrip("/"), b"1")] if last else []
    strays = ["README", "__meta__", "__meta__/0.jpg", "._0.jpg", ".hidden", "__0.txt"]
    strays = [stray for stray in strays[:5] if rng.random() < 0.3]
    with (
        tarfile.open(plain, "w", format=forms[int(rng.integers(2))]) as archive,
        tarfile.open(flat, "w") as resolved,
    ):
        known: dict[bytes, str] = {}
        for number, (name, body) in enumerate([each for row in rows for each in row]):
            info = tarfile.TarInfo(name)
            if strays and number % 3 == 0:
                archive.addfile(tarfile.TarInfo(strays.pop()))
            if number % 5 == 0:
                inner = tarfile.TarInfo(f"{prefix}inner.d")
                inner.type = tarfile.DIRTYPE
                archive.addfile(inner)
            known = {own: named for own, named in known.items() if named != name}
            earlier = known.get(body)
            kind = [None, tarfile.LNKTYPE, tarfile.SYMTYPE][int(rng.integers(3))]
            if earlier is not None and kind is not None:
                info.type, info.linkname = kind, earlier
                if kind == tarfile.SYMTYPE:
                    info.linkname = posixpath.relpath(earlier, posixpath.dirname(name) or ".")
                archive.addfile(info)
            else:
                known[body] = name
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
            info = tarfile.TarInfo(name)
            info.size = len(body)
            resolved.addfile(info, io.BytesIO(body))
        if rng.random() < 0.1:
            gone = tarfile.TarInfo(f"{prefix}999.{names[0]}")
            gone.type, gone.linkname = tarfile.SYMTYPE, "none.jpg"
            archive.addfile(gone)
            odd = True
    data = plain.read_bytes()
    packers: dict[str, Any] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    packers["lz4"] = lambda data: lz4.frame.compress(data, block_linked=False)
    path = folder / f"a.tar{suffix}"
    path.write_bytes(packers[suffix[1:]](data) if suffix else data)
    read: list[dict[str, Any]] = []
    try:
        with open(flat, "rb") as stream:  # WebDataset would leave it open.
            opened = [{"url": str(flat), "stream": stream}]
            read = list(wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(opened)))
    except ValueError:
        odd = True  # Of two members of one name.
    columns, is_whole = _fields_of(read)
    values = {"__key__": [row["__key__"] for row in read]}
    for name, own in columns.items():
        is_label = name == "cls" and not gaps["cls"]
        values[name] = [int(body) for body in own] if is_label else own
        if name == "npy":
            values[name] = [np.load(io.BytesIO(body)) for body in own]
    return str(path), values, odd or not is_whole


def _fields_of(read: list[dict[str, Any]]) -> tuple[dict[str, list[bytes]], bool]:
    """Return the members of samples by the fields of the first one, and False if one lacks some or
    more than half have others. A picture may be of another format."""
    fields = [name for name in read[0] if name[:2] != "__"] if read else []
    columns: dict[str, list[bytes]] = {name: [] for name in fields}
    others: Counter[str] = Counter()
    for row in read:
        left = {name for name in row if name[:2] != "__"} - set(fields)
        for name in fields:
            member = name if name in row else None
            if member is None and name in ("jpg", "png"):
                member = next((each for each in sorted(left) if each in ("jpg", "png")), None)
            if member is None:
                return {}, False
            left.discard(member)
            columns[name].append(row[member])
        others.update(left)
    return columns, all(2 * count <= len(read) for count in others.values())


FORMATS: tuple[Draw, ...] = (
    *(parquet, arrow, polars, numpy, idx, hdf5, zarr_store, mds, nifti, dicom),
    tar,
)


def _cases() -> Iterator[Any]:
    for draw in FORMATS:
        for seed in range(NIGHTLY):
            marks = [] if seed < DAILY else [pytest.mark.nightly]
            yield pytest.param(draw, seed, id=f"{draw.__name__}-{seed}", marks=marks)


def _parquet_refuses(path: str) -> None:
    pq.read_table(path).validate(full=True)


def _arrow_refuses(path: str) -> None:
    with pa.OSFile(path) as file:
        magic = file.read(6)
    with pa.OSFile(path) as file:
        read: Any = pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream
        read(file).read_all().validate(full=True)


def _numpy_refuses(path: str) -> None:
    with open(path, "rb") as file:  # NumPy leaves a file open that it refuses.
        read = np.load(file)
        if path.endswith(".npz"):
            [read[name] for name in read.files]


def _hdf5_refuses(path: str) -> None:
    with h5py.File(path) as file:
        file.visititems(lambda _, item: isinstance(item, h5py.Dataset) and bool(item[...] is None))


REFUSALS = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile)
JUDGES: dict[Draw, Callable[[str], None]] = {
    parquet: _parquet_refuses,
    arrow: _arrow_refuses,
    numpy: _numpy_refuses,
    hdf5: _hdf5_refuses,
    idx: _idx_array,
}
"""Functions that raise one of `REFUSALS` if a format's library does not read all of a file."""


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9, 0.99, "head", "tail"])
@pytest.mark.parametrize("draw", list(JUDGES), ids=lambda draw: draw.__name__)
def test_damage_is_called_so_only_where_the_library_refuses(
    draw: Draw, part: float | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TRUST", "1")
    for seed in range(DAILY):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = draw(np.random.default_rng(seed), folder)[0].split("::")[0]
        if os.path.isdir(path):
            path = min(map(str, Path(path).iterdir()))
        data = bytearray(Path(path).read_bytes())
        if part == "head":
            data[:4] = b"\0" * 4
        elif part == "tail":
            data[-4:] = b"\0" * 4
        else:
            assert isinstance(part, float)
            del data[int(part * len(data)) :]
        Path(path).write_bytes(data)
        try:
            _read(path)
        except DlioError as error:
            if any(word in str(error) for word in ("damaged", "restore it", "corrupt")):
                with pytest.raises(REFUSALS):
                    JUDGES[draw](path)


@pytest.mark.parametrize(("draw", "seed"), list(_cases()))
def test_a_file_is_read_as_by_its_own_library(
    draw: Draw, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, theirs, odd = draw(np.random.default_rng(seed), tmp_path)
        try:
            ours = _read(path)
        except DlioError as error:
            text = str(error)
            assert odd, text
            assert len(text.splitlines()) == 1
            assert not any(word in text for word in ("damaged", "restore it", "corrupt")), text
            return
    assert not odd
    if keys := theirs.pop("__key__", None):
        reader = open_reader(path)
        assert [reader.name(k) for k in range(len(reader))] == keys
        reader.close()
    assert sorted(ours) == sorted(theirs)
    for name, values in theirs.items():
        assert len(ours[name]) == len(values)
        for mine, value in zip(ours[name], values, strict=True):
            assert _same(mine, value), (name, mine, value)

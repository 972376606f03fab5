"""Files drawn over the features of their formats hold what the format's own library reads.

A file with a feature that samples cannot have is refused in one line, which calls no sound file
damaged.
"""

import io
import json
import math
import shutil
import string
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
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
    kinds = ("number", "number", "text", "bytes", "list", "nested", "words", "other")
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
        pa.array([1] * count, pa.timestamp("us")),
        pa.array([1] * count, pa.decimal128(5, 2)),
        pa.array([{"a": 1}] * count),
        pa.nulls(count),
    ]
    return others[int(rng.integers(len(others)))], True


def _arrow_table(rng: np.random.Generator) -> tuple[pa.Table, bool]:
    count = _count(rng)
    drawn = [_arrow_column(rng, count) for _ in range(rng.integers(1, 4))]
    table = pa.table({f"c{k}": column for k, (column, _) in enumerate(drawn)})
    return table, any(odd for _, odd in drawn)


def _filled(table: pa.Table) -> Values:
    """Return the values with NaN for numbers that are missing, and empty texts."""
    filled: Values = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        numbers = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        empty: Any = math.nan if numbers or pa.types.is_boolean(column.type) else ""
        filled[name] = [empty if value is None else value for value in column.to_pylist()]
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
        "m": [None if rng.random() < 0.3 else 1.5 for _ in range(count)],
    }
    names = rng.choice(sorted(columns), rng.integers(1, 6), replace=False).tolist()
    frame = pl.DataFrame({name: columns[name] for name in names})
    if "m" in names:
        frame = frame.with_columns(pl.col("m").cast(pl.Float64))
    if "l" in names:
        frame = frame.with_columns(pl.col("l").cast(pl.List(pl.Int64)))
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


FORMATS: tuple[Draw, ...] = (parquet, arrow, polars, numpy, hdf5, zarr_store, mds, nifti)


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
    assert sorted(ours) == sorted(theirs)
    for name, values in theirs.items():
        assert len(ours[name]) == len(values)
        for mine, value in zip(ours[name], values, strict=True):
            assert _same(mine, value), (name, mine, value)

"""Sound files as libraries write them, drawn by hypothesis over their features, hold the values
that the library reads, or are refused in one true line that does not call them damaged."""

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import shutil
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlio.errors import DlioError
from tests.readers.field_values import values_of

Columns = dict[str, list[Any]]
WORDS = ("damaged", "restore it", "corrupt", "cut off", "repair")
QUIET = settings(
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # Shrinking writes hundreds of files.
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, str | bytes):
        return bytes(ours) == (theirs.encode() if isinstance(theirs, str) else theirs)
    if isinstance(theirs, list) and any(isinstance(each, str) for each in theirs):
        return bool(json.loads(bytes(ours)) == [each or "" for each in theirs])
    left, right = np.asarray(ours), np.asarray(theirs)
    if left.size == right.size == 0:
        return True
    return left.shape == right.shape and bool(np.array_equal(left, right, equal_nan=True))


def check(path: str, theirs: Columns, may_refuse: bool) -> None:
    """Compare a file with its library's values; with `may_refuse`, it may be refused instead."""
    try:
        ours = values_of(path)
    except DlioError as error:
        text = str(error)
        assert may_refuse, text
        assert len(text.splitlines()) == 1, text
        assert not any(word in text for word in WORDS), text
        return
    assert set(ours) <= set(theirs)
    assert may_refuse or set(ours) == set(theirs)
    for name, values in ours.items():
        assert len(values) == len(theirs[name]), name
        for mine, value in zip(values, theirs[name], strict=True):
            assert _same(mine, value), (name, mine, value)


# Arrow and Parquet

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_WHOLE = {
    "int8": pa.int8(),
    "uint8": pa.uint8(),
    "int16": pa.int16(),
    "uint16": pa.uint16(),
    "int32": pa.int32(),
    "uint32": pa.uint32(),
    "int64": pa.int64(),
}
_TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view()]
_BYTE_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)]


def _numbers(kind: str) -> st.SearchStrategy[Any]:
    if kind in _WHOLE:
        limits = np.iinfo(kind)
        return st.integers(int(limits.min), int(limits.max))
    return st.floats(width=32)


@st.composite
def arrow_columns(draw: st.DrawFn, count: int) -> tuple[pa.Array, bool]:
    """A column, and True if samples cannot have it."""

    def values(each: st.SearchStrategy[Any], gaps: bool = True) -> list[Any]:
        own = st.one_of(st.none(), each) if gaps and draw(st.booleans()) else each
        return draw(st.lists(own, min_size=count, max_size=count))

    way = draw(st.sampled_from(["number", "bool", "text", "bytes", "words", "list", "deep", "odd"]))
    kind = draw(st.sampled_from([*_WHOLE, "float32", "float64"]))
    type_of = _WHOLE.get(kind, getattr(pa, kind)())
    if way == "number":
        # NaN stands for a missing number: whole ones beyond 53 bits would lose some.
        own = _numbers(kind) if kind != "int64" else st.integers(-(1 << 53), 1 << 53)
        return pa.array(values(own), type_of), False
    if way == "bool":
        return pa.array(values(st.booleans()), pa.bool_()), False
    if way == "text":
        return pa.array(values(_TEXTS), draw(st.sampled_from(_TEXT_TYPES))), False
    if way == "bytes":
        size = st.binary(min_size=3, max_size=3)
        return pa.array(values(size, gaps=False), draw(st.sampled_from(_BYTE_TYPES))), False
    if way == "words":
        index = draw(st.sampled_from([pa.int8(), pa.uint16(), pa.int32(), pa.int64()]))
        words = st.sampled_from(["a", "", "lörem", "b"])
        inner = draw(st.sampled_from([pa.string(), pa.large_string()]))
        plain = pa.array(values(words), inner).dictionary_encode()
        if draw(st.booleans()):
            return plain.cast(pa.dictionary(index, inner)), False
        return pa.array(
            values(_numbers("int32"), gaps=False), pa.int32()
        ).dictionary_encode(), False
    if way == "list":
        width = draw(st.integers(1, 3))
        fixed = st.lists(_numbers(kind), min_size=width, max_size=width)
        types = [pa.list_(type_of), pa.large_list(type_of), pa.list_(type_of, width)]
        chosen = draw(st.sampled_from(types))
        loose = st.lists(_numbers(kind), max_size=3)
        return pa.array(values(fixed if chosen == types[2] else loose, gaps=False), chosen), False
    if way == "deep":
        row = st.lists(_numbers("int16"), min_size=2, max_size=2)
        deep = st.lists(row, min_size=1, max_size=3)
        return pa.array(values(deep, gaps=False), pa.list_(pa.list_(pa.int16()))), False
    others = [
        lambda: pa.array(values(st.integers(0, 9)), pa.timestamp("ms")),
        lambda: pa.array(values(st.integers(0, 9)), pa.date32()),
        lambda: pa.array([{"a": k, "b": "x"} for k in range(count)]),
        lambda: pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int64())),
        lambda: pa.array([[k] if k % 2 else None for k in range(count)], pa.list_(pa.int8())),
        lambda: pa.array([[[k], None] for k in range(count)], pa.list_(pa.list_(pa.int8()))),
        lambda: pa.array(values(st.integers(0, 9)), pa.decimal128(9, 2)),
        lambda: pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int16(), (2, 2)),
            pa.array([[k, 1, 2, 3] for k in range(count)], pa.list_(pa.int16(), 4)),
        ),
        lambda: pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), pa.array([7])),
        lambda: pa.array([{"bytes": b"a", "path": "b"}] * count),
        lambda: pa.array(values(st.binary(max_size=3)), pa.binary()),
        lambda: pa.array([[None, 1]] * count, pa.list_(pa.int8())),
        lambda: pa.array([["a", "b"]] * count),
        lambda: pa.array(values(st.integers(0, (1 << 64) - 1)), pa.uint64()),
        lambda: pa.nulls(count),
        lambda: pa.array([None] * count, pa.string()),
        lambda: pa.array([None] * count, pa.binary()),
    ]
    return draw(st.sampled_from(others))(), True


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, bool]:
    """A table of one or several parts, and True if samples cannot have all of it."""
    count = draw(st.integers(1, 9))
    drawn = [draw(arrow_columns(count)) for _ in range(draw(st.integers(1, 4)))]
    table = pa.table({f"c{k}": column for k, (column, _) in enumerate(drawn)})
    cut = draw(st.integers(0, count - 1))
    if cut:
        table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    return table, any(odd for _, odd in drawn)


def _of_table(table: pa.Table) -> Columns:
    """Return the values, NaN for missing numbers, and empty texts."""
    columns: Columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        is_text = kind in _TEXT_TYPES or kind in _BYTE_TYPES
        empty: Any = "" if is_text else math.nan
        if isinstance(column.type, pa.FixedShapeTensorType):
            tensors = [part.to_numpy_ndarray() for part in column.chunks if len(part)]
            columns[name] = list(np.concatenate(tensors))
            continue
        columns[name] = [_filled(value, empty) for value in column.to_pylist()]
    return columns


def _filled(value: Any, empty: Any) -> Any:
    if isinstance(value, list):
        return [_filled(each, empty) for each in value]
    if isinstance(value, dict) and "bytes" in value:  # As Hugging Face stores pictures.
        return value["bytes"]
    return empty if value is None else float(value) if isinstance(value, Decimal) else value


@QUIET
@given(drawn=tables(), data=st.data())
def test_arrow_files_are_read_or_refused(
    drawn: tuple[pa.Table, bool], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table, odd = drawn
    path = str(
        tmp_path_factory.mktemp("arrow") / data.draw(st.sampled_from(["a.arrow", "a.feather"]))
    )
    way = data.draw(st.sampled_from(["file", "stream", "feather"]))
    packed = data.draw(st.sampled_from([None, "lz4", "zstd"]))
    if way == "feather":
        feather.write_feather(table, path, compression=packed or "uncompressed")
        back = feather.read_table(path)
    else:
        options = pa.ipc.IpcWriteOptions(
            compression=packed, emit_dictionary_deltas=data.draw(st.booleans()) and way == "stream"
        )
        if way == "file":  # Which has one dictionary a column.
            table = table.unify_dictionaries()
        make: Any = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
        with make(path, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=data.draw(st.integers(1, 9)))
        read: Any = pa.ipc.open_stream if way == "stream" else pa.ipc.open_file
        with pa.OSFile(path) as file:
            back = read(file).read_all()
    check(path, _of_table(back), odd)


@QUIET
@given(drawn=tables(), data=st.data())
def test_parquet_files_are_read_or_refused(
    drawn: tuple[pa.Table, bool], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table, odd = drawn
    folder = tmp_path_factory.mktemp("parquet")
    named = data.draw(st.booleans())
    encodings = {"use_dictionary": data.draw(st.booleans())}
    if named:
        encodings = {"use_dictionary": False}
    more: dict[str, Any] = {}
    whole = [f.name for f in table.schema if pa.types.is_integer(f.type) and f.type.bit_width > 16]
    if named and whole:
        more["column_encoding"] = dict.fromkeys(whole, "DELTA_BINARY_PACKED")
    try:
        pq.write_table(
            table,
            folder / "a.parquet",
            row_group_size=data.draw(st.integers(1, 9)),
            compression=data.draw(
                st.sampled_from(["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
            ),
            version=data.draw(st.sampled_from(["1.0", "2.4", "2.6"])),
            data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
            data_page_size=data.draw(st.sampled_from([16, None])),
            write_statistics=data.draw(st.booleans()),
            write_page_index=data.draw(st.booleans()),
            write_page_checksum=data.draw(st.booleans()),
            store_schema=data.draw(st.booleans()),
            use_compliant_nested_type=data.draw(st.booleans()),
            **encodings,
            **more,
        )
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return  # Arrow does not write it.
    path = str(folder / "a.parquet")
    check(path, _of_table(pq.read_table(path)), odd)


# NumPy, HDF5, Zarr

_TYPES = st.sampled_from(["<i2", ">i4", "<f8", ">f4", "|u1", "|b1", "<f2", "<c8", "<u8", "|i1"])


def _array(draw: Any, count: int, dtype: str) -> Any:
    sides = draw(st.lists(st.integers(1, 3), max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    values = rng.integers(0, 100, (count, *sides)).astype(dtype)
    if draw(st.booleans()):
        values[:] = values.flat[0]  # Which compresses a thousandfold.
    return np.asfortranarray(values) if draw(st.booleans()) else values


@st.composite
def npz_files(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Arrays of samples, other members, and True to compress them."""
    count = draw(st.sampled_from([1, 5, 1000]))
    names = draw(st.lists(st.sampled_from(["x", "y", "a b", "x_1"]), min_size=1, unique=True))
    arrays = {name: _array(draw, count, draw(_TYPES)) for name in names}
    others = {
        "text": np.array("a text"),
        "texts": np.array(["a", "bc"]),
        "when": np.arange(3).astype("M8[s]"),
        "pairs": np.zeros(2, [("a", "<f4"), ("b", "<i2")]),
        "any": np.array([{"a": 1}], object),
        "one": np.float64(3.5),
        "none": np.zeros((0, 3)),
        "long": np.zeros(2, np.longdouble),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(others)), unique=True, max_size=3))
    return arrays, {name: others[name] for name in chosen}, draw(st.booleans())


@QUIET
@given(drawn=npz_files())
def test_npz_files_are_read_with_any_other_members(
    drawn: tuple[dict[str, Any], dict[str, Any], bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    arrays, others, packed = drawn
    path = str(tmp_path_factory.mktemp("npz") / "a.npz")
    save: Any = np.savez_compressed if packed else np.savez
    save(path, **arrays, **others)
    with np.load(path) as back:
        theirs = {name: list(back[name]) for name in arrays}
    check(f"{path}::{','.join(arrays)}", theirs, may_refuse=False)
    check(path, theirs, may_refuse=bool(others))


@st.composite
def _hdf5(draw: st.DrawFn, path: Path) -> bool:
    """Write a file; return True if it has values that samples cannot have."""
    count, odd = draw(st.integers(1, 6)), False
    libver: Any = draw(st.sampled_from(["earliest", "latest", ("earliest", "v110")]))
    block, order = draw(st.sampled_from([0, 512, 1024])), draw(st.booleans())
    with h5py.File(path, "w", libver=libver, userblock_size=block, track_order=order) as file:
        for k in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from([f"x{k}", f"group/x{k}", f"a b/c/x{k}"]))
            way = draw(
                st.sampled_from(
                    ["plain", "filters", "texts", "fixed", "vlen", "enum", "part", "odd"]
                )
            )
            data = _array(draw, count, draw(_TYPES))
            if way == "plain":
                file[name] = data
            elif way == "filters":
                file.create_dataset(
                    name,
                    data=data,
                    chunks=tuple(draw(st.integers(1, side)) for side in data.shape),
                    compression=draw(st.sampled_from([None, "gzip", "lzf"])),
                    shuffle=draw(st.booleans()),
                    fletcher32=draw(st.booleans()),
                    maxshape=(None, *data.shape[1:]),
                )
            elif way == "texts":
                words = draw(st.lists(_WORDS, min_size=count, max_size=count))
                kind = draw(st.sampled_from(["utf-8", "ascii"]))
                words = [
                    w if kind == "utf-8" else w.encode("ascii", "replace").decode() for w in words
                ]
                file.create_dataset(name, data=words, dtype=h5py.string_dtype(kind))
            elif way == "fixed":
                file[name] = np.array([b"ab"] * count, f"S{draw(st.integers(2, 9))}")
            elif way == "vlen":
                inner = draw(st.sampled_from(["<i4", "<f8", "|u1", "<i2"]))
                made = file.create_dataset(name, (count,), h5py.vlen_dtype(np.dtype(inner)))
                for row in range(count):
                    made[row] = np.arange(draw(st.integers(0, 3))).astype(inner)
            elif way == "enum":
                kind = h5py.enum_dtype({"no": 0, "yes": 1}, basetype="i1")
                file[name] = (np.arange(count) % 2).astype(kind)
            elif way == "part":
                one = data.dtype.type(1)
                made = file.create_dataset(name, data.shape, data.dtype, chunks=True, fillvalue=one)
                made[: count // 2] = data[: count // 2]
            else:
                odd = True
                others: list[Any] = [
                    np.zeros(count, [("a", "<f4"), ("b", "<i2")]),
                    np.array([[b"a", b"b"]] * count),
                    np.zeros(count, "V5"),
                    np.zeros(count + 1),
                    h5py.Empty("f4"),
                    3.5,
                    "a text",
                ]
                file[name] = others[draw(st.integers(0, len(others) - 1))]
    return odd


_WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@QUIET
@given(data=st.data())
def test_hdf5_files_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("hdf5") / data.draw(st.sampled_from(["a.h5", "a.mat", "a.nc"]))
    odd = data.draw(_hdf5(path))
    theirs: Columns = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            is_text = h5py.check_string_dtype(item.dtype) is not None
            theirs[name] = [x.decode() if is_text and item.ndim == 1 else x for x in item[...]]

    with h5py.File(path) as file:
        file.visititems(take)
    check(str(path), theirs, odd)


@QUIET
@given(data=st.data())
def test_zarr_stores_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("zarr") / "a.zarr"
    form: Any = data.draw(st.sampled_from([2, 3]))
    count, odd = data.draw(st.integers(1, 6)), False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of texts, which version 3 has not specified yet.
        group: Any = zarr.open_group(str(path), mode="w", zarr_format=form)
        for k in range(data.draw(st.integers(1, 3))):
            way = data.draw(st.sampled_from(["plain", "plain", "texts", "fixed", "part", "odd"]))
            values = _array(data.draw, count, data.draw(_TYPES))
            chunks = tuple(data.draw(st.integers(1, side)) for side in values.shape)
            more: dict[str, Any] = {"chunks": chunks}
            if data.draw(st.booleans()):
                more["compressors"] = None
            if form == 3 and data.draw(st.booleans()):
                more["shards"] = tuple(2 * side for side in chunks)
            if form == 2:
                more["order"] = data.draw(st.sampled_from(["C", "F"]))
            if way == "plain":
                group.create_array(f"x{k}", data=values, **more)
            elif way == "texts":
                made = group.create_array(f"x{k}", shape=(count,), dtype=str, chunks=chunks[:1])
                made[:] = np.array(
                    data.draw(st.lists(_WORDS, min_size=count, max_size=count)), object
                )
            elif way == "fixed":
                group.create_array(f"x{k}", data=np.array(["ab"] * count, "<U4"), chunks=chunks[:1])
            elif way == "part":
                made = group.create_array(
                    f"x{k}", shape=values.shape, dtype=values.dtype, fill_value=1, **more
                )
                made[: count // 2] = values[: count // 2]
            else:
                odd = True
                others = [np.arange(count).astype("M8[s]"), np.zeros(count + 1), np.array(3.5)]
                group.create_array(f"x{k}", data=others[data.draw(st.integers(0, 2))])
        if data.draw(st.booleans()):
            zarr.consolidate_metadata(str(path))
        read: Any = zarr.open_group(str(path), mode="r")
        theirs = {name: list(array[...]) for name, array in read.arrays() if array.shape}
        where = str(path)
        if data.draw(st.booleans()):
            where = shutil.make_archive(where, "zip", path)
        check(where, theirs, odd)


# Tables of text

_PACKERS: dict[str, Any] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@QUIET
@given(data=st.data())
def test_tables_of_pandas_are_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pd: Any = pytest.importorskip("pandas")
    count = data.draw(st.integers(1, 6))
    words = st.text("ab ,;\"'\n\tüé語", min_size=1, max_size=6).map(lambda text: f"w{text}w")
    makers = {
        "n": st.integers(-(1 << 62), 1 << 62),
        "f": st.one_of(st.none(), st.floats(allow_infinity=False, width=32)),
        "t": st.one_of(st.none(), words),
        "m": st.one_of(st.none(), st.integers(-1000, 1000)),
        "g": st.floats(),
    }
    names = data.draw(st.lists(st.sampled_from(sorted(makers)), min_size=2, unique=True))
    rows = {
        name: data.draw(st.lists(makers[name], min_size=count, max_size=count)) for name in names
    }
    frame = pd.DataFrame({n: pd.array(rows[n], "Int64") if n == "m" else rows[n] for n in names})
    end = data.draw(st.sampled_from(sorted(_PACKERS)))
    sep = data.draw(st.sampled_from([",", ";", "\t", "|"]))
    memory = io.StringIO()
    frame.to_csv(
        memory,
        index=False,
        sep=sep,
        quoting=data.draw(
            st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
        ),
        lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])),
    )
    path = tmp_path_factory.mktemp("csv") / f"a.csv{end}"
    path.write_bytes(_PACKERS[end](memory.getvalue().encode()))
    back = pd.read_csv(
        io.StringIO(memory.getvalue()), sep=sep, keep_default_na=False, na_values=[""]
    )
    theirs: Columns = {}
    for name in names:
        is_text = any(isinstance(value, str) for value in back[name])
        empty: Any = "" if is_text else math.nan
        theirs[name] = [empty if pd.isna(value) else value for value in back[name]]
    check(str(path), theirs, may_refuse=False)

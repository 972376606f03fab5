"""Sound data are read as the library of their format reads them, and never called damaged.

Inputs are small, and limits are lowered in place of large files.
"""

import contextlib
import gzip
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import File, ReadErrors, Source
from dlio.errors import SourceError, UsageError
from dlio.util import limits
from dlio.util.limits import parsing
from dlio_readers import parquet, rowgroups


def _values(path: object, name: str) -> list[Any]:
    with contextlib.closing(open_reader(path)) as reader:
        payloads = reader.read(np.arange(len(reader)))
        rows = [reader.schema.split(payload)[name] for payload in payloads]
    return [
        row.tolist()
        if isinstance(row, np.ndarray)
        else bytes(row).decode("latin-1")
        if isinstance(row, memoryview)
        else row
        for row in rows
    ]


# MDS


def _mds_part(folder: Path, numbers: range) -> dict[str, Any]:
    folder.mkdir()
    bodies = [np.int64(number).tobytes() for number in numbers]
    ends = 4 * (len(bodies) + 2) + np.cumsum([0, *map(len, bodies)])
    raw = np.uint32(len(bodies)).tobytes() + ends.astype("<u4").tobytes() + b"".join(bodies)
    (folder / "shard.00000.mds").write_bytes(raw)
    return {
        "column_names": ["y"],
        "column_encodings": ["int"],
        "column_sizes": [8],
        "compression": None,
        "format": "mds",
        "raw_data": {"basename": f"{folder.name}/shard.00000.mds", "bytes": len(raw)},
        "samples": len(bodies),
        "zip_data": None,
    }


def test_a_merged_index_of_mds_names_files_in_folders(tmp_path: Path) -> None:
    shards = [_mds_part(tmp_path / f"part.{k}", range(10 * k, 10 * k + 3)) for k in range(2)]
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"version": 2, "shards": shards}))
    assert _values(str(tmp_path), "y") == [0, 1, 2, 10, 11, 12]
    for name in ("../x.mds", "/x.mds", "part.0/../../x.mds", "part.0//x.mds"):
        shards[1]["raw_data"]["basename"] = name
        index.write_text(json.dumps({"version": 2, "shards": shards}))
        with pytest.raises(SourceError, match=r"x\.mds, which is not inside its folder: refused"):
            open_reader(str(tmp_path))
    shards[1]["raw_data"]["basename"] = "part.1/shard.00000.mds"
    index.write_text(json.dumps({"version": 2, "shards": shards}))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (tmp_path / "part.1").rename(outside)
    (tmp_path / "part.1").symlink_to(outside)
    with pytest.raises(SourceError, match="is a link to"):
        open_reader(str(tmp_path))
    assert len(open_reader(str(tmp_path), follow_links=True)) == 6


# Arrow and Parquet


def test_nulls_of_pandas_are_nan_in_all_tables(tmp_path: Path) -> None:
    pd: Any = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "x": [1.5, np.nan, 3.0],
            "n": pd.array([1, None, 3], "Int64"),
            "b": pd.array([True, None, False], "boolean"),
            "t": ["a", None, "c"],
            "label": [0, 1, 0],
        }
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_feather(tmp_path / "a.feather")
    for name in ("a.csv", "a.parquet", "a.feather"):
        path = str(tmp_path / name)
        assert str(_values(path, "x")) == "[1.5, nan, 3.0]"
        assert str(_values(path, "n")) == "[1.0, nan, 3.0]"
        assert _values(path, "t") == ["a", "", "c"]
    assert str(_values(str(tmp_path / "a.parquet"), "b")) == "[1.0, nan, 0.0]"
    frame["label"] = pd.array([0, None, 1], "Int64")
    frame.to_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        SourceError, match=r"'label': 1 row, the first of them row 1.*without label"
    ):
        open_reader(str(tmp_path / "b.parquet"))


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.binary_view()], ids=str)
def test_texts_of_all_widths_are_read(kind: pa.DataType, tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", "bc"], kind), "label": [0, 1]})
    feather.write_feather(table, tmp_path / "a.arrow", compression="uncompressed")
    assert _values(str(tmp_path / "a.arrow"), "text") == ["a", "bc"]


@pytest.mark.parametrize("format_version", ["V4", "V5"])
def test_an_arrow_file_goes_by_its_footer(format_version: str, tmp_path: Path) -> None:
    table = pa.table({"x": [1.5, 2.5], "label": [0, 1]})
    options = pa.ipc.IpcWriteOptions(
        metadata_version=getattr(pa.ipc.MetadataVersion, format_version),
        use_legacy_format=format_version == "V4",
    )
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    assert _values(str(path), "x") == [1.5, 2.5]
    data = bytearray(path.read_bytes())
    # The schema at the beginning, which the footer repeats, is noise.
    size = struct.unpack_from("<i", data, 8 if format_version == "V4" else 12)[0]
    data[8 : 8 + size] = b"\x55" * size
    (tmp_path / "b.arrow").write_bytes(data)
    assert pa.ipc.open_file(str(tmp_path / "b.arrow")).read_all().equals(table)
    assert _values(str(tmp_path / "b.arrow"), "x") == [1.5, 2.5]


def test_streams_without_marks_and_with_new_dictionaries_are_read(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    batches = [
        pa.record_batch({"t": pa.array(words).dictionary_encode()})
        for words in (["a", "b"], ["c", "b", "d"])
    ]
    for name, given in (("new", None), ("old", options)):
        path = tmp_path / f"{name}.arrow"
        with pa.ipc.new_stream(str(path), batches[0].schema, options=given) as writer:
            for batch in batches:
                writer.write_batch(batch)
        assert _values(str(path), "t") == ["a", "b", "c", "b", "d"]


def test_lists_of_lists_are_arrays(tmp_path: Path) -> None:
    import datasets  # Slow, and needed here alone.

    square = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    long = [[[1, 2]], [[3, 4], [5, 6], [7, 8]]]
    features = datasets.Features({"a": datasets.Array2D((2, 2), "float32")})
    datasets.Dataset.from_dict({"a": square}, features).to_parquet(str(tmp_path / "a.parquet"))
    assert _values(str(tmp_path / "a.parquet"), "a") == square
    pq.write_table(pa.table({"a": long}), tmp_path / "b.parquet")
    assert _values(str(tmp_path / "b.parquet"), "a") == long
    pq.write_table(pa.table({"a": [[[1], [1, 2]]]}), tmp_path / "c.parquet")
    with pytest.raises(SourceError, match="differ in length within a row"):
        open_reader(str(tmp_path / "c.parquet"))


def _large_group(path: Path, count: int, size: int) -> list[bytes]:
    images = [bytes([k % 251]) * size for k in range(count)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", kind)])
    rows = [{"bytes": each, "path": None} for each in images]
    parts = [pa.array(rows[k : k + 100], kind) for k in range(0, count, 100)]
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(pa.table({"image": pa.chunked_array(parts)}), row_group_size=count)
    return images


def test_a_large_row_group_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MOST_AT_ONCE", 1000)
    monkeypatch.setattr(parquet, "_PART_BYTES", 5000)
    monkeypatch.setattr(rowgroups, "_NARROW", 1000)
    images = _large_group(tmp_path / "a.parquet", 300, 100)
    assert _values(str(tmp_path / "a.parquet"), "image") == [
        each.decode("latin-1") for each in images
    ]


@pytest.mark.nightly
def test_a_row_group_of_over_2_gib_is_read(tmp_path: Path) -> None:
    images = _large_group(tmp_path / "a.parquet", 2200, 1 << 20)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    with contextlib.closing(open_reader(str(tmp_path / "a.parquet"), trust=True)) as reader:
        for k in (0, 1100, 2199):
            payload = reader.read(np.array([k]))[0]
            assert bytes(reader.schema.split(payload)["image"]) == images[k]


# Sizes


def _zeros(folder: Path, kind: str) -> str:
    zeros = np.zeros((4, 100_000), np.int64)
    if kind == "npz":
        np.savez_compressed(folder / "a.npz", x=zeros)
    elif kind == "parquet":
        columns = {f"c{k}": np.zeros(100_000, np.int64) for k in range(4)}
        pq.write_table(pa.table(columns), folder / "a.parquet")
    elif kind == "arrow":
        feather.write_feather(
            pa.table({"x": zeros[0]}), folder / "a.arrow", compression="zstd", chunksize=1 << 20
        )
    elif kind == "h5":
        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("x", data=zeros, chunks=(4, 100_000), compression="gzip")
    else:
        (folder / "a.csv.gz").write_bytes(gzip.compress(b"x,label\n" + b"0,0\n" * 200_000))
    return str(folder / f"a.{kind}")


@pytest.mark.parametrize("kind", ["npz", "parquet", "arrow", "h5", "csv.gz"])
def test_data_that_shrink_a_thousandfold_are_bounded_by_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_FREE_BYTES", 0)
    monkeypatch.setattr(limits, "_EXPANSION", 1)
    # Another process would have limits of its own.
    monkeypatch.setattr(rowgroups, "rehearse", lambda *_: None)
    path = _zeros(tmp_path, kind)
    assert len(open_reader(path)) in (4, 100_000, 200_000)
    monkeypatch.setattr(limits, "usable_memory", lambda: 400_000)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        SourceError, match=r"(claims to hold|kept in memory become).*trust=True"
    ) as refused:
        open_reader(path)
    assert not any(word in str(refused.value) for word in ("damaged", "restore", "corrupt"))
    with dlio.open(path, trust=True, tiers="none") as data:
        assert len(data) in (4, 100_000, 200_000)
        assert data[3] is not None


# Tables of text, NumPy


@pytest.mark.parametrize("packed", [False, True])
def test_cells_have_any_length(packed: bool, tmp_path: Path) -> None:
    text = "text,label\na,0\n" + "b" * 200_000 + ",1\n"
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert [len(each) for each in _values(str(path), "text")] == [1, 200_000]
    pd: Any = pytest.importorskip("pandas")
    assert [len(each) for each in pd.read_csv(path)["text"]] == [1, 200_000]
    if packed:
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(SourceError, match=r"a\.csv\.gz is cut off"):
            open_reader(str(path))


def test_a_member_of_a_npz_that_is_not_asked_for_is_left_alone(tmp_path: Path) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)
    path = tmp_path / "a.npz"
    for other in (np.arange(4).astype("M8[s]"), np.array({"a": 1}, object)):
        for save in (np.savez, np.savez_compressed):
            save(path, x=x, y=y, other=other)
            assert _values(f"{path}::x,y", "x") == x.tolist()
            with pytest.raises(SourceError, match=r"other\.npy holds .*, or name the others"):
                open_reader(str(path))
    with pytest.raises(UsageError, match="no array 'z': it has x, y, other"):
        open_reader(f"{path}::z")


@pytest.mark.parametrize("dtype", ["<f8", ">i2"])
def test_arrays_in_fortran_order_are_read(dtype: str, tmp_path: Path) -> None:
    table = np.asfortranarray(np.arange(1050).reshape(50, 7, 3).astype(dtype))
    np.save(tmp_path / "f.npy", table)
    np.savez(tmp_path / "f.npz", x=table)
    for name, field in (("f.npy", "data"), ("f.npz", "x")):
        path = str(tmp_path / name)
        assert _values(path, field) == np.load(tmp_path / "f.npy").tolist()
        with contextlib.closing(open_reader(path)) as reader:
            for k in (49, 0, 20):
                row = reader.schema.split(reader.read(np.array([k]))[0])[field]
                assert row.tolist() == table[k].tolist()
        with contextlib.closing(open_reader(path, select=(slice(2, 6, 2), 1))) as reader:
            row = reader.schema.split(reader.read(np.array([8]))[0])[field]
            assert row.tolist() == table[8, 2:6:2, 1].tolist()
    patches = dlio.open(tmp_path / "f.npy", window=(3, 2), tiers="none", train=False)
    assert np.asarray(patches[1]["data"]).tolist() == table[2:5].tolist()


# HDF5, Zarr


def test_a_file_that_is_being_written_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((4, 3))
    code = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(SourceError, match="open for writing elsewhere") as refused:
            open_reader(str(path))
        assert not any(word in str(refused.value) for word in ("damaged", "restore", "not an HDF5"))
        writer.communicate(b"\n")
    assert len(open_reader(str(path))) == 4


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_an_error_of_the_machine_is_not_called_damage(error: Exception) -> None:
    with (
        pytest.raises(SourceError, match=r"^a\.parquet cannot be read: [PM]") as refused,
        ReadErrors("a.parquet", "is not a Parquet file, or is damaged"),
    ):
        raise error
    assert "damaged" not in str(refused.value)
    with pytest.raises(SourceError, match=r"needs more memory|cannot be read"), parsing("a.npy"):
        raise error


def test_an_error_of_a_library_is_not_called_damage() -> None:
    refused = pytest.raises(SourceError, match=r"^a\.h5 cannot be read: odd; check it with")
    with refused, parsing("a.h5"):
        raise ValueError("odd")


def test_values_of_varying_length_and_matlab_files_are_read(tmp_path: Path) -> None:
    rows = [[1, 2], [], [3, 4, 5]]
    with h5py.File(tmp_path / "v.h5", "w") as file:
        made = file.create_dataset("x", (3,), h5py.vlen_dtype(np.dtype("<i4")))
        for k, row in enumerate(rows):
            made[k] = row
        file["label"] = [0, 1, 0]
    assert _values(str(tmp_path / "v.h5"), "x") == rows
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.create_dataset("x", (3,), h5py.vlen_dtype(np.dtype(">i4")))[0] = [1, 2]
    with pytest.raises(UsageError, match=r"w\.h5::x has .* other byte order, which h5py returns w"):
        open_reader(str(tmp_path / "w.h5"))
    path = tmp_path / "m.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["x"] = np.arange(6.0).reshape(3, 2)
        file["#refs#/a"] = np.zeros(7)
    data = bytearray(path.read_bytes())
    data[:20] = b"MATLAB 7.3 MAT-file "
    path.write_bytes(data)
    assert _values(str(path), "x") == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert open_reader(str(path)).format == "hdf5"
    path = tmp_path / "old.mat"
    path.write_bytes(b"MATLAB 5.0 MAT-file" + bytes(1000))
    with pytest.raises(SourceError, match=r"older MATLAB format.*save\(\.\.\., '-v7\.3'\)"):
        open_reader(str(path))
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["t"] = np.array([[b"a", b"b"]] * 3)
        file["x"] = np.zeros(3)
    with pytest.raises(UsageError, match=r"t\.h5::t has texts of shape \(3, 2\)"):
        open_reader(str(tmp_path / "t.h5"))
    assert len(open_reader(f"{tmp_path}/t.h5::x")) == 3


@pytest.mark.parametrize("form", [2, 3])
def test_texts_of_zarr_are_classes_and_texts(form: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.zarr")
    group: Any = zarr.open_group(path, mode="w", zarr_format=form)
    group.create_array("x", data=np.arange(6.0).reshape(3, 2), chunks=(1, 2))
    for name in ("label", "caption"):
        texts = group.create_array(name, shape=(3,), dtype=str, chunks=(2,))
        texts[:] = np.array(["cat", "dög", "cat"], dtype=object)
    archive = shutil.make_archive(path, "zip", path)
    nested = shutil.make_archive(str(tmp_path / "b.zarr"), "zip", tmp_path, "a.zarr")
    for each in (path, archive, nested):
        with contextlib.closing(open_reader(each)) as reader:
            assert list(reader.classes) == ["cat", "dög"]
            assert reader.labels.tolist() == [0, 1, 0]
        assert _values(f"{each}::x", "x") == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        captions = [each.encode("latin-1").decode() for each in _values(each, "caption")]
        assert captions == ["cat", "dög", "cat"]


# Servers


def test_no_server_is_asked_for_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/sound/a.bin", b"0123456789")
    real = type(system).cat_file

    def cat_file(self: Any, path: str, start: int, end: int, **more: Any) -> bytes:
        if start == end:  # As S3 answers, which takes "bytes=5-4" for no range.
            start, end = 0, 10
        return bytes(real(self, path, start=start, end=end, **more))

    monkeypatch.setattr(type(system), "cat_file", cat_file)
    file = File("memory://sound/a.bin")
    assert file.read(5, 0) == b""
    file.read_into(5, memoryview(bytearray(0)))
    assert Source("memory://sound").read("a.bin", 5, 0) == b""
    assert file.read(5, 2) == b"56"

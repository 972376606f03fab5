"""Arrow files and streams, and the folders that Hugging Face's library saves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import simplejpeg
from pyarrow import feather

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import File
from dlio.errors import SourceError, UsageError
from dlio_readers.arrow import ArrowReader
from dlio_readers.rowgroups import plain_values
from dlio_staging.pack_folder import pack


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))
    # Each new file is read by a child process first otherwise; test_rehearsal covers that.
    monkeypatch.setenv("DLIO_REHEARSAL", "1")


def _picture(k: int) -> bytes:
    rng = np.random.default_rng(k)
    pixels = rng.integers(0, 255, (40 + k, 50, 3), np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels, 90, "RGB"))


def _like_a_picture(k: int) -> bytes:
    return b"\xff\xd8\xff" + bytes([k]) * k


def _table(count: int = 60) -> pa.Table:
    return pa.table(
        {
            "image": [
                {"bytes": b"\xff\xd8\xff" + bytes([k]) * k, "path": None} for k in range(count)
            ],
            "text": [f"säule {k}" for k in range(count)],
            "label": [k % 3 for k in range(count)],
            "pair": pa.array([[k, -k] for k in range(count)], pa.list_(pa.int32(), 2)),
            "ragged": [list(np.arange(k % 4, dtype=np.float32)) for k in range(count)],
            "flag": [k % 2 == 0 for k in range(count)],
        }
    )


def _write(path: Path, table: pa.Table, kind: str, rows: int = 7) -> None:
    packed = kind.partition("-")[2] or None
    options = pa.ipc.IpcWriteOptions(compression=packed)
    make = pa.ipc.new_stream if kind.startswith("stream") else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("kind", ["stream", "stream-lz4", "file", "file-zstd"])
def test_files_and_streams_compressed_or_not(kind: str, tmp_path: Path) -> None:
    _write(tmp_path / "x.arrow", _table(), kind)
    with dlio.open(tmp_path / "x.arrow", image_size=None, tiers="ram:1MiB") as data:
        assert dict(data.reader.schema.fields) == {
            "image": "jpeg",
            "text": "text",
            "label": "int64",
            "pair": "int32[2]",
            "ragged": "float32[?]",
            "flag": "bool",
        }
        assert data.targets == [k % 3 for k in range(60)]
        payloads = data.reader.read(np.arange(60))
        for k, payload in enumerate(payloads):
            values = data.reader.schema.split(payload)
            assert bytes(values["image"]) == _like_a_picture(k)
            assert bytes(values["text"]).decode() == f"säule {k}"
            assert values["pair"].tolist() == [k, -k]
            assert values["ragged"].tolist() == list(range(k % 4))
            assert values["flag"] == (k % 2 == 0)
    with dlio.open(f"{tmp_path}/x.arrow::pair,label", tiers="none") as data:
        batch = next(iter(dlio.DataLoader(data, batch_size=60)))
        assert batch["pair"].shape == (60, 2)


def test_a_batch_is_read_once_for_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": np.random.default_rng(0).random(4000), "y": np.arange(4000)})
    _write(tmp_path / "x.feather", table, "file", rows=1000)
    reader = ArrowReader(str(tmp_path / "x.feather"))
    sizes: list[int] = []
    real = File.read

    def counted(self: File, offset: int = 0, count: int | None = None) -> bytes:
        data = real(self, offset, count)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(File, "read", counted)
    reader.close()
    for sample in range(1000, 2000, 100):
        reader.read(np.array([sample]))
    assert [size for size in sizes if size > 10_000] == [size for size in sizes if size > 16_000]
    assert sum(size > 16_000 for size in sizes) == 1


def test_folders_of_hugging_face_data_sets(tmp_path: Path) -> None:
    import datasets  # Slow, and needed here alone.

    rows: dict[str, Any] = {
        "image": [{"bytes": _picture(k), "path": None} for k in range(12)],
        "label": [k % 2 for k in range(12)],
    }
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "saved" / "cache-0123.arrow").write_bytes(b"of a map, not of the data set")
    with dlio.open(tmp_path / "saved", image_size=24, tiers="ram:1MiB") as data:
        assert data.reader.format == "arrow"
        assert list(data.classes) == ["cat", "dog"]
        assert data.targets == rows["label"]
        images, labels = next(iter(dlio.DataLoader(data, batch_size=12)))
        assert images.shape == (12, 3, 24, 24)
        assert labels.tolist() == rows["label"]
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]  # As versions before 2.0 did.
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(SourceError, match=r"is some of the rows .*flatten_indices"):
        dlio.open(tmp_path / "saved")
    del state["_indices_data_files"]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "parts"))
    with pytest.raises(UsageError, match=r"parts test, train of a data set: open one, such as"):
        dlio.open(tmp_path / "parts")
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(SourceError, match=r"lacks data-00001-of-00003\.arrow"):
        dlio.open(tmp_path / "saved")


def test_what_is_not_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "one.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(SourceError, match=r"one\.feather is of Feather 1.*write_feather"):
        dlio.open(tmp_path / "one.feather")
    _write(tmp_path / "null.arrow", pa.table({"label": [1, None]}), "file")
    with pytest.raises(
        SourceError, match=r"null\.arrow.*'label': 1 row.*without label: fill it, or drop"
    ):
        dlio.open(tmp_path / "null.arrow")
    _write(tmp_path / "a.arrow", pa.table({"a": [1]}), "file")
    _write(tmp_path / "b.arrow", pa.table({"b": [1]}), "file")
    with pytest.raises(SourceError, match=r"b\.arrow has other columns than .*a\.arrow"):
        dlio.open([tmp_path / "a.arrow", tmp_path / "b.arrow"])


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_file_that_is_cut_off_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    _write(path, _table(), kind)
    whole = path.read_bytes()
    reader = ArrowReader(str(path))
    for part in (0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(part * len(whole))])
        with pytest.raises(SourceError, match=r"x\.arrow.*cut off"):
            ArrowReader(str(path))
    with pytest.raises(SourceError, match=r"x\.arrow"):
        reader.read(np.arange(60))


def test_offsets_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    _write(path, pa.table({"a": ["abc", "defg", "hi"]}), "stream")
    data = path.read_bytes()
    offsets = np.array([0, 3, 7, 9], "<i4").tobytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, np.array([0, 3, 2**30, 9], "<i4").tobytes()))
    with pytest.raises(SourceError, match=r"x\.arrow, row group 0, cannot be read"):
        ArrowReader(str(path))


def test_packed_shards_hold_the_same_samples(tmp_path: Path) -> None:
    _write(tmp_path / "x.arrow", _table(), "stream")
    pack(f"{tmp_path}/x.arrow::text,pair", str(tmp_path / "packed"), order="source")
    with dlio.open(tmp_path / "packed", tiers="none") as data:
        assert [data[k]["text"] for k in range(60)] == [f"säule {k}" for k in range(60)]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_runs_are_read_as_pyarrow_decodes_them(kind: str, tmp_path: Path) -> None:
    plain = {"label": ["b", "b", "a", "a"], "x": [1.5, 1.5, None, 2.0], "n": [3, 3, 3, 4]}
    runs = {name: pc.run_end_encode(pa.array(values)) for name, values in plain.items()}
    _write(tmp_path / "x.arrow", pa.table(runs), kind)
    reader = ArrowReader(str(tmp_path / "x.arrow"))
    assert reader.labels.tolist() == [1, 1, 0, 0]
    assert list(reader.classes) == ["a", "b"]
    read = [reader.schema.split(payload) for payload in reader.read(np.arange(4))]
    for name in ("x", "n"):
        right = pc.run_end_decode(runs[name]).to_numpy(zero_copy_only=False)
        np.testing.assert_array_equal([row[name] for row in read], right)


def test_a_run_that_claims_more_rows_than_its_batch_takes_no_memory() -> None:
    kind, children = pa.run_end_encoded(pa.int32(), pa.int64()), [[2, 1 << 30], [7, 8]]
    parts = [pa.array(children[0], pa.int32()), pa.array(children[1])]
    array = pa.Array.from_buffers(kind, 3, [None], children=parts)
    array.validate(full=True)  # pyarrow allows it.
    made = plain_values(pa.chunked_array([array]), 100, "x")
    assert made.to_pylist() == [7, 7, 8]


@pytest.mark.parametrize("packed", ["", "-lz4", "-zstd"])
def test_files_as_polars_writes_them(packed: str, tmp_path: Path) -> None:
    # polars 2.1 writes texts and bytes as views, lists with offsets of 64 bits, and categories by
    # numbers without a sign.
    texts = ["a", None, "a text of more than twelve bytes", "", "bb", "a"]
    names, chosen = ["cat", "dog", "an animal of many letters"], [0, 1, 0, 2, 2, 1]
    table = pa.table(
        {
            "text": pa.array(texts, pa.string_view()),
            "data": pa.array([b"x" * 9 * k for k in range(6)], pa.binary_view()),
            "list": pa.array([[k, -k] for k in range(6)], pa.large_list(pa.int64())),
            "label": pa.DictionaryArray.from_arrays(
                pa.array(chosen, pa.uint32()), pa.array(names, pa.string_view())
            ),
        }
    )
    _write(tmp_path / "x.arrow", table, f"file{packed}", rows=4)
    with dlio.open(tmp_path / "x.arrow", tiers="ram:1MiB") as data:
        assert sorted(data.classes) == sorted(names)
        assert [data.classes[label] for label in data.targets] == [names[k] for k in chosen]
        for k, payload in enumerate(data.reader.read(np.arange(6))):
            values = data.reader.schema.split(payload)
            assert bytes(values["text"]).decode() == (texts[k] or "")
            assert bytes(values["data"]) == b"x" * 9 * k
            assert values["list"].tolist() == [k, -k]


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_columns_of_numbers_become_one_array(tmp_path: Path, suffix: str) -> None:
    table = pa.table(
        {
            "a": pa.array([0.5, 1.5, None]),
            "name": ["x", "y", "z"],
            "b": pa.array([1, None, 3], pa.int32()),
            "flag": [True, False, True],
            "list": [[1.0], [2.0], [3.0]],
            "label": ["no", "yes", "no"],
        }
    )
    path = str(tmp_path / f"t.{suffix}")
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        feather.write_feather(table, path)
    reader = open_reader(path, columns="*")
    assert reader.schema.fields == (("features", "float32[3]"), ("label", "int64"))
    rows = [reader.schema.split(each) for each in reader.read(np.arange(3))]
    expected = np.array([[0.5, 1, 1], [1.5, np.nan, 0], [np.nan, 3, 1]], np.float32)
    np.testing.assert_array_equal([row["features"] for row in rows], expected)
    assert list(reader.labels) == [0, 1, 0]
    assert list(reader.classes) == ["no", "yes"]
    chosen = open_reader(f"{path}::name", columns=["b", "a"], label="flag")
    (row,) = (chosen.schema.split(each) for each in chosen.read(np.array([0])))
    assert row["features"].tolist() == [1.0, 0.5]
    assert sorted(row) == ["features", "label", "name"]
    for wrong, said in (("list", "is list"), ("name", "is string"), ("no", "no column 'no'")):
        with pytest.raises(UsageError, match=said):
            open_reader(path, columns=[wrong])


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_a_column_may_be_called_features(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"features": [0.5, 1.5], "other": [2.0, 3.0], "label": [0, 1]})
    path = str(tmp_path / f"t.{suffix}")
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    for columns, expected in ((None, 1.5), ("features", [1.5]), ("*", [1.5, 3.0])):
        reader = open_reader(path, columns=columns)
        (row,) = (reader.schema.split(each) for each in reader.read(np.array([1])))
        assert np.asarray(row["features"]).tolist() == expected


@pytest.mark.parametrize("suffix", ["parquet", "feather", "csv"])
def test_columns_that_are_named_twice_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"t.{suffix}")
    table = pa.table({"a": [0.5, 1.5], "label": [0, 1]})
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "csv":
        table.to_pandas().to_csv(path, index=False)
    else:
        feather.write_feather(table, path)
    for wrong, said in ((["a", "a"], "'a' is named twice"), ([], "the list is empty")):
        with pytest.raises(UsageError, match=said):
            open_reader(path, columns=wrong)

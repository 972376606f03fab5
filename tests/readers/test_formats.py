"""Every format returns the samples that its own library wrote, alone and in blocks."""

import csv
import io
import json
import os
import pickle
import re
import tarfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import h5py
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from dlio.data.reader import Reader, open_reader
from dlio.errors import SourceError, UsageError

N = 300
JPEG = b"\xff\xd8\xff\xe0"


def sample(i: int) -> dict[str, Any]:
    """Return the fields of sample i; a format holds those that it can."""
    return {
        "image": JPEG + bytes([i % 251]) * (20 + i % 17),
        "label": i % 7,
        "x": np.arange(6, dtype=np.float32).reshape(2, 3) + i,
        "words": f"wörd {i}",
    }


Writer = Callable[[Path], str]


def write_tar(folder: Path) -> str:
    for shard in range(3):
        with tarfile.open(folder / f"s{shard}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for i in range(shard * 100, shard * 100 + 100):
                _add_tar(archive, i)
    return f"{folder}/s{{0..2}}.tar"


def _add_tar(archive: tarfile.TarFile, i: int) -> None:
    whole = sample(i)
    memory = io.BytesIO()
    np.save(memory, whole["x"])
    for extension, data in (
        ("image.JPG", whole["image"]),
        ("cls", str(whole["label"]).encode()),
        ("x.npy", memory.getvalue()),
        ("txt", whole["words"].encode()),
    ):
        info = tarfile.TarInfo(f"{'deep/' * (i % 40)}{i:06d}.{extension}")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))


def write_lz4(folder: Path) -> str:
    write_tar(folder)
    for path in folder.glob("*.tar"):
        packed = lz4.frame.compress(path.read_bytes(), block_size=4, block_linked=False)
        path.with_suffix(".tar.lz4").write_bytes(packed)
        path.unlink()
    return str(folder)


def write_hdf5(folder: Path, **options: Any) -> str:
    with h5py.File(folder / "a.h5", "w") as file:
        rows = [sample(i) for i in range(N)]
        vlen = file.create_dataset("image", (N,), h5py.vlen_dtype(np.uint8))
        for i, row in enumerate(rows):
            vlen[i] = np.frombuffer(row["image"], np.uint8)
        file.create_dataset("label", data=[row["label"] for row in rows])
        file.create_dataset("group/x", data=np.stack([row["x"] for row in rows]), **options)
        file.create_dataset("words", data=[row["words"] for row in rows])
        file["other"] = np.zeros(5)
    return f"{folder}/a.h5::image,label,group/x,words"


def write_hdf5_chunks(folder: Path) -> str:
    return write_hdf5(folder, chunks=(32, 2, 3), compression="gzip", shuffle=True)


def write_zarr(folder: Path, version: int = 3, **options: Any) -> str:
    root = zarr.open_group(str(folder / "a.zarr"), mode="w", zarr_format=version)  # type: ignore[arg-type]
    rows = [sample(i) for i in range(N)]
    root.create_array("x", data=np.stack([row["x"] for row in rows]), **options)
    root.create_array("label", data=np.array([row["label"] for row in rows]), chunks=(50,))
    return str(folder / "a.zarr")


def write_zarr2(folder: Path) -> str:
    return write_zarr(folder, 2, chunks=(32, 1, 3))


def write_zarr_shards(folder: Path) -> str:
    return write_zarr(folder, 3, chunks=(10, 2, 3), shards=(100, 2, 3))


def write_parquet(folder: Path) -> str:
    rows = [sample(i) for i in range(N)]
    features = {"label": {"names": list("abcdefg"), "_type": "ClassLabel"}}
    meta = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table(
        {
            "image": pa.array(
                [{"bytes": row["image"], "path": None} for row in rows],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "label": [row["label"] for row in rows],
            "x": [row["x"].flatten().tolist() for row in rows],
            "words": [row["words"] for row in rows],
        }
    ).replace_schema_metadata(meta)
    for k in range(2):
        pq.write_table(table.slice(k * 150, 150), folder / f"p{k}.parquet", row_group_size=40)
    return str(folder)


def write_npz(folder: Path, packed: bool = False) -> str:
    save = np.savez_compressed if packed else np.savez
    rows = [sample(i) for i in range(N)]
    save(
        folder / "a.npz",
        x=np.stack([row["x"] for row in rows]),
        label=np.array([row["label"] for row in rows]),
        other=np.zeros(3),
    )
    return f"{folder}/a.npz::x,label"


def write_npz_packed(folder: Path) -> str:
    return write_npz(folder, packed=True)


def write_csv(folder: Path) -> str:
    with open(folder / "a.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["words", "label"])
        for i in range(N):
            writer.writerow([sample(i)["words"] + ('"\n,\u2028' if i % 9 == 0 else ""), i % 7])
    return f"{folder}/a.csv"


def write_mds(folder: Path, packed: str | None = None) -> str:
    """Write shards as MosaicML's MDSWriter does."""
    columns = [("image", "jpeg", None), ("label", "int", 8), ("words", "str", None)]
    columns += [("x", "ndarray:float32:2,3", 24), ("y", "ndarray:uint16", None)]
    columns.sort()
    shards = []
    for shard in range(3):
        bodies = []
        for i in range(shard * 100, shard * 100 + 100):
            whole = sample(i)
            values = {
                "image": whole["image"],
                "label": np.int64(whole["label"]).tobytes(),
                "words": whole["words"].encode(),
                "x": whole["x"].tobytes(),
                "y": bytes([1 << 2, 1 + i % 5]) + np.arange(1 + i % 5, dtype="<u2").tobytes(),
            }
            sizes = [len(values[name]) for name, _, size in columns if size is None]
            data = b"".join(values[name] for name, _, _ in columns)
            bodies.append(np.array(sizes, "<u4").tobytes() + data)
        ends = np.cumsum([4 * 102, *map(len, bodies)]).astype("<u4")
        raw = np.uint32(100).tobytes() + ends.tobytes() + b"".join(bodies)
        entry: dict[str, Any] = {
            "format": "mds",
            "samples": 100,
            "column_names": [name for name, _, _ in columns],
            "column_encodings": [encoding for _, encoding, _ in columns],
            "column_sizes": [size for _, _, size in columns],
            "raw_data": {"basename": f"shard.{shard}.mds", "bytes": len(raw), "hashes": {}},
            "zip_data": None,
            "compression": packed,
        }
        if packed == "gz":
            import gzip

            entry["zip_data"] = {"basename": f"shard.{shard}.mds.gz", "bytes": 1, "hashes": {}}
            (folder / f"shard.{shard}.mds.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / f"shard.{shard}.mds").write_bytes(raw)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return str(folder)


def write_mds_gz(folder: Path) -> str:
    return write_mds(folder, "gz")


FORMATS: dict[str, tuple[Writer, dict[str, str]]] = {
    # Each format's names of the fields that it holds.
    "tar": (write_tar, {"image.jpg": "image", "cls": "label", "x.npy": "x", "txt": "words"}),
    "tar-lz4": (write_lz4, {"image.jpg": "image", "cls": "label", "x.npy": "x", "txt": "words"}),
    "hdf5": (write_hdf5, {"image": "image", "label": "label", "group/x": "x", "words": "words"}),
    "hdf5-chunks": (write_hdf5_chunks, {"image": "image", "label": "label", "group/x": "x"}),
    "zarr3": (write_zarr, {"x": "x", "label": "label"}),
    "zarr2": (write_zarr2, {"x": "x", "label": "label"}),
    "zarr-shards": (write_zarr_shards, {"x": "x", "label": "label"}),
    "parquet": (write_parquet, {"image": "image", "label": "label", "words": "words"}),
    "npz": (write_npz, {"x": "x", "label": "label"}),
    "npz-packed": (write_npz_packed, {"x": "x", "label": "label"}),
    "mds": (write_mds, {"image": "image", "label": "label", "words": "words", "x": "x"}),
    "mds-gz": (write_mds_gz, {"image": "image", "label": "label", "words": "words", "x": "x"}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=FORMATS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Reader, dict[str, str]]:
    writer, fields = FORMATS[request.param]
    (tmp_path / "data").mkdir()
    return open_reader(writer(tmp_path / "data")), fields


def _check(reader: Reader, fields: dict[str, str], i: int, payload: Any) -> None:
    assert len(payload) == reader.sizes[i]
    fields_read = reader.schema.split(payload)
    wanted = sample(i)
    for name, same in fields.items():
        value = fields_read[name]
        if isinstance(value, memoryview):
            value = bytes(value)
            value = value.decode() if same == "words" else value
        assert np.array_equal(value, wanted[same]), (i, name)


def test_samples_are_as_they_were_written(case: tuple[Reader, dict[str, str]]) -> None:
    reader, fields = case
    assert len(reader) == N
    for block in range(reader.layout.blocks):
        samples = reader.layout.samples_of(block)
        for i, payload in zip(samples.tolist(), reader.read(samples), strict=True):
            _check(reader, fields, i, payload)
    some = np.random.default_rng(0).integers(0, N, 40)
    for i, payload in zip(some.tolist(), reader.read(some), strict=True):
        _check(reader, fields, i, payload)
    for i in some.tolist():
        _check(reader, fields, i, reader.read(np.array([i]))[0])
    if "label" in fields.values():
        assert reader.labels.tolist() == [i % 7 for i in range(N)]
    reader.close()
    _check(reader, fields, 7, reader.read(np.array([7]))[0])


def test_many_threads_read_at_once(case: tuple[Reader, dict[str, str]]) -> None:
    reader, fields = case
    gate = threading.Barrier(4)

    def work(part: int) -> None:
        gate.wait(60)
        for block in range(part, reader.layout.blocks, 4):
            samples = reader.layout.samples_of(block)
            for i, payload in zip(samples.tolist(), reader.read(samples), strict=True):
                _check(reader, fields, i, payload)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_reader_is_the_same_when_opened_again_and_in_another_process(
    case: tuple[Reader, dict[str, str]],
) -> None:
    reader, fields = case
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.fingerprint == reader.fingerprint
    assert copy.schema == reader.schema
    _check(copy, fields, 3, copy.read(np.array([3]))[0])


@pytest.mark.parametrize("name", ["tar", "tar-lz4", "parquet", "npz", "mds", "hdf5"])
def test_a_damaged_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    writer, _ = FORMATS[name]
    path = writer(tmp_path / "data")
    for victim in (tmp_path / "data").iterdir():
        if victim.suffix != ".json":
            victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(SourceError) as caught:
        _read_all(path)
    assert str(tmp_path) in str(caught.value)


def _read_all(path: str) -> None:
    reader = open_reader(path)
    for block in range(reader.layout.blocks):
        reader.read(reader.layout.samples_of(block))


# No other process can read this one's memory, as the trial of some files would.
@pytest.mark.filterwarnings("ignore:.*is read without the trial:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tar"])
def test_formats_are_read_from_other_file_systems(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    writer, fields = FORMATS[name]
    path = writer(tmp_path / "data")
    files = fsspec.filesystem("memory")
    root = f"/formats/{name}/{os.getpid()}"
    files.put(f"{tmp_path}/data/", root, recursive=True)
    reader = open_reader(path.replace(f"{tmp_path}/data", f"memory:/{root}"))
    for i, payload in zip(range(N), reader.read(np.arange(N)), strict=True):
        _check(reader, fields, i, payload)


def test_a_chained_url_leads_into_an_archive(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_csv(tmp_path / "data")
    write_parquet(tmp_path / "data")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for path in (tmp_path / "data").iterdir():
            archive.write(path, path.name)
    reader = open_reader(f"zip://*.parquet::{tmp_path}/z.zip")
    assert len(reader) == N
    reader = open_reader(f"zip://a.csv::{tmp_path}/z.zip")
    assert reader.labels[5] == 5


def test_tables_of_text_are_read_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    reader = open_reader(write_csv(tmp_path))
    rows = [reader.schema.split(payload) for payload in reader.read(np.arange(N))]
    for i in range(N):
        words = sample(i)["words"] + ('"\n,\u2028' if i % 9 == 0 else "")
        assert (bytes(rows[i]["words"]).decode(), rows[i]["label"]) == (words, i % 7)
    (tmp_path / "b.csv").write_text("label,x\ncat,1.5\ndog,2\ncat,3\n")
    reader = open_reader(f"{tmp_path}/b.csv")
    assert (list(reader.classes), reader.labels.tolist()) == (["cat", "dog"], [0, 1, 0])
    (tmp_path / "c.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(SourceError, match="row 2"):
        open_reader(f"{tmp_path}/c.csv")


def test_only_the_selected_slab_of_each_sample_is_read(tmp_path: Path) -> None:
    volumes = np.random.default_rng(0).random((20, 16, 8, 4), np.float32)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["v"] = volumes
        file.create_dataset("c", data=volumes, chunks=(1, 4, 8, 4))
    zarr.create_array(str(tmp_path / "v.zarr"), data=volumes)
    np.save(tmp_path / "v.npy", volumes)
    part = (slice(4, 8), 3, slice(None))
    for path in ("v.h5::v", "v.h5::c", "v.zarr", "v.npy"):
        whole, reader = (
            open_reader(f"{tmp_path}/{path}"),
            open_reader(f"{tmp_path}/{path}", select=part),
        )
        assert reader.schema.fields[0][1] == "float32[4,4]"
        assert reader.fingerprint != whole.fingerprint
        for i, payload in enumerate(reader.read(np.arange(20))):
            (value,) = reader.schema.split(payload).values()
            assert np.array_equal(value, volumes[i, 4:8, 3]), path
    reader = open_reader(f"{tmp_path}/v.h5::v", select={"v": (slice(4, 8),)})
    read = _count_bytes(reader, 20)
    assert read == 20 * 4 * 8 * 4 * 4
    with pytest.raises(UsageError, match="is empty for"):
        open_reader(f"{tmp_path}/v.npy", select=(slice(9, 3), 0, 0))
    with pytest.raises(UsageError, match="no such option"):
        open_reader(write_tar(tmp_path), select=part)


def _count_bytes(reader: Any, count: int) -> int:
    from dlio.data.source import File

    read, before = [0], File.read_into

    def counted(self: File, offset: int, into: memoryview) -> None:
        read[0] += len(into)
        before(self, offset, into)

    File.read_into = counted  # type: ignore[method-assign]
    try:
        reader.read(np.arange(count))
    finally:
        File.read_into = before  # type: ignore[method-assign]
    return read[0]


def test_a_chunk_is_decoded_once_for_a_block(tmp_path: Path) -> None:
    data = np.random.default_rng(0).random((512, 64, 64), np.float32)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(64, 64, 64), compression="gzip")
    reader: Any = open_reader(f"{tmp_path}/c.h5")
    asked: list[tuple[int, int]] = []
    column = reader._columns["x"]
    rows = column.rows

    def counted(start: int, stop: int) -> Any:
        asked.append((start // 64, -(-stop // 64)))
        return rows(start, stop)

    column.rows = counted
    for block in range(reader.layout.blocks):
        reader.read(reader.layout.samples_of(block))
    assert sum(high - low for low, high in asked) == 8  # There are as many chunks.
    asked.clear()
    for i in np.random.default_rng(1).permutation(512)[:200].tolist():
        reader.read(np.array([i]))
    assert len(asked) == 8


def test_links_out_of_an_hdf5_file_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.arange(5)
    (tmp_path / "raw").write_bytes(bytes(40))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink("secret.h5", "x")
        file["soft"] = h5py.SoftLink("/link")
        file.create_dataset("outside", (5,), "i8", external=[(str(tmp_path / "raw"), 0, 40)])
        layout = h5py.VirtualLayout((5,), "i8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "x", (5,))
        file.create_virtual_dataset("virtual", layout)
    for name, words in (
        ("link", "link"),
        ("soft", "link"),
        ("outside", "external storage"),
        ("virtual", r"1 other file \(.*secret\.h5\).*open a list of those files"),
    ):
        with pytest.raises(SourceError, match=words):
            open_reader(f"{tmp_path}/a.h5::{name}")


def test_a_missing_chunk_can_be_an_error(tmp_path: Path) -> None:
    path = write_zarr(tmp_path, chunks=(32, 2, 3))
    chunk = next(p for p in Path(path, "x").rglob("*") if p.is_file() and p.name != "zarr.json")
    chunk.unlink()
    with pytest.raises(SourceError, match="1 of its 10 chunks are missing"):
        open_reader(path, missing="error")
    open_reader(path, missing="fill")


def test_pickles_and_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}, {}], object), allow_pickle=True)
    with pytest.raises(SourceError, match="object"):
        open_reader(f"{tmp_path}/o.npy")
    write_mds(tmp_path)
    index = (tmp_path / "index.json").read_text().replace('"jpeg"', '"pkl"')
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(SourceError, match="needs pickle"):
        open_reader(str(tmp_path))
    (tmp_path / "index.json").write_text(index.replace("pkl", "jpeg").replace("shard.0", "../x"))
    with pytest.raises(SourceError, match="not inside its folder"):
        open_reader(str(tmp_path))


def test_nulls_and_unknown_columns_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [b"x", None], "b": [b"x", b"y"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"column 'a': 1 row, the first of them row 1, without b"):
        open_reader(f"{tmp_path}/a.parquet")
    assert len(open_reader(f"{tmp_path}/a.parquet::b")) == 2
    with pytest.raises(UsageError, match="no column 'c'"):
        open_reader(f"{tmp_path}/a.parquet::c")
    pq.write_table(pa.table({"t": [{"a": 1}]}), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"samples cannot have .* t .*: store numbers or texts"):
        open_reader(f"{tmp_path}/b.parquet")


def test_a_tar_whose_samples_differ_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.jpg", "a.cls", "b.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"1"))
    with pytest.raises(SourceError, match="sample 'b' has no cls"):
        open_reader(f"{tmp_path}/a.tar")
    assert len(open_reader(f"{tmp_path}/a.tar", fields=("jpg",))) == 2


def test_the_error_for_a_path_without_a_data_set_lists_the_formats_tried_which_say_why(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.dat").write_bytes(b"hello")
    with pytest.raises(SourceError) as caught:
        open_reader(f"{tmp_path}/x.dat")
    for name in ("folder", "hdf5", "mds", "parquet", "shard", "tables", "tar", "zarr"):
        assert re.search(rf"\b{name}\b", str(caught.value))
        with pytest.raises(SourceError, match=rf"\({name}: "):
            open_reader(f"{tmp_path}/x.dat", format=name)
    assert len(str(caught.value)) < 300 + len(f"{tmp_path}/x.dat")

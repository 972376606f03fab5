"""Data sets of a remote file system have the samples, labels and classes of their local copies."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

from dlio.data.reader import open_reader
from dlio.util.settings import REHEARSAL

Found = tuple[list[str], list[int], list[str], list[bytes]]


@pytest.fixture(autouse=True)
def _no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # A process that reads it first has no such memory.


def _png(shade: int) -> bytes:
    made = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), shade, np.uint8)).save(made, "PNG")
    return made.getvalue()


def _pictures(folder: Path, count: int = 4) -> None:
    folder.mkdir(parents=True)
    for k in range(count):
        (folder / f"{k}.png").write_bytes(_png(k))


def _classes(root: Path) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            _pictures(root / split / name)


def _table(root: Path) -> None:
    _pictures(root)
    (root / "labels.csv").write_text("file_name,label\n0.png,b\n1.png,a\n2.png,b\n3.png,c\n")


def _metadata(root: Path) -> None:
    _pictures(root / "images")
    rows = [{"file_name": f"images/{k}.png", "label": 3 - k} for k in range(4)]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _listed(root: Path) -> None:
    _pictures(root / "train")
    (root / "train.csv").write_text("id,breed\n0,b\n1,a\n2,b\n3,c\n")


def _boxes(root: Path) -> None:
    _pictures(root)
    for k in range(4):
        (root / f"{k}.txt").write_text(f"{k % 2} 0.5 0.5 0.5 0.5\n")


def _arrays(root: Path) -> None:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for k in range(2):
            np.save(root / name / f"{k}.npy", np.full((2, 3), k, np.float32))


def _tars(root: Path) -> None:
    root.mkdir()
    for part in range(2):
        with tarfile.open(root / f"a-{part:03}.tar", "w") as file:
            for k in range(3):
                for name, data in ((f"{k}.png", _png(k)), (f"{k}.cls", f"c{k - part}".encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))


def _parquet(root: Path) -> None:
    (root / "data").mkdir(parents=True)
    for split in ("train", "test"):
        images = [{"bytes": _png(k), "path": f"{k}.png"} for k in range(3)]
        table = pa.table({"image": images, "label": ["b", "a", "b"]})
        pq.write_table(table, root / f"data/{split}-00000-of-00001.parquet")


def _feather(root: Path) -> None:
    root.mkdir()
    feather.write_feather(pa.table({"x": [1, 2], "label": ["01", "1"]}), str(root / "a.feather"))


def _hdf5(root: Path) -> None:
    root.mkdir()
    with h5py.File(root / "a.h5", "w") as file:
        file["x"], file["label"] = np.ones((3, 2)), np.array([b"b", b"a", b"b"])


def _zarr(root: Path) -> None:
    group = zarr.open_group(str(root / "a.zarr"), mode="w")
    group.create_array("images", data=np.ones((3, 2)))
    group.create_array("labels", data=np.array([2, 0, 1]))


def _csv(root: Path) -> None:
    root.mkdir()
    (root / "a.csv").write_text("x,label\n1,b\n2,a\n3,b\n")


@pytest.mark.parametrize(
    ("make", "path", "split"),
    [
        (_classes, "", "val"),
        (_table, "", None),
        (_metadata, "", None),
        (_listed, "", "train"),
        (_boxes, "", None),
        (_arrays, "", None),
        (_tars, "", None),
        (_tars, "/a-*.tar", None),
        (_tars, "/a-{000..001}.tar", None),
        (_parquet, "", "train"),
        (_parquet, "/data/test-*.parquet", None),
        (_feather, "/a.feather", None),
        (_hdf5, "/a.h5", None),
        (_zarr, "/a.zarr", None),
        (_csv, "/a.csv", None),
    ],
)
def test_a_remote_copy_has_the_labels_of_the_local_one(
    make: Callable[[Path], None], path: str, split: str | None, tmp_path: Path
) -> None:
    local = tmp_path / "data"
    make(local)
    memory = fsspec.filesystem("memory")
    for file in local.rglob("*"):
        if file.is_file():
            memory.pipe(f"{tmp_path}/{file.relative_to(local)}", file.read_bytes())
    try:
        assert _found(f"memory:/{tmp_path}{path}", split) == _found(f"{local}{path}", split)
    finally:
        memory.rm(str(tmp_path), recursive=True)


def _found(path: str, split: str | None) -> Found:
    reader = open_reader(path, split=split) if split else open_reader(path)
    samples = np.arange(len(reader))
    names = [reader.name(k).rpartition("/")[2] for k in samples.tolist()]
    payloads = [bytes(each) for each in reader.read(samples)]
    labels = np.asarray(reader.labels).tolist()
    classes = list(reader.classes)
    reader.close()
    assert labels
    return classes, labels, names, payloads

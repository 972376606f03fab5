"""Files in the folders of a folder whose own files are read are told, or read, in all formats."""

import io
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from dlio.data.reader import open_reader
from tests.loader.targets_data import painted, write

TABLE = pa.table({"x": [1.0, 2.0], "label": [0, 1]})


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix
    if kind == ".parquet":
        parquet.write_table(TABLE, path)
    elif kind == ".feather":
        feather.write_feather(TABLE, path)
    elif kind == ".h5":
        with h5py.File(path, "w") as file:
            file["x"] = np.ones((2, 3))
    elif kind == ".npy":
        np.save(path, np.ones((2, 3)))
    elif kind == ".csv":
        path.write_text("x,label\n1,0\n2,1\n")
    elif kind == ".tar":
        with tarfile.open(path, "w") as archive:
            for k in range(2):
                info = tarfile.TarInfo(f"{k}.txt")
                info.size = 1
                archive.addfile(info, io.BytesIO(b"a"))
    else:
        Image.new("RGB", (4, 4)).save(path)


@pytest.mark.parametrize("suffix", ["parquet", "feather", "h5", "npy", "csv", "tar", "png"])
def test_files_of_folders_that_are_not_read_are_told(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        _write(tmp_path / f"{name}.{suffix}")
    own = open_reader(str(tmp_path))
    assert "left out" not in caplog.text
    _write(tmp_path / "inner" / f"c.{suffix}")
    reader = open_reader(str(tmp_path))
    assert "left out" in caplog.text
    words = {"png": "1 class folder with 1 image", "csv": "2 files (a.csv, b.csv)"}
    assert words.get(suffix, f"1 file (inner/c.{suffix}) in folders: open") in caplog.text
    if suffix != "csv":  # Tables next to a folder are not read, and the folder is.
        assert len(reader) == len(own)


@pytest.mark.parametrize("suffix", ["npy", "png"])
def test_class_folders_are_read_with_the_folders_in_them(suffix: str, tmp_path: Path) -> None:
    for name in ("a/0", "a/inner/1", "b/inner/deep/2"):
        _write(tmp_path / f"{name}.{suffix}")
    reader = open_reader(str(tmp_path))
    assert list(reader.classes) == ["a", "b"]
    assert {reader.name(k): int(reader.labels[k]) for k in range(len(reader))} == {
        f"a/0.{suffix}": 0,
        f"a/inner/1.{suffix}": 0,
        f"b/inner/deep/2.{suffix}": 1,
    }


@pytest.mark.parametrize("kind", ["yolo", "masks"])
def test_pictures_next_to_folders_of_pictures_are_no_less_read(kind: str, tmp_path: Path) -> None:
    for name in ("a", "inner/b"):
        write(tmp_path / "images" / f"{name}.png", painted(8, 8, []))
        if kind == "masks":
            write(tmp_path / "masks" / f"{name}.png", np.ones((8, 8), np.uint8))
        else:
            label = tmp_path / "labels" / f"{name}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text("0 0.5 0.5 0.5 0.5\n")
    reader = open_reader(str(tmp_path))
    assert reader.format == kind
    names = sorted(reader.name(k) for k in range(len(reader)))
    assert names == ["images/a.png", "images/inner/b.png"]


def test_the_only_class_of_arrays_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path / "anat" / "0.npy")
    assert open_reader(str(tmp_path)).labels.tolist() == [0]
    assert "anat is the only class, so all labels are 0" in caplog.text

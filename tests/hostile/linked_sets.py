"""Data sets of each format that is a folder, and links that take the place of one of its parts."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
import pyarrow as pa
import zarr

from tests.readers.test_formats import (
    write_mds,
    write_parquet,
    write_tar,
    write_zarr2,
    write_zarr_shards,
)

Options = dict[str, Any]


def picture(number: int, suffix: str = ".jpg") -> bytes:
    """Return the bytes of a small picture, another one for each number."""
    side = 6 + number
    pixels = np.full((side, side, 3) if suffix == ".jpg" else (side, side), number, np.uint8)
    return bytes(cv2.imencode(suffix, pixels)[1].tobytes())


def _pictures(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(number, Path(name).suffix))


def _classes(folder: Path) -> Options:
    _pictures(folder, "a/0.jpg", "a/in/1.jpg", "b/0.jpg", "b/1.jpg")
    return {}


def _splits(folder: Path) -> Options:
    _pictures(folder, *(f"{s}/{c}/{k}.jpg" for s in ("train", "val") for c in "ab" for k in "01"))
    return {"split": "train"}


def _table(folder: Path) -> Options:
    _pictures(folder, "0.jpg", "1.jpg")
    (folder / "labels.csv").write_text("file_name,label\n0.jpg,x\n1.jpg,y\n")
    return {}


def _lists(folder: Path) -> Options:
    _pictures(folder, "train/a.jpg", "train/b.jpg")
    (folder / "train.csv").write_text("id,breed\na,x\nb,y\n")
    return {}


def _coco(folder: Path) -> Options:
    _pictures(folder, "train2017/a.jpg", "train2017/in/b.jpg")
    (folder / "annotations").mkdir()
    images = [
        {"id": k, "file_name": name, "height": 6 + k, "width": 6 + k}
        for k, name in enumerate(("a.jpg", "in/b.jpg"))
    ]
    box = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 2, 2]}
    whole = {"images": images, "annotations": [box], "categories": [{"id": 1, "name": "c"}]}
    (folder / "annotations/instances_train2017.json").write_text(json.dumps(whole))
    return {}


def _yolo(folder: Path) -> Options:
    _pictures(folder, "images/train/a.jpg", "images/train/b.jpg")
    (folder / "labels/train").mkdir(parents=True)
    for name in "ab":
        (folder / f"labels/train/{name}.txt").write_text("0 .5 .5 .2 .2\n")
    (folder / "data.yaml").write_text("train: images/train\nnames: [c]\n")
    return {}


def _voc(folder: Path) -> Options:
    _pictures(folder, "JPEGImages/a.jpg", "JPEGImages/in/b.jpg")
    (folder / "Annotations/in").mkdir(parents=True)
    edges = "<xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax>"
    box = f"<object><name>c</name><bndbox>{edges}</bndbox></object>"
    for name in ("a", "in/b"):
        (folder / f"Annotations/{name}.xml").write_text(f"<annotation>{box}</annotation>")
    (folder / "ImageSets/Main").mkdir(parents=True)
    (folder / "ImageSets/Main/train.txt").write_text("a\nin/b\n")
    return {}


def _idx(folder: Path) -> Options:
    (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x02\0\0\0\2\0\0\0\3abcdef")
    (folder / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\2\0\1")
    return {}


def _yolo_list(folder: Path) -> Options:
    _yolo(folder)
    (folder / "train.txt").write_text("images/train/a.jpg\nimages/train/b.jpg\n")
    (folder / "data.yaml").write_text("train: train.txt\nnames: [c]\n")
    return {}


def _masks(folder: Path) -> Options:
    _pictures(folder, "images/train/a.jpg", "images/train/b.jpg")
    _pictures(folder, "masks/train/a.png", "masks/train/b.png")
    (folder / "classes.txt").write_text("one\ntwo\n")
    return {}


def _arrays(folder: Path) -> Options:
    for name in "ab":
        (folder / name).mkdir()
        for number in range(2):
            np.save(folder / name / f"{number}.npy", np.full((2, 3 + number, 4), number))
    return {}


def _pairs(folder: Path) -> Options:
    for side in ("imagesTr", "labelsTr"):
        (folder / side).mkdir()
        for number in range(2):
            np.save(folder / side / f"{number}.npy", np.full((2, 3, 4), number))
    (folder / "dataset.json").write_text('{"name": "x", "labels": {"0": "none"}}')
    return {}


def _side_by_side(folder: Path) -> Options:
    np.save(folder / "x.npy", np.arange(12).reshape(4, 3))
    np.save(folder / "y.npy", np.arange(4))
    return {}


def _saved(folder: Path) -> Options:
    names = []
    for part in range(2):
        table = pa.table({"x": [part, 2, 3], "label": [0, 1, part]})
        names.append({"filename": f"data-0000{part}-of-00002.arrow"})
        with (
            pa.OSFile(str(folder / names[-1]["filename"]), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    (folder / "dataset_info.json").write_text("{}")
    return {}


def _hdf5(folder: Path) -> Options:
    import h5py

    for number in range(2):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x"] = np.full((4, 3), number)
            file.create_dataset("z", data=np.full((4, 3), number), chunks=(2, 3))
    return {}


def _written(write: Callable[[Path], str], inner: str = "") -> Callable[[Path], Options]:
    def make(folder: Path) -> Options:
        write(folder)
        if inner:
            for path in sorted((folder / inner).iterdir()):
                path.rename(folder / path.name)
            (folder / inner).rmdir()
        return {}

    return make


def _ome(folder: Path) -> Options:
    root = zarr.open_group(str(folder), mode="w", zarr_format=2)
    scales: Any = [{"version": "0.4", "datasets": [{"path": "0"}]}]
    root.attrs["multiscales"] = scales
    root.create_array("0", data=np.arange(48).reshape(2, 4, 6), chunks=(1, 4, 6))
    labels = root.create_group("labels")
    labels.attrs["labels"] = ["cells"]
    cells = labels.create_group("cells")
    cells.attrs["multiscales"] = scales
    cells.create_array("0", data=np.ones((2, 4, 6), np.uint8), chunks=(2, 4, 6))
    return {}


FORMATS: Final[dict[str, Callable[[Path], Options]]] = {
    "classes": _classes,
    "splits": _splits,
    "table": _table,
    "lists": _lists,
    "coco": _coco,
    "yolo": _yolo,
    "yolo list": _yolo_list,
    "voc": _voc,
    "idx": _idx,
    "masks": _masks,
    "arrays": _arrays,
    "pairs": _pairs,
    "side by side": _side_by_side,
    "hdf5": _hdf5,
    "arrow": _saved,
    "parquet": _written(write_parquet),
    "tar": _written(write_tar),
    "mds": _written(write_mds),
    "zarr 2": _written(write_zarr2, "a.zarr"),
    "zarr 3": _written(write_zarr_shards, "a.zarr"),
    "ome-zarr": _ome,
}


# What takes a part's place. Each returns True if all samples are still to be read.


def _inside(part: Path, root: Path) -> bool:
    kept = _kept(part, root)
    kept.parent.mkdir()
    part.rename(kept)
    part.symlink_to(os.path.relpath(kept, part.parent))
    return True


def _kept(part: Path, root: Path) -> Path:
    """Return a place in the data set that its readers do not list."""
    if any((root / mark).exists() for mark in ("zarr.json", ".zgroup")):
        # Zarr takes folders of a group for its members, and looks at chunks of arrays by name.
        arrays = [root / name for name in ("label", "x", "0", "labels/cells/0")]
        root = next(each for each in arrays if each.is_dir() and part not in (each, *each.parents))
    return root / ".kept" / part.name


def _inside_by_full_path(part: Path, root: Path) -> bool:
    _inside(part, root)
    kept = part.resolve()
    part.unlink()
    part.symlink_to(kept)
    return True


def _outside(part: Path, root: Path) -> bool:
    moved = root.parent / "outside" / part.name
    moved.parent.mkdir()
    part.rename(moved)
    part.symlink_to(moved)
    return False


def _outside_by_dots(part: Path, root: Path) -> bool:
    _outside(part, root)
    part.unlink()
    part.symlink_to(os.path.relpath(root.parent / "outside" / part.name, part.parent))
    return False


def _outside_by_two(part: Path, root: Path) -> bool:
    _outside(part, root)
    (root / ".way").symlink_to(root.parent / "outside")
    part.unlink()
    part.symlink_to(root / ".way" / part.name)
    return False


def _circle(part: Path, root: Path) -> bool:
    _removed(part)
    part.symlink_to(root / ".back")
    (root / ".back").symlink_to(part)
    return False


def _to_itself(part: Path, root: Path) -> bool:
    _removed(part)
    part.symlink_to(".")
    return False


def _dangling(part: Path, root: Path) -> bool:
    _removed(part)
    part.symlink_to(root / ".gone")
    return False


def _fifo(part: Path, root: Path) -> bool:
    _removed(part)
    os.mkfifo(root / ".fifo")
    part.symlink_to(root / ".fifo")
    return False


def _socket(part: Path, root: Path) -> bool:
    _removed(part)
    here = os.getcwd()
    os.chdir(root)  # The path of a socket is short.
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(".socket")
    finally:
        os.chdir(here)
    part.symlink_to(root / ".socket")
    return False


def _device(part: Path, root: Path) -> bool:
    _removed(part)
    part.symlink_to("/dev/zero")
    return False


def _removed(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink()


REPLACEMENTS: Final[dict[str, Callable[[Path, Path], bool]]] = {
    "inside": _inside,
    "inside by full path": _inside_by_full_path,
    "outside": _outside,
    "outside by dots": _outside_by_dots,
    "outside by two": _outside_by_two,
    "circle": _circle,
    "to itself": _to_itself,
    "dangling": _dangling,
    "fifo": _fifo,
    "socket": _socket,
    "device": _device,
}


def parts_of(root: Path) -> list[Path]:
    """Return the files and folders below a data set's folder that a link may replace, sorted."""
    return sorted(each.relative_to(root) for each in root.rglob("*"))


def remove(part: Path) -> None:
    """Remove a part, as a data set without it."""
    _removed(part)

"""Patterns, folders and lists of data sets, with names of fields, in every format."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import expand
from dlio.errors import SourceError, UsageError

_PARTS = 3


def _values(k: int) -> dict[str, Any]:
    rng = np.random.default_rng(k)
    return {
        "image": rng.integers(0, 255, (k + 2, 4), np.uint8),
        "label": np.arange(k + 2) + 10 * k,
        "other": rng.random(k + 2),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`<format>/part-<k>.<format>`, with the same rows in each format."""
    root = tmp_path_factory.mktemp("several")
    for name in ("h5", "zarr", "parquet", "npz", "csv"):
        (root / name).mkdir()
    for k in range(_PARTS):
        values = _values(k)
        with h5py.File(root / f"h5/part-{k}.h5", "w") as file:
            for name, array in values.items():
                file[name] = array
        group = zarr.open_group(str(root / f"zarr/part-{k}.zarr"), mode="w")
        for name, array in values.items():
            group.create_array(name, data=array)
        columns = {**values, "image": list(values["image"])}
        pq.write_table(pa.table(columns), root / f"parquet/part-{k}.parquet")
        np.savez(root / f"npz/part-{k}.npz", **values)
        rows = zip(values["image"][:, 0], values["label"], values["other"], strict=True)
        lines = ["image,label,other", *(",".join(map(str, row)) for row in rows)]
        (root / f"csv/part-{k}.csv").write_text("\n".join(lines) + "\n")
    return root


def _paths(folder: Path, name: str) -> list[Any]:
    files = [f"{folder}/{name}/part-{k}.{name}" for k in range(_PARTS)]
    fields = "::image,label"
    paths: list[Any] = [
        f"{folder}/{name}/*.{name}{fields}",
        f"{folder}/{name}/part-?.{name}{fields}",
        f"{folder}/{name}/part-{{0..{_PARTS - 1}}}.{name}{fields}",
        f"{folder}/{name}/part-{{0,1,2}}.{name}{fields}",
        [file + fields for file in files],
        [*files[:-1], files[-1] + fields],
    ]
    return paths if name in ("npz", "csv", "zarr") else [*paths, f"{folder}/{name}{fields}"]


@pytest.mark.parametrize("name", ["h5", "zarr", "parquet", "npz", "csv"])
@pytest.mark.daily("h5", "zarr", "npz", "csv")
def test_files_with_fields_are_one_data_set(folder: Path, name: str) -> None:
    labels = np.concatenate([_values(k)["label"] for k in range(_PARTS)])
    images = np.concatenate([_values(k)["image"] for k in range(_PARTS)])
    for path in _paths(folder, name):
        reader = open_reader(path)
        assert [field for field, _ in reader.schema.fields] == ["image", "label"]
        assert reader.labels.tolist() == labels.tolist()
        samples = [reader.schema.split(each) for each in reader.read(np.arange(len(reader)))]
        for k, sample in enumerate(samples):
            assert sample["label"] == labels[k]
            assert np.array_equal(sample["image"], images[k, 0] if name == "csv" else images[k])
        reader.close()


def test_a_relative_pattern_with_fields(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(open_reader("parquet/*.parquet::image,label")) == 9
    assert expand("h5/part-{0,1}.h5::a,b") == ["h5/part-0.h5::a,b", "h5/part-1.h5::a,b"]


def test_fields_of_a_data_set_without_fields_are_an_error(pictures: Path) -> None:
    with pytest.raises(SourceError, match=r"names image, but .*: give the path alone"):
        open_reader(f"{pictures}::image")


def test_lists_of_class_folders_have_the_classes_of_all(pictures: Path, tmp_path: Path) -> None:
    """Pictures of a class have one label, whichever folder they are in."""
    first, second = (Path(shutil.copytree(pictures, tmp_path / name)) for name in "ab")
    names = sorted(path.name for path in pictures.iterdir())
    shutil.rmtree(first / names[0])
    (second / names[2]).rename(second / "a-new-class")
    same = open_reader([str(pictures), str(pictures)])
    assert (len(same), list(same.classes)) == (24, names)
    with dlio.open([str(first), str(second)], tiers="none", image_size=None) as data:
        assert list(data.classes) == sorted([*names, "a-new-class"])
        assert len(data) == 8 + 12
        for k in range(len(data)):
            where = Path(data.reader.name(k).split(": ")[-1]).parts[0]
            sample: Any = data[k]
            assert data.classes[int(sample["label"])] == where
            assert data.targets[k] == int(sample["label"])
        again = pickle.loads(pickle.dumps(data.reader))
        assert again.fingerprint == data.reader.fingerprint


def test_lists_of_different_data_sets_are_refused(folder: Path, pictures: Path) -> None:
    stores = [f"{folder}/zarr/part-0.zarr::image", f"{folder}/zarr/part-1.zarr::label"]
    assert [name for name, _ in open_reader(stores).schema.fields] == ["label"]
    np.save(folder / "zarr" / "x.npy", np.zeros(3))
    zarr.create_array(str(folder / "other.zarr"), data=np.zeros((3, 5)))
    with pytest.raises(UsageError, match=r"holds no 'image'|one by one"):
        open_reader([f"{folder}/zarr/part-0.zarr", f"{folder}/other.zarr::image"])
    with pytest.raises(UsageError, match="one by one"):
        open_reader([f"{folder}/zarr/part-0.zarr", f"{folder}/other.zarr"])

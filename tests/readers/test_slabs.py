"""`select=` reads the part of each sample that numpy's index gives, or is an error."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import dlio
from dlio.data.reader import open_reader
from dlio.errors import UsageError

_SHAPE = (6, 5, 4)
_PATHS = ("x.npy", "x.npz", "x.h5", "chunked.h5", "x.zarr")


@pytest.fixture(scope="module")
def volumes() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random((7, *_SHAPE), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, volumes: np.ndarray[Any, Any]) -> Path:
    root = tmp_path_factory.mktemp("slabs")
    np.save(root / "x.npy", volumes)
    np.savez(root / "x.npz", x=volumes)
    np.savez(root / "two.npz", x=volumes, mask=volumes[:, :, :, 0], label=np.arange(7))
    np.save(root / "numbers.npy", np.arange(7))
    (root / "x.csv").write_text("a,b\n1,2\n3,4\n")
    for name, chunks in (("x", None), ("chunked", (2, 3, 5, 4))):
        with h5py.File(root / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=volumes, chunks=chunks)
    with h5py.File(root / "text.h5", "w") as file:
        file["x"], file["text"] = volumes, ["a"] * 7
    zarr.create_array(str(root / "x.zarr"), data=volumes)
    return root


@pytest.mark.parametrize("name", _PATHS)
@pytest.mark.parametrize(
    "part",
    [
        (slice(0, 3), ...),
        (..., slice(1, 3)),
        (..., -1),
        (2, ..., slice(None, None, 2)),
        (slice(1, 100),),
        [slice(-2, None), 3],
        slice(2, 4),
        -1,
        (np.int64(3),),
        (1, 2, 3),
        (slice(0, 2), slice(0, 2), slice(0, 2), ...),
        (...,),
        (),
    ],
    ids=str,
)
def test_parts_are_those_of_numpy(
    folder: Path, volumes: np.ndarray[Any, Any], name: str, part: Any
) -> None:
    index = (slice(None), *(part if isinstance(part, tuple | list) else [part]))
    with dlio.open(str(folder / name), select=part, tiers="none") as data:
        values = [next(iter(data[k].values())) for k in range(len(data))]
    assert np.array_equal(np.stack([np.asarray(value) for value in values]), volumes[index])


@pytest.mark.parametrize("name", _PATHS)
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((0, 0, 0, 0), "has 4 dimensions"),
        ((slice(None),) * 4, "has 4 dimensions"),
        ((0, ..., ...), "2 ellipses"),
        ((6,), "within"),
        ((-7,), "within"),
        ((True,), "within"),
        ((None,), "within"),
        ((1.0,), "within"),
        ("x", "within"),
        ((slice("a"),), "within"),
        ((slice(3, 3),), "empty"),
        ((slice(9, 12),), "empty"),
        ((slice(None, None, -1),), "backwards"),
        ({"y": (0,)}, "names 'y'"),
    ],
    ids=str,
)
def test_parts_that_samples_do_not_have_are_refused(
    folder: Path, name: str, part: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        open_reader(str(folder / name), select=part)
    assert "\n" not in str(raised.value)


def test_a_part_without_a_name_is_of_all_fields_with_dimensions(
    folder: Path, volumes: np.ndarray[Any, Any]
) -> None:
    with dlio.open(f"{folder}/two.npz", select=(slice(0, 2), ..., 1), tiers="none") as data:
        sample: Any = data[3]
        assert np.array_equal(sample["x"], volumes[3, :2, :, 1])
        assert np.array_equal(sample["mask"], volumes[3, :2, 1, 0])
        assert sample["label"] == 3
    with pytest.raises(UsageError, match=r"'mask'.*part by field"):
        open_reader(f"{folder}/two.npz", select=(0, 0, 0))
    with dlio.open(f"{folder}/two.npz", select={"x": (0, 0, 0)}, tiers="none") as data:
        sample = data[3]
        assert sample["x"] == volumes[3, 0, 0, 0]
        assert sample["mask"].shape == (6, 5)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("numbers.npy", (slice(0, 2),)),
        ("x.csv", (slice(0, 2), ...)),
        ("x.csv", {"a": (0,)}),
        ("text.h5::text", (slice(0, 2),)),
        ("text.h5", {"text": (slice(0, 2),)}),
        ("two.npz", {"label": (0,)}),
        ("two.npz::x", {"mask": (0,)}),
    ],
    ids=str,
)
def test_data_without_such_dimensions_are_refused(folder: Path, path: str, part: Any) -> None:
    with pytest.raises(UsageError, match=r"leave it out|choose from"):
        open_reader(f"{folder}/{path}", select=part)


def test_options_of_an_open_reader_are_not_ignored(folder: Path) -> None:
    reader = open_reader(str(folder / "x.npy"))
    with pytest.raises(UsageError, match="open already"):
        dlio.open(reader, select=(0,))

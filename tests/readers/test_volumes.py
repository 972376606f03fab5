"""A folder of volumes of different shapes: one file, one sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import dlio
from dlio.errors import UsageError

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "all": [(6, 8, 8), (9, 7, 5), (4, 8, 9)],
    "depth": [(6, 8, 8), (9, 8, 8), (4, 8, 8)],
    "channels": [(2, 6, 8, 8), (2, 9, 7, 5), (2, 4, 8, 9)],
    "slices": [(6, 8), (9, 7), (6, 9)],
}


def _write(folder: Path, kind: str, arrays: Sequence[Mapping[str, npt.NDArray[Any]]]) -> str:
    for k, each in enumerate(arrays):
        path = folder / f"scan-{k}.{kind}"
        if kind == "npy":
            np.save(path, each["volume"])
        elif kind == "npz":
            np.savez(path, **each)  # type: ignore[arg-type]
        else:
            with h5py.File(path, "w") as file:
                for name, array in each.items():
                    file[name] = array
    return str(folder)


@pytest.mark.parametrize("kind", ["npy", "npz", "h5"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_each_file_is_a_sample(shapes: str, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: list[dict[str, npt.NDArray[Any]]] = [
        {"mask": rng.integers(0, 2, s, np.uint8), "volume": rng.random(s, np.float32)}
        for s in SHAPES[shapes]
    ]
    path = _write(tmp_path, kind, arrays)
    with dlio.open(path, tiers="ram:1MiB") as data:
        assert len(data) == 3
        assert [data.reader.name(k) for k in range(3)] == [f"scan-{k}.{kind}" for k in range(3)]
        for k, each in enumerate(arrays):
            sample = data[k]
            if kind == "npy":
                assert (sample["data"].numpy() == each["volume"]).all()
                continue
            for name, array in each.items():
                assert (sample[name].numpy() == array).all()
        loader = dlio.DataLoader(data, batch_size=1)
        assert len(loader) == 3
        assert sum(1 for _ in loader) == 3


@pytest.mark.parametrize("kind", ["npy", "npz", "h5"])
def test_rows_stay_rows_where_files_are_parts(kind: str, tmp_path: Path) -> None:
    pictures = [{"volume": np.zeros((n, 8, 8), np.uint8)} for n in (5, 7)]
    assert len(dlio.open(_write(tmp_path, kind, pictures), tiers="none")) == 12
    assert len(dlio.open(str(tmp_path), samples="files", tiers="none")) == 2
    for part in tmp_path.iterdir():
        part.unlink()
    equal = [{"volume": np.zeros((5, 8, 8), np.float32)} for _ in range(2)]
    assert len(dlio.open(_write(tmp_path, kind, equal), tiers="none")) == 10
    assert len(dlio.open(str(tmp_path), samples="files", tiers="none")) == 2
    with pytest.raises(UsageError, match="choose rows or files"):
        dlio.open(str(tmp_path), samples="slices", tiers="none")


def test_a_guess_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scans = [{"volume": np.zeros((n, 8, 8), np.float32)} for n in (5, 7)]
    path = _write(tmp_path, "h5", scans)
    assert len(dlio.open(path, tiers="none")) == 2
    assert "samples='rows'" in caplog.text
    assert len(dlio.open(path, samples="rows", tiers="none")) == 12


@pytest.mark.parametrize(
    ("shapes", "dtype", "is_picture"),
    [
        ([(16, 24, 3), (16, 24, 3)], np.uint8, True),
        ([(20, 24, 3), (16, 24, 3)], np.uint8, True),
        ([(16, 16, 1), (16, 16, 1)], np.float32, True),
        ([(100, 12, 3), (100, 12, 3)], np.float32, False),  # Accelerations along three axes.
        ([(50, 28, 28), (60, 28, 28)], np.uint8, False),
        ([(100, 3), (100, 3)], np.uint8, False),
    ],
)
def test_files_that_may_be_pictures_are_told_to_be_rows(
    shapes: list[tuple[int, ...]],
    dtype: Any,
    is_picture: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = _write(tmp_path, "npy", [{"volume": np.zeros(shape, dtype)} for shape in shapes])
    assert len(dlio.open(path, tiers="none")) == sum(shape[0] for shape in shapes)
    assert ("may be one picture" in caplog.text) == is_picture
    caplog.clear()
    for choice, count in (("rows", sum(shape[0] for shape in shapes)), ("files", 2)):
        assert len(dlio.open(path, samples=choice, tiers="none")) == count
    assert not caplog.text


@pytest.mark.parametrize("kind", ["npy", "npz", "h5"])
def test_rows_of_several_lengths_make_files_samples_which_is_told(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slices = [{"volume": np.zeros((8, width), np.float32)} for width in (5, 7)]
    assert len(dlio.open(_write(tmp_path, kind, slices), tiers="none")) == 2
    assert "each of its 2 files is read as one sample, as the rows of their arrays" in caplog.text


def test_labels_mean_rows(tmp_path: Path) -> None:
    parts: list[dict[str, npt.NDArray[Any]]] = [
        {"volume": np.zeros((n, 8, 8), np.float32), "label": np.arange(n, dtype=np.int64)}
        for n in (5, 7)
    ]
    assert len(dlio.open(_write(tmp_path, "h5", parts), tiers="none")) == 12


@pytest.mark.parametrize("kind", ["npy", "npz", "h5"])
@pytest.mark.parametrize(
    ("shape", "is_told"), [((64, 64), True), ((64, 60), False), ((4, 4), False)]
)
def test_files_of_a_square_each_may_be_slices_which_is_told(
    shape: tuple[int, int],
    is_told: bool,
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    array = np.zeros(shape, np.float32)
    path = _write(tmp_path, kind, [{"volume": array, "mask": array}] * 3)
    with dlio.open(path, tiers="none") as data:
        assert len(data) == 3 * shape[0]
    assert ("each file may be one picture" in caplog.text) == is_told
    with dlio.open(path, tiers="none", samples="files") as data:
        assert len(data) == 3

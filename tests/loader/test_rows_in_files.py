"""Rows of arrays and members of tars in local files, which native threads read where they lie, are
those of Python, to the last bit, and cost no more bytes than they have."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest

import dlio
from dlio.errors import SourceError
from dlio.image.native import pool_library
from tests.image.jpegs import drawn
from tests.loader.native_checks import Spy, check_same

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())
COUNT = 4000


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    table = rng.standard_normal((COUNT, 7)).astype(np.float32)
    small = rng.integers(-100, 100, COUNT)
    np.save(folder / "one.npy", table)
    np.save(folder / "numbers.npy", small.astype(np.int32))
    np.save(folder / "turned.npy", table.astype(">f4"))
    np.save(folder / "fortran.npy", np.asfortranarray(table))
    np.savez(
        folder / "several.npz", x=table, y=small.astype(np.int16), seen=small > 0, dose=table[:, 0]
    )
    np.savez_compressed(folder / "packed.npz", x=table, y=small)
    for number in range(3):
        with h5py.File(folder / f"part-{number}.h5", "w") as file:
            file["x"] = table[number : 1000 + 500 * number]
            file["y"] = small[number : 1000 + 500 * number]
            file["image"] = rng.integers(0, 256, (1000 + 499 * number, 4, 4), np.uint8)
    with h5py.File(folder / "texts.h5", "w") as file:
        file["x"] = table
        file["label"] = np.array(["dog", "cat", "cow"], "S")[small % 3]
    with h5py.File(folder / "chunks.h5", "w") as file:
        file["x"] = table
        file.create_dataset("y", data=small, chunks=(50,))
    names = {
        "one": "one.npy",
        "numbers": "numbers.npy",
        "turned": "turned.npy",
        "fortran": "fortran.npy",
        "several": "several.npz",
        "packed": "packed.npz",
        "parts": "part-*.h5",
        "texts": "texts.h5",
        "chunks": "chunks.h5",
    }
    return {name: folder / each for name, each in names.items()}


IN_FILES = {"one", "numbers", "several", "parts", "texts"}
"""Sources whose rows lie in files as batches have them, each field by itself."""


@pytest.mark.parametrize(
    "name",
    ["one", "numbers", "several", "parts", "texts", "turned", "fortran", "packed", "chunks"],
)
def test_rows_are_those_of_python(
    name: str, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    check_same(sources[name], monkeypatch, {"tiers": "none"}, batch_size=200)
    assert spy.refused == 0
    assert (spy.given > 0) == (name in IN_FILES)


@pytest.mark.parametrize("name", ["several", "parts"])
def test_rows_of_which_a_tier_has_some_are_those_of_python(
    name: str, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    check_same(sources[name], monkeypatch, {"tiers": "ram:200KiB"}, batch_size=200)
    assert spy.refused == 0
    assert spy.given > COUNT


def test_a_part_of_rows_is_left_to_python(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    opened = {"tiers": "none", "select": slice(2, 5)}
    check_same(sources["one"], monkeypatch, opened, batch_size=200)
    assert spy.given == 0


def test_views_read_the_rows_that_they_have(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    def half(data: dlio.Dataset) -> dlio.Dataset:
        return data.split(train=0.5, val=0.5)["val"]

    check_same(sources["parts"], monkeypatch, {"tiers": "none"}, view=half)
    assert spy.given > 0


def test_rows_cost_their_bytes_and_are_counted(sources: dict[str, Path]) -> None:
    with (
        dlio.open(str(sources["several"]), tiers="none") as data,
        dlio.DataLoader(data, 50, shuffle=True) as loader,
    ):
        list(loader)
        assert loader.stats()["bytes"]["source"] == COUNT * (7 * 4 + 2 + 1 + 4)


def test_a_file_that_is_cut_off_is_told_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", y=np.arange(9000), x=np.ones((9000, 3)))
    with (
        dlio.open(str(tmp_path / "x.npz"), tiers="none") as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        assert len(list(loader)) == 900
        with open(tmp_path / "x.npz", "r+b") as file:
            file.truncate(100_000)
        with pytest.raises(SourceError, match=r"x\.npz"):
            list(loader)


def test_many_files_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of files that may not be held open are Python's."""
    monkeypatch.setattr("dlio.data.open_files._MOST", 4)
    for number in range(40):
        np.save(tmp_path / f"{number:02}.npy", np.full((5, 2), number))
    opened: dict[str, Any] = {"tiers": "none", "samples": "rows"}
    with (
        dlio.open(str(tmp_path / "*.npy"), **opened) as data,
        dlio.DataLoader(data, 50, shuffle=True) as loader,
    ):
        made = np.concatenate([batch["data"].numpy() for batch in loader])
    assert np.array_equal(np.sort(made[:, 0]), np.repeat(np.arange(40), 5))


def _tar(path: Path, numbers: range, kinds: Sequence[str], compressed: bool = False) -> None:
    rng = np.random.default_rng(numbers.start)
    with tarfile.open(path, "w:gz" if compressed else "w") as tar:
        for number in numbers:
            for kind in kinds:
                if kind == "jpg":
                    body = drawn(rng, "baseline", 40)
                elif kind == "png":
                    body = cv2.imencode(".png", rng.integers(0, 256, (20, 30, 3), np.uint8))[
                        1
                    ].tobytes()
                else:
                    body = str(number % 5).encode()
                info = tarfile.TarInfo(f"{number:05}.{kind}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
            if kinds == ["jpg", "cls"] and number % 7 == 0:
                link = tarfile.TarInfo(f"{number:05}again.jpg")
                link.type, link.linkname = tarfile.LNKTYPE, f"{number:05}.jpg"
                tar.addfile(link)
                info.name = f"{number:05}again.cls"
                tar.addfile(info, io.BytesIO(body))


TARS: dict[str, tuple[Sequence[str], bool]] = {
    "pictures and classes": (["jpg", "cls"], True),
    "classes first": (["cls", "png"], True),
    "pictures alone": (["jpg"], True),
    "two numbers": (["jpg", "cls", "index"], False),
}
"""Kinds of members, and whether a sample is a member, and a number that is known."""


@pytest.mark.parametrize("case", TARS)
def test_members_of_tars_are_those_of_python(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    kinds, is_plain = TARS[case]
    for number in range(2):
        _tar(tmp_path / f"{number}.tar", range(50 * number, 50 * number + 50), kinds)
    check_same(tmp_path, monkeypatch, {"tiers": "none", "image_size": 16})
    assert (spy.given > 0) == is_plain


def test_members_of_compressed_tars_are_those_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tar(tmp_path / "x.tar.gz", range(50), ["jpg", "cls"], compressed=True)
    check_same(tmp_path / "x.tar.gz", monkeypatch, {"tiers": "none", "image_size": 16})


def test_pictures_of_a_tar_cost_their_bytes(tmp_path: Path) -> None:
    _tar(tmp_path / "x.tar", range(60), ["jpg", "cls"])
    with tarfile.open(tmp_path / "x.tar") as tar:
        sizes = {each.name: each.size for each in tar if each.name.endswith("jpg")}
        links = {each.name: each.linkname for each in tar if each.islnk()}
    wanted = sum(8 + sizes[links.get(name, name)] for name in sizes)
    with (
        dlio.open(str(tmp_path / "x.tar"), tiers="none", image_size=16) as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        list(loader)
        assert loader.stats()["bytes"]["source"] == wanted

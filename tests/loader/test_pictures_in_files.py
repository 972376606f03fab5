"""Pictures that are files of their own: native threads, and reads of many files by one call, give
the bytes that Python reads one by one, and leave to it files that are not the listed ones."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio.image.native import listed_files, pool_library
from dlio.util.link_free import opens_at_once
from tests.image.jpegs import drawn
from tests.loader.native_checks import Spy, check_same

pytestmark = pytest.mark.skipif(
    pool_library.find() is None or not opens_at_once(), reason=pool_library.name()
)
COUNT = 250
NAMES = ("plain.jpg", "with space.JPEG", "Bär-ü.jpg", "x" * 240 + ".jpg", "\udcff\udcfe.jpg")


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def _picture(rng: np.random.Generator, suffix: str) -> bytes:
    if suffix == ".png":
        pixels = rng.integers(0, 256, (20, 30, 3), np.uint8)
        return cv2.imencode(".png", pixels)[1].tobytes()
    return drawn(rng, "baseline", 40)


def _classes(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        suffix = (".jpg", ".png")[number % 4 == 3]
        inner = folder / f"class {number % 3}" / ("deep/er" if number % 5 == 0 else ".")
        inner.mkdir(parents=True, exist_ok=True)
        (inner / f"{number}{suffix}").write_bytes(_picture(rng, suffix))
    for name in NAMES:
        (folder / "class 1" / name).write_bytes(_picture(rng, ".jpg"))
    return folder


def _flat(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    folder.mkdir()
    for number in range(COUNT):
        (folder / f"{number}.jpg").write_bytes(_picture(rng, ".jpg"))
    return folder


def _table(folder: Path) -> Path:
    _flat(folder)
    rows = "".join(f"{number}.jpg,{number % 4}\n" for number in range(COUNT))
    (folder / "labels.csv").write_text(f"file,label\n{rows}")
    return folder


@pytest.mark.parametrize("tiers", ["none", "ram:80KiB"])
@pytest.mark.parametrize("make", [_classes, _flat, _table], ids=lambda make: make.__name__)
def test_batches_are_those_of_python(
    make: Callable[[Path], Path],
    tiers: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spy: Spy,
) -> None:
    check_same(make(tmp_path / "data"), monkeypatch, {"tiers": tiers, "image_size": 16})
    assert spy.given > 0
    assert spy.refused == 0


def test_files_cost_their_bytes_and_stay_closed(tmp_path: Path) -> None:
    folder = _classes(tmp_path / "data")
    sizes = sum(8 + each.stat().st_size for each in folder.rglob("*") if each.is_file())
    with (
        dlio.open(str(folder), tiers="none", image_size=16) as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        list(loader)
        before = len(os.listdir("/proc/self/fd"))
        list(loader)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert loader.stats()["bytes"]["source"] == sizes


def test_links_within_a_data_set_are_read_and_links_out_of_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    folder, outside = _classes(tmp_path / "data"), tmp_path / "outside.jpg"
    outside.write_bytes((folder / "class 0" / "3.png").read_bytes())
    (folder / "class 0" / "inside.jpg").symlink_to("../class 1/plain.jpg")
    check_same(folder, monkeypatch, {"tiers": "none", "image_size": 16})
    assert spy.refused > 0  # A link is Python's.
    (folder / "class 2" / "outside.png").symlink_to(outside)
    with pytest.raises(SourceError, match=r"outside\.png is a link to"):
        _read_all(folder)
    refused = spy.refused
    opened = {"tiers": "none", "image_size": 16, "follow_links": True}
    check_same(folder, monkeypatch, opened)
    assert spy.refused == refused


def _read_all(folder: Path) -> int:
    with (
        dlio.open(str(folder), tiers="none", image_size=16) as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        return sum(len(labels) for _, labels in loader)


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _cut_off(path: Path) -> None:
    os.truncate(path, 5)


def _another(path: Path) -> None:
    """Have other bytes of the same size, in the same file."""
    data = path.read_bytes()
    path.write_bytes(bytes(reversed(data)))


def _gone(path: Path) -> None:
    path.unlink()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_out(path: Path) -> None:
    """Be exchanged for a link to the same file, outside."""
    moved = path.parent.parent.parent / "moved.png"
    path.rename(moved)
    path.symlink_to(moved)


CHANGES = (_longer, _cut_off, _another, _gone, _pipe, _folder, _link_out)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_is_not_the_listed_one_is_an_error_with_its_name(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = _classes(tmp_path / "data")
    path = folder / "class 0" / "3.png"
    reader = open_reader(str(folder))
    with (
        dlio.open(str(folder), tiers="none", image_size=16) as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        assert sum(len(labels) for _, labels in loader) == len(data)
        change(path)
        with pytest.raises(SourceError, match=r"class 0/3\.png"):
            list(loader)
    with pytest.raises(SourceError, match=r"class 0/3\.png"):
        reader.read(np.arange(len(reader)))
    reader.close()


@pytest.mark.parametrize("make", [_classes, _flat], ids=lambda make: make.__name__)
def test_many_files_by_one_call_are_those_one_by_one(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(str(make(tmp_path / "data")))
    calls: list[int] = []
    library = listed_files._library()
    assert library is not None

    def call(*arguments: object) -> None:
        calls.append(len(arguments))
        library.dlio_files_read(*arguments)

    monkeypatch.setattr(listed_files, "_library", lambda: SimpleNamespace(dlio_files_read=call))
    numbers = np.random.default_rng(3).permutation(len(reader))
    together = [bytes(each) for each in reader.read(numbers)]
    assert len(calls) == 1
    assert together == [bytes(reader.read(numbers[k : k + 1])[0]) for k in range(len(numbers))]
    assert len(calls) == 1
    monkeypatch.setattr(listed_files, "_library", lambda: None)
    assert together == [bytes(each) for each in reader.read(numbers)]
    assert reader.read(numbers[:0]) == []
    reader.close()

"""A source that was rewritten is not served stale; one whose permissions changed is the same."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
import zarr

import dlio
from dlio.data.identity import content_sample, spread
from dlio.data.reader import open_reader
from dlio.data.source import File
from dlio_staging.pack_folder import pack
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions

OLD = 1_000_000_000


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def _settle(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        os.utime(path, (OLD, OLD))


def _folder(pictures: Path, root: Path) -> Path:
    return Path(shutil.copytree(pictures, root / "folder"))


def _packed(format_: str) -> Callable[[Path, Path], Path]:
    def make(pictures: Path, root: Path) -> Path:
        pack(str(pictures), str(root / "packed"), format=format_)
        return root / "packed"

    return make


def _hdf5(_: Path, root: Path) -> Path:
    (root / "arrays").mkdir()
    with h5py.File(root / "arrays" / "a.h5", "w") as file:
        file["x"] = np.arange(40_000, dtype=np.int64)  # Contiguous, at the end of the file.
    return root / "arrays"


def _zarr(_: Path, root: Path) -> Path:
    (root / "arrays").mkdir()
    group = zarr.open_group(str(root / "arrays" / "a.zarr"), mode="w")
    rows = np.arange(4000, dtype=np.int64).reshape(400, 10)
    group.create_array("x", data=rows, chunks=(100, 10), compressors=None)
    return root / "arrays" / "a.zarr"


def _table(_: Path, root: Path) -> Path:
    (root / "table").mkdir()
    (root / "table" / "a.csv").write_text("x,label\n" + "1,0\n2,1\n" * 50)
    return root / "table" / "a.csv"


MAKERS: dict[str, Callable[[Path, Path], Path]] = {
    "folder": _folder,
    "hdf5": _hdf5,
    "tar": _packed("tar"),
    "zarr": _zarr,
    "table": _table,
}


def _rewrite(root: Path) -> None:
    """Change bytes of each data file; sizes, names and times of change stay."""
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".json":
            times = path.stat()
            data = bytearray(path.read_bytes())
            data[-2] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_rewritten_source_has_another_fingerprint(
    kind: str, pictures: Path, tmp_path: Path
) -> None:
    path = MAKERS[kind](pictures, tmp_path)
    _settle(path.parent)
    before = open_reader(str(path)).fingerprint
    assert open_reader(str(path)).fingerprint == before
    for each in path.parent.rglob("*"):
        each.chmod(each.stat().st_mode & ~0o022)
    assert open_reader(str(path)).fingerprint == before
    _rewrite(path)
    assert open_reader(str(path)).fingerprint != before


def test_a_staged_copy_of_a_rewritten_source_is_not_served(pictures: Path, tmp_path: Path) -> None:
    path = _folder(pictures, tmp_path)
    _settle(path)
    (tmp_path / "disk").mkdir()
    tiers = f"{tmp_path / 'disk'}:64MiB"
    assert stage(str(path), StageOptions(tiers=tiers)).read_bytes
    for each in path.rglob("*.jpg"):
        each.chmod(0o600)
    assert not stage(str(path), StageOptions(tiers=tiers)).read_bytes  # The same data set.
    file = sorted(path.rglob("*.jpg"))[5]
    times, size = file.stat(), file.stat().st_size
    other = sorted(path.rglob("*.jpg"))[6].read_bytes()
    file.write_bytes((other + bytes(size))[:size])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with dlio.open(str(path), tiers=tiers, image_size=None) as data:
        served = {bytes(data.reader.read(np.array([k]))[0][8:]) for k in range(len(data))}
        for _ in dlio.DataLoader(data, batch_size=1):
            pass
        stored = set()
        mounted = data.mounted
        assert mounted is not None
        for sample in range(len(data)):
            block, place = data.reader.layout.locate(np.array([sample]))
            payload, _ = mounted.hierarchy.read(sample, int(block[0]), int(place[0]))
            stored.add(bytes(payload)[8:])
        assert stored == served
        assert file.read_bytes() in stored


def test_copies_of_a_folder_are_one_data_set(pictures: Path, tmp_path: Path) -> None:
    path = _folder(pictures, tmp_path)
    _settle(path)
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    _settle(copy)
    assert open_reader(str(path)).fingerprint == open_reader(str(copy)).fingerprint


@pytest.mark.parametrize("size", [0, 1, 4096, 32768, 32769, 1 << 20])
def test_a_sample_changes_with_the_first_and_last_bytes(size: int, tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = bytearray(os.urandom(size))
    path.write_bytes(data)
    before = content_sample(str(path))
    assert content_sample(str(path)) == before
    for at in {0, size // 2, size - 1} if 0 < size <= 32768 else ({0, size - 1} if size else set()):
        data[at] ^= 1
        path.write_bytes(data)
        assert content_sample(str(path)) != before
        data[at] ^= 1


def test_numbers_are_spread_with_both_ends() -> None:
    assert spread(0, 8) == []
    assert spread(5, 8) == [0, 1, 2, 3, 4]
    assert spread(1000, 8)[0] == 0
    assert spread(1000, 8)[-1] == 999
    assert len(set(spread(1000, 8))) == 8


def test_a_remote_file_has_its_tag(pictures: Path) -> None:
    memory = fsspec.filesystem("memory")
    for label in "ab":
        memory.pipe(f"/identity/{label}/1.jpg", next(pictures.rglob("*.jpg")).read_bytes())
    before = open_reader("memory://identity").fingerprint
    stamp = File("memory://identity/a/1.jpg").stamp
    assert open_reader("memory://identity").fingerprint == before
    data = bytearray(memory.cat("/identity/a/1.jpg"))
    data[-3] ^= 1
    memory.pipe("/identity/a/1.jpg", bytes(data))
    assert File("memory://identity/a/1.jpg").stamp != stamp
    assert open_reader("memory://identity").fingerprint != before
    memory.rm("/identity", recursive=True)

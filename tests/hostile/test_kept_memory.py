"""Memory of decompressed files is bounded for a data set, not a file."""

import gc
import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import lz4.frame
import numpy as np
import pytest

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import file_at
from dlio.errors import SourceError
from dlio.util import limits
from dlio_readers import files as files_module
from dlio_readers import tar as tar_module
from dlio_readers.texttable import open_text_tables

_EACH = 1 << 20
"""Bytes that a file becomes, at least."""
_COUNT = 5


def _tables(folder: Path, number: int) -> None:
    text = b"x,y\n" + b"1111,2222\n" * (_EACH // 10)
    (folder / f"{number}.csv.gz").write_bytes(gzip.compress(text))


def _idx(folder: Path, number: int) -> None:
    names = ("t10k-images-idx2", "t10k-labels-idx1", "train-images-idx2", "train-labels-idx1")
    if number < len(names):
        dimensions = int(names[number][-1])
        head = bytes([0, 0, 8, dimensions]) + _EACH.to_bytes(4, "big")
        head += (1).to_bytes(4, "big") * (dimensions - 1)
        (folder / f"{names[number]}-ubyte.gz").write_bytes(gzip.compress(head + bytes(_EACH)))


def _npz(folder: Path, number: int) -> None:
    np.savez_compressed(folder / f"{number}.npz", x=np.zeros((1024, 1024), np.uint8))


def _tar(folder: Path, number: int) -> None:
    with tarfile.open(folder / f"{number}.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo(f"{number}.bin")
        info.size = _EACH
        tar.addfile(info, io.BytesIO(bytes(_EACH)))


_KINDS: dict[str, Callable[[Path, int], None]] = {
    "*.csv.gz": _tables,
    "t*-ubyte.gz": _idx,
    "*.npz": _npz,
    "*.tar.gz": _tar,
}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three files may be kept, and no more."""
    monkeypatch.setattr(limits, "_FREE_BYTES", 3 * _EACH + (_EACH >> 1))
    monkeypatch.setattr(limits, "usable_memory", lambda: 1000)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))


def _made(kind: str, folder: Path) -> list[Path]:
    folder.mkdir()
    for number in range(_COUNT):
        _KINDS[kind](folder, number)
    return sorted(folder.iterdir())


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", list(_KINDS))
def test_files_of_a_data_set_share_a_bound(kind: str, tmp_path: Path) -> None:
    paths = list(map(str, _made(kind, tmp_path / "data")))
    for _ in range(3):  # What was let go counts no more.
        with dlio.open(paths[:2], tiers="none"):
            pass
    with pytest.raises(SourceError, match=r"become [0-9]+ bytes or more: .* give --trust"):
        dlio.open(str(tmp_path / "data" / kind), tiers="none")
    with dlio.open(str(tmp_path / "data" / kind), tiers="none", trust=True) as data:
        assert len(data) >= _COUNT


@pytest.mark.usefixtures("little_memory")
def test_sources_of_a_mixture_and_copies_share_a_bound(tmp_path: Path) -> None:
    paths = list(map(str, _made("*.npz", tmp_path / "data")))
    with pytest.raises(SourceError, match="compressed files that are kept in memory become"):
        dlio.mix(dict.fromkeys(paths, 1), tiers="none")
    with pytest.raises(SourceError, match="compressed files that are kept in memory become"):
        dlio.open(paths[:2], replicas=[str(tmp_path / "data")], tiers="none")


@pytest.mark.usefixtures("little_memory")
def test_files_that_are_refused_leave_nothing_behind(tmp_path: Path) -> None:
    paths = list(map(str, _made("*.npz", tmp_path / "data")))
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(4):
            with pytest.raises(SourceError):
                dlio.open(paths, tiers="none")
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < _EACH


def test_a_folder_of_compressed_arrays_is_indexed_one_file_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_KEPT_BYTES", 2 * _EACH)
    monkeypatch.setattr(files_module, "usable_memory", lambda: 0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(6):
            _npz(tmp_path / name, number)
    tracemalloc.start()
    try:
        with dlio.open(str(tmp_path), tiers="none") as data:
            peak = tracemalloc.get_traced_memory()[1]
            assert len(data) == 12
            assert data[0]["x"].sum() == 0
    finally:
        tracemalloc.stop()
    assert peak < 6 * _EACH


def test_blocks_of_all_tars_have_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_module, "_KEPT_BLOCKS", 2)
    for number in range(12):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for part in range(4):
                info = tarfile.TarInfo(f"{part}.bin")
                info.size = _EACH
                tar.addfile(info, io.BytesIO(bytes(_EACH)))
        packed = lz4.frame.compress(
            made.getvalue(), block_size=lz4.frame.BLOCKSIZE_MAX1MB, block_linked=False
        )
        (tmp_path / f"{number:02}.tar.lz4").write_bytes(packed)
    reader = open_reader(str(tmp_path))
    tracemalloc.start()
    try:
        for sample in range(len(reader)):
            assert len(reader.read(np.array([sample]))[0]) >= _EACH
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        reader.close()
    assert held < 4 * _EACH


def test_parsed_rows_of_all_tables_have_one_bound(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.csv").write_bytes(b"x,y\n" + b"a b c d,e f g\n" * 1000)
    paths: Sequence[Path] = sorted(tmp_path.iterdir())
    columns, rows = open_text_tables([file_at(str(path)).opened() for path in paths], ())
    assert rows == 40_000
    tracemalloc.start()
    try:
        for begin in range(0, rows, 1000):
            assert columns["x"].rows(begin, begin + 1000) == ["a b c d"] * 1000
            assert columns["y"].rows(begin, begin + 1000) == ["e f g"] * 1000
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 12 * 1000 * 300

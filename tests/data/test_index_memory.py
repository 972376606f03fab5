"""Memory of an index that is being built: in a file where it is large, and there is space."""

import mmap
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dlio.data import index_memory
from dlio.data.index import let_go
from dlio.data.index_memory import KeptParts, new_column
from dlio.data.reader import open_reader


def _is_mapped(values: object) -> bool:
    while isinstance(values, np.ndarray):
        values = values.base
    return isinstance(values, mmap.mmap)


COUNTS = (3, 40_000, 5, 60_000)


@pytest.fixture(params=["in a file", "without a cache", "without space"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(index_memory, "_SMALL", 100_000)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    place: str = request.param

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    if place == "without a cache":
        monkeypatch.setattr(index_memory, "_unnamed_file", fail)
    elif place == "without space":
        monkeypatch.setattr(os, "posix_fallocate", fail)
    return place


@pytest.mark.usefixtures("place")
def test_parts_are_kept_in_any_place() -> None:
    parts = [np.arange(count, dtype=np.int64) * 3 for count in COUNTS]
    kept = KeptParts()
    places = [kept.add(part, part[:2]) for part in parts]
    for part, place in zip(parts, places, strict=True):
        assert place.tobytes() == part.tobytes() + part[:2].tobytes()


def test_large_parts_and_columns_are_in_a_file(place: str) -> None:
    assert _is_mapped(KeptParts().add(np.zeros(20_000, np.int64))) == (place == "in a file")
    column = new_column(20_000, np.int64)
    column[:] = np.arange(20_000)
    let_go(column)
    assert column.tolist() == list(range(20_000))
    assert _is_mapped(column) == (place == "in a file")
    assert new_column(10, np.int64).flags.owndata


def test_files_of_the_memory_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_memory, "_SMALL", 0)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    kept, column = KeptParts().add(np.zeros(100)), new_column(100, np.int64)
    assert _is_mapped(kept)
    assert _is_mapped(column)
    assert not [name for _, _, names in os.walk(tmp_path / "cache") for name in names]


@pytest.mark.usefixtures("place")
def test_a_listing_is_the_same_in_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(300):
        folder = tmp_path / "data" / f"class {k % 7}" / f"{k % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k}.jpg").write_bytes(bytes(k + 1))
    monkeypatch.setattr(index_memory, "_SMALL", 1_000)
    with closing(open_reader(str(tmp_path / "data"))) as reader:
        names = [reader.name(k) for k in range(len(reader))]
        payloads = [bytes(payload) for payload in reader.read(np.arange(300))]
        fingerprint = reader.fingerprint
    assert names == sorted(names)
    assert len(set(names)) == 300
    for name, payload in zip(names, payloads, strict=True):
        assert len(payload) == 8 + int(Path(name).stem) + 1
        assert int.from_bytes(payload[:8], "little") == int(name[6])
    monkeypatch.setattr(index_memory, "_SMALL", 1 << 40)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "other"))
    with closing(open_reader(str(tmp_path / "data"))) as reader:
        assert reader.fingerprint == fingerprint

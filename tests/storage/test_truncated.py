"""Files that shrink while they are in use: the job goes on, or ends in one line, not by SIGBUS."""

import os
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.data.reader import open_reader
from dlio.errors import CorruptBlock, SourceError
from dlio_readers.shard import ShardReader
from dlio_staging.pack_folder import pack

LENGTHS = (0, 100, 4096, 0.5, 0.9)
"""Bytes that are left, or the share of them."""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def packed(pictures: Path, tmp_path: Path) -> Path:
    pack(str(pictures), str(tmp_path / "packed"), shard_bytes=1 << 14)
    return tmp_path / "packed"


def _truncate(folder: Path, left: float) -> None:
    for path in folder.glob("*.dlio"):
        os.truncate(path, int(left * path.stat().st_size) if 0 < left < 1 else int(left))


def _batches(data: dlio.Dataset) -> list[int]:
    return [int(n) for _, labels in dlio.DataLoader(data, batch_size=4) for n in labels]


@pytest.mark.parametrize("left", LENGTHS)
def test_a_loader_goes_on_from_its_tier_when_shards_shrink(packed: Path, left: float) -> None:
    with dlio.open(str(packed), tiers="ram:64MiB", image_size=32) as data:
        before = sorted(_batches(data))
        _truncate(packed, left)
        assert sorted(_batches(data)) == before
        reader = data.reader
        assert all(reader.name(k) for k in range(len(reader)))


@pytest.mark.parametrize("left", LENGTHS)
def test_without_a_tier_a_shrunk_shard_is_one_line(packed: Path, left: float) -> None:
    reader = ShardReader(str(packed))
    _truncate(packed, left)
    with pytest.raises((SourceError, CorruptBlock), match=r"shard-\d+\.dlio") as caught:
        reader.read(np.arange(len(reader), dtype=np.int64))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises((SourceError, CorruptBlock), match=r"shard-\d+\.dlio"):
        reader.sizes.sum()
    assert "shard-" in reader.name(0)


def test_an_index_is_not_read_from_the_cache_any_more_once_it_is_open(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    for folder in [pictures, *(path for path in pictures.rglob("*") if path.is_dir())]:
        os.utime(folder, (1, 1))
    open_reader(str(pictures)).close()
    reader = open_reader(str(pictures))
    names = [reader.name(k) for k in range(len(reader))]
    kept = list((tmp_path / "cache").rglob("*.npy"))
    assert kept
    for path in kept:
        os.truncate(path, 0)
    assert [reader.name(k) for k in range(len(reader))] == names
    assert (np.asarray(reader.sizes) > 0).all()
    again = open_reader(str(pictures))  # An index that was cut off is made anew.
    assert [again.name(k) for k in range(len(again))] == names

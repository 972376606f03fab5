"""Sources behind a network: samples ahead of their blocks, and large ones in parts."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlio
from dlio.comm import world
from dlio.data.flow import Flow
from dlio.data.open_files import open_ranges
from dlio.data.reader import open_reader
from dlio.storage import mount, source_requests
from dlio.storage.file_system_kind import FileSystemKind
from dlio.storage.source_requests import SourceRequests

NETWORK = FileSystemKind("", "fuse", "fuse", "/")
DISK = FileSystemKind("", "disk", "ext4", "/")


@pytest.fixture
def networked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "dlio.storage.source_requests",
        "dlio.storage.mount",
        "dlio_readers.path_reader",
    ):
        monkeypatch.setattr(f"{module}.file_system_of", lambda _: NETWORK)


def _volumes(folder: Path, files: int, kib: int) -> Path:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for k in range(files):
        np.savez(
            folder / f"{k}.npz",
            x=generator.integers(0, 256, (kib << 10, 1, 1), np.uint8),
            y=np.full(1, k, np.int64),
        )
    return folder


@pytest.mark.parametrize("kind", ["tables", "files"])
def test_a_large_sample_is_read_in_parts_through_one_opening(
    tmp_path: Path, networked: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "tables":
        reader = open_reader(f"{_volumes(tmp_path / 'a', 2, 3500)}::x", samples="files")
    else:
        _volumes(tmp_path / "class", 2, 3500)
        reader = open_reader(str(tmp_path))
    assert reader.format == kind
    opened, asked = [], []

    def counted(file: Any) -> Any:
        opened.append(file.url)
        return open_ranges(file)

    monkeypatch.setattr(source_requests, "open_ranges", counted)
    with SourceRequests(reader, 8) as requests:
        original = requests.map

        def seen(function: Any, items: Any, block: int) -> Any:
            asked.append([len(memory) for _, _, memory in items])
            return original(function, items, block)

        monkeypatch.setattr(requests, "map", seen)
        (payload,) = requests.samples(np.array([1]), 0)
    assert bytes(payload) == bytes(reader.read(np.array([1]))[0])
    assert len(opened) == 1
    assert len(asked) == 1
    assert max(asked[0]) == 1 << 20
    assert len(asked[0]) == 4


def test_small_samples_and_local_disks_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(f"{_volumes(tmp_path / 'a', 2, 1500)}::x", samples="files")
    calls: list[object] = []
    for piece in (0, 4 << 20):
        with SourceRequests(reader, 8) as requests:
            monkeypatch.setattr(requests, "_piece", piece)
            monkeypatch.setattr(requests, "map", lambda *given: calls.append(given))
            (payload,) = requests.samples(np.array([0]), 0)
        assert bytes(payload) == bytes(reader.read(np.array([0]))[0])
    assert calls == []


def test_samples_are_read_alone_where_that_is_worth_a_request(tmp_path: Path) -> None:
    files = open_reader(f"{_volumes(tmp_path / 'a', 3, 8 << 10)}::x", samples="files")
    np.save(tmp_path / "rows.npy", np.zeros((9, 100), np.uint8))
    rows = open_reader(str(tmp_path / "rows.npy"))
    limit = mount._flow(files, NETWORK, 64)
    assert isinstance(limit, Flow)
    # 64 MiB of 8 MiB each.
    assert limit.most == 7
    assert mount._flow(files, DISK, 64) is None
    assert mount._flow(rows, NETWORK, 64) is None


def test_a_run_reads_each_sample_once(
    tmp_path: Path, networked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _volumes(tmp_path / "a", 24, 70)
    with dlio.open(f"{source}::x", samples="files", tiers="ram:64MiB", image_size=None) as data:
        read: list[int] = []
        lock = threading.Lock()
        own = data.reader.read

        def counted(samples: Any) -> Any:
            with lock:
                read.extend(samples.tolist())
            return own(samples)

        monkeypatch.setattr(data.reader, "read", counted)
        mounted = data.mount(world())
        assert mounted.hierarchy.sample_fetcher is not None
        with dlio.DataLoader(data, 4, shuffle=True, num_workers=2) as loader:
            for epoch in range(2):
                loader.set_epoch(epoch)
                assert sum(len(batch["x"]) for batch in loader) == 24
        assert sorted(read) == list(range(24))

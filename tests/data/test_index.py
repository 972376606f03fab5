"""Indexes are narrow, mapped, shared by the processes of a node, and built again when damaged."""

import gc
import io
import logging
import os
import resource
import signal
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.data import index as index_module
from dlio.data.index import Arrays, cache_folder, cached_index, clean_cache
from dlio.data.index_memory import GrowingColumn
from dlio.data.reader import open_reader
from dlio.data.source import File
from dlio_bench.readers import write_mds

_COUNT = 100_000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Arrays]:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "f").write_bytes(b"1")

    def make() -> Arrays:
        def build() -> Arrays:
            return {"a": np.arange(_COUNT), "small": np.arange(3, dtype=np.uint8)}

        return cached_index("test", 1, [File(str(tmp_path / "f"))], build)

    return make


def _mapped(folder: Path) -> bool:
    return f"{folder}/" in Path("/proc/self/maps").read_text()


def test_an_index_is_mapped_and_cannot_be_written(
    tmp_path: Path, index: Callable[[], Arrays]
) -> None:
    for _ in range(2):
        arrays = index()
        assert arrays["a"].tolist() == list(range(_COUNT))
        assert _mapped(tmp_path / "cache")
        with pytest.raises(ValueError, match="read-only"):
            arrays["a"][0] = 1
        del arrays
        gc.collect()
        assert not _mapped(tmp_path / "cache")


def test_an_index_on_a_network_is_copied_once_per_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[], Arrays]
) -> None:
    node, cache = tmp_path / "node", str(tmp_path / "cache")
    node.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(node))
    monkeypatch.setattr(
        index_module, "_is_near", lambda f: cache not in os.readlink(f"/proc/self/fd/{f}")
    )
    for _ in range(2):
        assert index()["a"].tolist() == list(range(_COUNT))
    arrays = index()
    assert _mapped(node)
    assert not _mapped(tmp_path / "cache")
    (copied,) = node.glob("dlio-*/index/*/*/a.npy")
    assert [path.stat().st_mode & 0o077 for path in (copied, *copied.parents[:4])] == [0] * 5
    clean_cache()
    assert not list(node.glob("dlio-*/index/*/*/a.npy"))
    assert arrays["a"][-1] == _COUNT - 1  # A removed file stays as long as it is mapped.
    monkeypatch.setattr(index_module, "_is_near", lambda _: False)
    assert index()["a"].tolist() == list(range(_COUNT))
    assert not list(node.glob("dlio-*/index/*/*/a.npy"))


@pytest.mark.parametrize("damage", ["a.npy", "head.json", "cut", "gone"])
def test_a_damaged_index_is_built_again_with_a_line(
    tmp_path: Path, index: Callable[[], Arrays], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    index()
    assert not caplog.records
    (folder,) = [path for path in (tmp_path / "cache").glob("*/*") if path.is_dir()]
    if damage == "cut":
        os.truncate(folder / "a.npy", 4096)
    elif damage == "gone":
        (folder / "a.npy").unlink()
    else:
        with open(folder / damage, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\1\2\3")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert index()["a"].tolist() == list(range(_COUNT))
    (said,) = caplog.records
    assert "is damaged, and is built again" in said.message
    assert str(folder) in caplog.text
    caplog.clear()
    index()
    assert not caplog.records


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 300), max_size=40), st.data())
def test_a_column_holds_its_numbers_in_few_bytes(numbers: list[int], data: st.DataObject) -> None:
    column, rest = GrowingColumn(signed=True), numbers
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        if data.draw(st.booleans()):
            column.extend(np.array(rest[:count], np.int64))
        else:
            for number in rest[:count]:
                column.append(number)
        rest = rest[count:]
    assert len(column) == len(numbers)
    assert column.spread().tolist() == numbers
    if len(set(numbers)) == 1:
        assert column.values().shape == (1,)
    widest = max(
        (int(np.min_scalar_type(n if n < 0 else -n - 1).itemsize) for n in numbers), default=1
    )
    assert column.values().itemsize == widest


def _tar(path: Path, count: int) -> None:
    with tarfile.open(path, "w") as tar:
        for k in range(count):
            for extension, size in (("cls", 3), ("jpg", 200 + k % 500)):
                member = tarfile.TarInfo(f"{k:09d}.{extension}")
                member.size = size
                data = b"%03d" % (k % 1000) if extension == "cls" else bytes(size)
                tar.addfile(member, io.BytesIO(data))


def _csv(path: Path, count: int) -> None:
    rows = "".join(f"{k},{k / 7:.4f},text {k},{k % 10}\n" for k in range(count))
    path.write_text("a,b,c,label\n" + rows)


def _classes(path: Path, count: int) -> None:
    for k in range(count):
        folder = path / f"{k // 100:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k:09d}.jpg").write_bytes(b"picture")


def _flat(path: Path, count: int) -> None:
    path.mkdir()
    for k in range(count):
        (path / f"{k:09d}.jpg").write_bytes(b"picture")


def _mds(path: Path, count: int) -> None:
    write_mds(str(path.parent), (b"picture %d" % k for k in range(count)))


# The rest of an index is in files: of a tar 24 bytes and a name for each sample.
@pytest.mark.parametrize(
    ("write", "name", "most"),
    [
        (_tar, "x.tar", 12),
        (_csv, "x.csv", 12),
        (_classes, "folder", 12),
        (_flat, "folder", 12),
        (_mds, "data", 24),
    ],
)
def test_an_index_takes_few_bytes_a_sample_while_it_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, int], Any],
    name: str,
    most: int,
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    # Of more samples than are handled at a time each costs as much as the ones before.
    monkeypatch.setattr("dlio.data.index_memory._SMALL", 1 << 14)
    for place in (
        "dlio.data.index_memory._PIECE",
        "dlio.data.folder_names._MANY",
        "dlio.plan.layout._STRETCH",
        "dlio_readers.folder._HELD",
        "dlio_readers.texttable._PART",
    ):
        monkeypatch.setattr(place, 1 << 10)
    monkeypatch.setattr("dlio.data.index_memory._DECODED", 1 << 6)
    monkeypatch.setattr("dlio_readers.folder.files_a_look", lambda: 64)
    peaks, kept = [], []
    for count in (20, 6_000, 16_000):
        (tmp_path / str(count)).mkdir()
        write(tmp_path / str(count) / name, count)
        for folder, _, _ in os.walk(tmp_path / str(count)):
            os.utime(folder, (0, 0))  # Of folders that have just changed no index is kept.
        tracemalloc.start()
        try:
            reader = open_reader(f"{tmp_path}/{count}/{name}")
            _, peak = tracemalloc.get_traced_memory()
            gc.collect()  # What holds itself is not kept.
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(reader) == count
        peaks.append(peak)
        kept.append(size)
    assert (peaks[2] - peaks[1]) / 10_000 < most
    assert (kept[2] - kept[1]) / 10_000 < 16


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit of file sizes")
def test_why_an_index_is_not_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    _csv(tmp_path / "x.csv", 20_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        open_reader(str(tmp_path / "x.csv")).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot be written (File too large)" in caplog.text


@pytest.mark.parametrize(
    ("named", "folder"), [("/caches", "/caches/dlio"), ("", "~"), ("caches", "~"), ("./c", "~")]
)
def test_a_relative_folder_of_caches_is_ignored(
    named: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the standard of XDG says: it would be another in each current folder."""
    monkeypatch.delenv("DLIO_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert cache_folder() == folder.replace("~", "/home/somebody/.cache/dlio")

"""Opening a Zarr store takes the same requests for any number of chunks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from fsspec.implementations.memory import MemoryFileSystem
from zarr.codecs import BytesCodec, ShardingCodec

from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio_readers.zarrstore import METADATA

_LAYOUTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3 with dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v3 with shards": {"chunks": (1, 2, 2), "shards": (1, 4, 4)},
    "v2": {"zarr_format": 2},
    "v2 with slashes": {
        "zarr_format": 2,
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    },
}
_OPEN = (
    "import sys; from dlio.data.reader import open_reader; "
    "open_reader(sys.argv[1], missing=sys.argv[2])"
)


def _write(path: str, count: int, layout: str) -> None:
    options = dict(_LAYOUTS[layout])
    group = zarr.open_group(path, mode="w", zarr_format=options.pop("zarr_format", 3))
    options = {"chunks": (1, 4, 4), "compressors": None, **options}
    array = group.create_array("images", shape=(count, 4, 4), dtype="u1", **options)
    array[:] = 1


@pytest.mark.cold
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(("layout", "missing"), [("v2", "fill"), ("v3", "error")])
def test_no_system_call_per_chunk(tmp_path: Path, layout: str, missing: str) -> None:
    calls = []
    for count in (1_000, 4_000):
        _write(f"{tmp_path}/{count}.zarr", count, layout)
        trace = tmp_path / "trace"
        command = [sys.executable, "-c", _OPEN, f"{tmp_path}/{count}.zarr", missing]
        strace = ["strace", "-f", "-y", "-qq", "-e", "trace=%file,%desc", "-o", str(trace)]
        environment = {**os.environ, "DLIO_CACHE": str(tmp_path / "cache")}
        subprocess.run([*strace, *command], check=True, timeout=300, env=environment)
        calls.append(len(re.findall(rf"{count}\.zarr", trace.read_text(errors="replace"))))
    assert calls[0] > 10
    assert calls[1] - calls[0] < 3_000 / 64


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("missing", ["error", "fill"])
def test_no_request_per_chunk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str, missing: str
) -> None:
    asked = 0

    def counting(own: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return own(*args, **options)

        return call

    counts: dict[str, list[int]] = {"local": [], "memory": []}
    for chunks in (400, 2_000):
        _write(f"{tmp_path}/{chunks}.zarr", chunks, layout)
        remote = f"/opening/{chunks}.zarr"
        fsspec.filesystem("memory").put(f"{tmp_path}/{chunks}.zarr", remote, recursive=True)
    for name in ("ls", "info", "cat_file", "exists", "isdir", "find"):
        monkeypatch.setattr(MemoryFileSystem, name, counting(getattr(MemoryFileSystem, name)))
    for name in ("open", "stat", "scandir", "lstat"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    for chunks in (400, 2_000):
        for place, path in (("local", str(tmp_path)), ("memory", "memory://opening")):
            before = asked
            open_reader(f"{path}/{chunks}.zarr", missing=missing)
            counts[place].append(asked - before)
    monkeypatch.undo()
    fsspec.filesystem("memory").rm("/opening", recursive=True)
    for few, many in counts.values():
        assert few > 5
        assert many - few < 1_600 / 64


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_chunk_that_is_lost_is_said_at_the_latest_when_it_is_read(
    tmp_path: Path, layout: str, place: str
) -> None:
    local = f"{tmp_path}/a.zarr"
    _write(local, 100, layout)
    chunks = [each for each in Path(local).rglob("*") if each.is_file()]
    lost = sorted(each for each in chunks if re.search(r"images.*\b57\b", str(each)))
    assert lost
    reader = open_reader(local, missing="error")
    for each in lost:
        each.unlink()
    path = local
    if place == "memory":
        path = "memory://lost/a.zarr"
        fsspec.filesystem("memory").put(local, "/lost/a.zarr", recursive=True)
    reader.read(np.array([56]))
    with pytest.raises(SourceError, match="is missing: restore it"):
        reader.read(np.array([57]))
    with pytest.raises(SourceError, match=r"1 of its 100 |is missing: restore it"):
        open_reader(path, missing="error").read(np.array([57]))
    assert len(open_reader(path, missing="fill").read(np.array([57]))) == 1
    if place == "memory":
        fsspec.filesystem("memory").rm("/lost", recursive=True)


@pytest.mark.parametrize("place", ["local", "memory", "zip"])
@pytest.mark.parametrize(
    ("at", "kept", "first"), [("end", 0, 40), ("start", 0, 40), ("start", 212, 75)]
)
def test_a_shard_that_is_cut_off_is_not_taken_for_chunks_that_were_never_written(
    tmp_path: Path, at: str, kept: int, first: int, place: str
) -> None:
    """zarr itself reads the fill value for them."""
    path = tmp_path / "a.zarr"
    codec = ShardingCodec(chunk_shape=(5,), codecs=[BytesCodec()], index_location=at)
    array = zarr.create_array(
        str(path), shape=(80,), chunks=(40,), dtype="i8", serializer=codec, compressors=None
    )
    array[:] = np.arange(1, 81)
    shard = path / "c" / "1"
    shard.write_bytes(shard.read_bytes()[:kept])
    assert not np.any(zarr.open_array(str(path), mode="r")[first:])
    url = str(path)
    if place == "zip":
        url = shutil.make_archive(str(tmp_path / "b.zarr"), "zip", path)
    elif place == "memory":
        url = f"memory://{tmp_path.name}/a.zarr"
        fsspec.filesystem("memory").put(str(path), url, recursive=True)
    reader = open_reader(url)
    assert len(reader.read(np.arange(40))) == 40
    with pytest.raises(SourceError, match="c/1 is cut off: a chunk of it has no bytes"):
        list(reader.read(np.arange(first, 80)))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_store_that_is_gone_is_not_read_as_fill_values(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "a.zarr"
    _write(str(path), 8, layout)
    reader = open_reader(str(path))
    assert set(bytes(reader.read(np.array([3]))[0])) == {1}
    for each in path.rglob("*"):
        if each.is_file() and each.name not in METADATA:
            each.unlink()
    assert set(bytes(reader.read(np.array([5]))[0])) == {0}
    shutil.rmtree(path)
    with pytest.raises(SourceError, match=r"a\.zarr/images is not there any more"):
        reader.read(np.array([5]))
    reader.close()


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_remote_store_that_is_gone_is_not_read_as_fill_values(
    tmp_path: Path, layout: str
) -> None:
    path, url = tmp_path / "a.zarr", f"memory://{tmp_path.name}/a.zarr"
    _write(str(path), 8, layout)
    files = fsspec.filesystem("memory")
    files.put(str(path), url, recursive=True)
    reader = open_reader(url)
    for each in files.find(url):
        if each.rpartition("/")[2] not in METADATA:
            files.rm(each)
    assert set(bytes(reader.read(np.array([5]))[0])) == {0}
    files.rm(url, recursive=True)
    with pytest.raises(SourceError, match=r"a\.zarr/images is not there any more"):
        reader.read(np.array([5]))

"""Files that are stored in a zip archive are read where they lie, with zipfile's own checks."""

import asyncio
import io
import multiprocessing
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import File, Source
from dlio.errors import SourceError
from dlio_readers.zarrstore import RemoteFiles

_SIZE = 4 << 20
Archive = Callable[[bytes], str]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of an archive, local or remote."""
    counts: list[int] = []
    pread, cat_file = os.pread, MemoryFileSystem.cat_file

    def counted_pread(descriptor: int, count: int, offset: int) -> bytes:
        data = pread(descriptor, count, offset)
        counts.append(len(data))
        return data

    def counted_cat(self: MemoryFileSystem, path: str, **span: int) -> bytes:
        data = bytes(cat_file(self, path, **span))
        counts.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted_pread)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted_cat)
    return counts


@pytest.fixture(params=["local", "memory"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Archive]:
    """Return a function that puts the bytes of an archive at a place, and returns its URL."""
    files = fsspec.filesystem("memory")

    def put(data: bytes) -> str:
        if request.param == "local":
            (tmp_path / "z.zip").write_bytes(data)
            return f"{tmp_path}/z.zip"
        files.pipe("/zips/z.zip", data)
        return "memory://zips/z.zip"

    yield put
    if files.exists("/zips"):
        files.rm("/zips", recursive=True)


def _zip(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED, before: bytes = b"") -> bytes:
    stream = io.BytesIO(before)
    stream.seek(len(before))
    with zipfile.ZipFile(stream, "w", kind) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return stream.getvalue()


def test_a_range_costs_its_own_bytes(archive: Archive, fetched: list[int]) -> None:
    data = os.urandom(_SIZE)
    file = File(f"zip://d/f.bin::{archive(_zip({'a': b'x', 'd/f.bin': data, 'z': b'y'}))}")
    for begin in range(0, _SIZE, _SIZE // 8):
        into = memoryview(bytearray(1000))
        file.read_into(begin, into)
        assert into == data[begin : begin + 1000]
    assert sum(fetched) < 8 * 1000 + 200
    assert file.read(_SIZE - 10, 100) == data[-10:]
    assert file.read(_SIZE + 5, 100) == b""
    assert file.read() == data


def test_a_small_file_is_one_request(archive: Archive, fetched: list[int]) -> None:
    members = {f"{k // 5}/{k}": os.urandom(2000 + k) for k in range(20)}
    source = Source(f"zip://::{archive(_zip(members))}")
    for name in sorted(members, key=hash):
        assert source.read(name) == members[name]
    assert len(fetched) == 20
    assert sum(fetched) < 20 * 2600


def test_a_stream_of_a_file_seeks_in_place(archive: Archive) -> None:
    data = os.urandom(100_000)
    with File(f"zip://f::{archive(_zip({'f': data, 'g': b'after'}))}").open() as stream:
        assert stream.seek(0, os.SEEK_END) == len(data)
        assert stream.read(10) == b""
        stream.seek(-7, os.SEEK_END)
        assert stream.read() == data[-7:]
        assert stream.seek(50_000) == 50_000
        assert stream.read(9) == data[50_000:50_009]
        assert stream.tell() == 50_009
        with pytest.raises(ValueError, match="negative"):
            stream.seek(-1)


def test_data_sets_in_archives_are_the_same_as_outside(archive: Archive, tmp_path: Path) -> None:
    images = np.arange(40 * 6, dtype=np.uint8).reshape(40, 6)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = images
    np.save(tmp_path / "a.npy", images)
    url = archive(_zip({name: (tmp_path / name).read_bytes() for name in ("a.h5", "a.npy")}))
    for name in ("a.h5", "a.npy"):
        # Trusted: the trial in another process does not see this process's memory.
        with dlio.open(f"zip://{name}::{url}", tiers="none", trust=True) as data:
            rows = [next(iter(data[k].values())).tolist() for k in range(len(data))]
        assert rows == images.tolist()


def test_a_range_of_a_shard_of_zarr_costs_its_own_bytes(
    archive: Archive, fetched: list[int]
) -> None:
    data = os.urandom(1 << 20)
    store = RemoteFiles.at(Source(f"zip://::{archive(_zip({'a/c/0': data}))}"))
    store.limits.add("a", len(data), len(data), "")
    asked = (RangeByteRequest(9000, 9100), OffsetByteRequest(len(data) - 7), SuffixByteRequest(5))
    answers = [asyncio.run(store.get("a/c/0", default_buffer_prototype(), part)) for part in asked]
    expected = [data[9000:9100], data[-7:], data[-5:]]
    assert [answer and answer.to_bytes() for answer in answers] == expected
    assert sum(fetched) < 1000


@pytest.mark.parametrize(
    ("before", "kind"),
    [(b"", zipfile.ZIP_STORED), (b"#!/bin/sh\n" * 9, zipfile.ZIP_STORED), (b"", zipfile.ZIP_LZMA)],
)
def test_archives_of_other_forms_are_read(archive: Archive, before: bytes, kind: int) -> None:
    members = {"ä/ö.bin": os.urandom(999), "empty": b"", "f": b"1" * 3000}
    url = archive(_zip(members, kind, before))
    for name, data in members.items():
        assert Source(f"zip://::{url}").read(name) == data
        assert File(f"zip://{name}::{url}").read(0, 500) == data[:500]


def test_a_file_with_a_long_extra_field_is_read(archive: Archive) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        info = zipfile.ZipInfo("f")
        info.extra = struct.pack("<HH", 0x7777, 900) + b"e" * 900
        made.writestr(info, b"payload")
    assert Source(f"zip://::{archive(stream.getvalue())}").read("f") == b"payload"


def test_damage_is_an_error_as_of_zipfile(archive: Archive) -> None:
    data = bytearray(_zip({"f": b"payload" * 100, "g": b"next"}))
    where = data.index(b"payload")
    data[where] ^= 1
    url = archive(bytes(data))
    with pytest.raises(SourceError, match="Bad CRC-32"):
        Source(f"zip://::{url}").read("f")
    with pytest.raises(SourceError, match="Bad CRC-32"):
        File(f"zip://f::{url}").read()
    data[where - 1] ^= 1  # The name in the file's own header.
    url = archive(bytes(data))
    with pytest.raises(SourceError, match="differ"):
        File(f"zip://f::{url}").read(0, 5)


def test_an_encrypted_file_is_refused(archive: Archive) -> None:
    data = bytearray(_zip({"f": b"payload"}))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + flags] |= 1
    with pytest.raises(SourceError, match="encrypted"):
        File(f"zip://f::{archive(bytes(data))}").read(0, 3)


def test_an_archive_that_was_cut_off_since_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "z.zip"
    path.write_bytes(_zip({"f": os.urandom(9000)}))
    file = File(f"zip://f::{path}")
    assert len(file.read(0, 10)) == 10
    os.truncate(path, 5000)
    with pytest.raises(SourceError, match="ends before its file"):
        file.read(100, 8000)


def test_an_archive_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path, data = tmp_path / "z.zip", os.urandom(9000)
    path.write_bytes(_zip({"f": data}))
    file = File(f"zip://f::{path}")
    (tmp_path / "new").write_bytes(_zip({"other": b"1" * 5000, "f": b"2" * 9000}))
    os.replace(tmp_path / "new", path)
    assert file.read(100, 800) == data[100:900]


def _read(file: File, at: int) -> bytes:
    return file.read(at, 9)


def test_a_file_is_read_in_other_processes(tmp_path: Path) -> None:
    data = os.urandom(9000)
    (tmp_path / "z.zip").write_bytes(_zip({"f": data}))
    file = File(f"zip://f::{tmp_path}/z.zip")
    assert _read(file, 10) == data[10:19]
    assert _read(pickle.loads(pickle.dumps(file)), 20) == data[20:29]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_read, (file, 30)) == data[30:39]


def test_a_server_without_ranges_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/zips/z.zip", _zip({"f": os.urandom(9000)}))
    served = MemoryFileSystem.cat_file
    try:
        file = File("zip://f::memory://zips/z.zip")
        monkeypatch.setattr(
            MemoryFileSystem, "cat_file", lambda self, path, **_: served(self, path)
        )
        with pytest.raises(SourceError, match="does not serve parts of files"):
            file.read(10, 20)
    finally:
        monkeypatch.undo()
        files.rm("/zips", recursive=True)


@pytest.mark.parametrize(
    "url", ["zip://::{}", "zip://a::{}", "simplecache::file://{}", "file://{}"]
)
@pytest.mark.parametrize("name", ["x.zip", "x.h5"])
def test_a_pipe_below_an_url_is_refused_and_not_waited_for(
    url: str, name: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match="not a regular file"):
        open_reader(url.format(tmp_path / name))


def test_a_member_that_ends_early_is_said_to(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.bin", bytes(64))
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\1\2")
    struct.pack_into("<II", data, entry + 20, 4096, 4096)
    path.write_bytes(data)
    with pytest.raises(SourceError, match="ends before its last byte"):
        File(f"zip://a.bin::{path}").read(0, 4096)

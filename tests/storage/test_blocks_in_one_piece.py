"""Blocks that the native library reads in one piece: the same bytes as those of payloads that the
reader gives one by one."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.reader import open_reader
from dlio.data.reader_contract import FileLocations, Reader
from dlio.data.requests import observed_requests
from dlio.errors import SourceError
from dlio.image.native import pool_library
from dlio.image.native.payloads import read_payloads
from dlio.storage import source_requests
from dlio.storage.block import encode_block
from dlio.storage.source_requests import SourceRequests

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())
COUNT = 300
"""More than the files of a task."""


def _content(k: int) -> bytes:
    return bytes(np.random.default_rng(k).integers(0, 256, 1 + 37 * k % 2003, np.uint8))


def _folder(path: Path) -> None:
    for k in range(COUNT):
        os.makedirs(path / f"c{k % 3}", exist_ok=True)
        (path / f"c{k % 3}" / f"{k}.jpg").write_bytes(_content(k))


def _tar(path: Path) -> None:
    os.makedirs(path)
    with tarfile.open(path / "a.tar", "w") as archive:
        for k in range(COUNT):
            for name, data in ((f"{k:04}.cls", b"%d" % (k % 3)), (f"{k:04}.jpg", _content(k))):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _rows(path: Path) -> None:
    os.makedirs(path)
    np.save(path / "a.npy", np.arange(COUNT * 5, dtype=np.float32).reshape(COUNT, 5))


WRITERS = {"folder": _folder, "tar": _tar, "rows": _rows}


@pytest.fixture(params=WRITERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Reader:
    write: Callable[[Path], None] = WRITERS[request.param]
    write(tmp_path / "data")
    return open_reader(str(tmp_path / "data"))


@pytest.fixture
def read_natively(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the samples that the native library is asked for, by call."""
    asked: list[int] = []
    read = read_payloads

    def counted(
        located: FileLocations, rows: npt.NDArray[np.int64], *into: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
        asked.append(len(rows))
        return read(located, rows, *into)

    monkeypatch.setattr(source_requests, "read_payloads", counted)
    return asked


def _expected(reader: Reader, block: int) -> bytes:
    payloads = [reader.read(np.array([k], np.int64))[0] for k in reader.layout.samples_of(block)]
    pieces = encode_block(
        payloads, block=block, fingerprint=reader.fingerprint, schema=reader.schema
    )
    return b"".join(map(bytes, pieces))


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("over_a_network", [False, True])
def test_its_bytes_are_those_of_the_payloads(
    reader: Reader,
    read_natively: list[int],
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    over_a_network: bool,
) -> None:
    with SourceRequests(reader, requests) as source:
        if over_a_network:
            monkeypatch.setattr(source, "_piece", 1 << 20)
        for block in (*range(reader.layout.blocks), 0):  # Memory is used again, and not of zeros.
            with source.block(block) as (pieces, size):
                assert b"".join(map(bytes, pieces)) == _expected(reader, block)
                assert size == reader.sizes[reader.layout.samples_of(block)].sum()
    if not reader.objects:
        assert not read_natively  # The reader's ranges have many samples each.
    else:
        assert sum(read_natively) == COUNT + len(reader.layout.samples_of(0))
    if over_a_network and requests > 1:
        assert max(read_natively, default=0) <= 4


def test_payloads_that_are_here_are_not_read_again(
    tmp_path: Path, read_natively: list[int]
) -> None:
    _folder(tmp_path / "data")
    reader = open_reader(str(tmp_path / "data"))
    with SourceRequests(reader, 4) as source:
        for block in range(reader.layout.blocks):
            whole = reader.layout.samples_of(block)
            here = {int(k): reader.read(np.array([k], np.int64))[0] for k in whole[::2]}
            with source.block(block, here) as (pieces, size):
                assert b"".join(map(bytes, pieces)) == _expected(reader, block)
                assert size == reader.sizes[whole[1::2]].sum()
    assert 0 < sum(read_natively) <= COUNT // 2


def test_the_reader_says_what_the_library_cannot_read(
    tmp_path: Path, read_natively: list[int]
) -> None:
    _folder(tmp_path / "data")
    reader = open_reader(str(tmp_path / "data"))
    (tmp_path / "data" / "c1" / "31.jpg").write_bytes(b"longer than it was, or shorter")
    (tmp_path / "data" / "c1" / "34.jpg").unlink()
    names = [reader.name(k) for k in range(COUNT)]
    lost = {names.index("c1/31.jpg"), names.index("c1/34.jpg")}
    with SourceRequests(reader) as source:
        for block in range(reader.layout.blocks):
            if lost.intersection(reader.layout.samples_of(block).tolist()):
                with pytest.raises(SourceError, match=r"c1/3[14].jpg"), source.block(block):
                    pass
            else:
                with source.block(block) as (pieces, _):
                    assert b"".join(map(bytes, pieces)) == _expected(reader, block)
    assert read_natively


def test_requests_that_are_observed_are_the_readers(
    reader: Reader, read_natively: list[int]
) -> None:
    with SourceRequests(reader) as source, observed_requests(), source.block(0) as (pieces, _):
        assert b"".join(map(bytes, pieces)) == _expected(reader, 0)
    assert not read_natively

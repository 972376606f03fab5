"""Readers never ask a server for an empty range.

s3fs 2026.9.0 leaves the header out then, and the server sends the whole object.
"""

import io
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import feather, parquet

from dlio.data.reader import open_reader
from dlio.data.source import File
from dlio_staging.pack_folder import pack
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in (("a.txt", b""), ("a.cls", b"0"), ("b.txt", b"b"), ("b.cls", b"1")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _table() -> pa.Table:
    return pa.table({"text": ["", "b", "", ""], "raw": [b"", b"", b"", b""]})


def _make(root: Path) -> None:
    _tar(root / "x.tar")
    parquet.write_table(_table(), root / "x.parquet")
    feather.write_feather(_table(), root / "x.arrow", compression="uncompressed")
    (root / "empty.csv").write_text("text,label\n,0\nb,1\n")
    pack(str(root / "x.tar"), str(root / "shards"))


SETS = ("x.tar", "x.parquet", "x.arrow", "empty.csv", "shards")


# A process of the trial has another memory: its files are read without one, which is said.
@pytest.mark.filterwarnings("ignore:.*without the trial:RuntimeWarning")
def test_no_reader_asks_for_an_empty_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "made").mkdir()
    _make(tmp_path / "made")
    files = fsspec.filesystem("memory")
    files.put(f"{tmp_path}/made/", "/empty", recursive=True)
    asked: list[tuple[str, Any, Any]] = []
    plain = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        asked.append((path, start, end))
        # As s3fs, gcsfs and others do.
        if start is not None and end is not None and end <= start:
            start = end = None
        return bytes(plain(self, path, start=start, end=end, **more))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    for name in SETS:
        local, remote = (
            open_reader(f"{tmp_path}/made/{name}"),
            open_reader(f"memory://empty/{name}"),
        )
        samples = np.arange(len(remote))
        assert remote.read(samples) == local.read(samples), name
        if len(samples):
            (tmp_path / name).mkdir()
            assert stage(
                f"memory://empty/{name}", StageOptions(tiers=f"{tmp_path}/{name}:1GiB")
            ).complete
    assert File("memory://empty/x.tar").read(7, 0) == b""
    File("memory://empty/x.tar").read_into(7, memoryview(bytearray()))
    assert len(asked) > len(SETS)
    assert [each for each in asked if None not in each and each[2] <= each[1]] == []

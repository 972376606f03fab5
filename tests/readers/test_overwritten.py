"""Files that somebody writes to while they are open: one line, and no new samples under old labels.

Links, pipes and files that are cut are in `tests/hostile/test_changing_files.py`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlio.data import open_files
from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.errors import DlioError
from dlio_staging.pack_folder import pack
from tests.readers.test_formats import FORMATS

_LATER_NS = 1_000_000_000
_CHANGED = "has changed since it was opened: run again"
_OF_FILES = [name for name in FORMATS if not name.startswith(("zarr", "npz-packed", "mds-gz"))]
"""Formats whose samples lie in few files: a chunk of a Zarr is a file of its own, and files that
are compressed as a whole are read once."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(open_files, "_LOOKING", 0.0)


@pytest.fixture(params=[*_OF_FILES, "packed"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, pictures: Path) -> Iterator[Reader]:
    """A reader that has read its first sample, and no other."""
    (tmp_path / "data").mkdir()
    if request.param == "packed":
        path = str(tmp_path / "data" / "packed")
        pack(str(pictures), path, workers=1)
    else:
        path = FORMATS[request.param][0](tmp_path / "data")
    reader = open_reader(path)
    reader.read(np.array([0]))
    yield reader
    reader.close()


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "data").rglob("*")) if path.is_file()]


def _later(path: Path, before: os.stat_result) -> None:
    """Let a file have changed at another time, however coarse the clock of its file system is."""
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + _LATER_NS))


def test_a_file_that_is_overwritten_gives_no_samples(opened: Reader, tmp_path: Path) -> None:
    for path in _files(tmp_path):
        before, other = path.stat(), bytes(byte ^ 0x55 for byte in path.read_bytes())
        with path.open("r+b") as file:
            file.write(other)
        _later(path, before)
    # Packed data have checksums, too.
    with pytest.raises(DlioError, match=f"{_CHANGED}|its checksum does not match"):
        opened.read(np.arange(len(opened)))


def test_a_file_that_is_touched_or_grows_is_read_and_told_of(
    opened: Reader,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    every = np.arange(len(opened))
    before = [bytes(payload) for payload in opened.read(every)]
    for change in ("touched", "grown"):
        for path in _files(tmp_path):
            status = path.stat()
            if change == "grown":
                with path.open("ab") as file:
                    file.write(b"more")
            _later(path, status)
        assert [bytes(payload) for payload in opened.read(every)] == before
    is_kept = opened.format == "parquet" or request.node.callspec.params["opened"] == "tar-lz4"
    assert is_kept or "was written to, or touched, since it was opened" in caplog.text

"""Files of a data set that others change between its opening and a read: data or one line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.errors import DlioError
from tests.hostile.linked_sets import FORMATS

_MARKED = 1e9
"""Seconds since 1970 that all files say, also after a change: their times tell nothing."""


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _turned(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": _cut,
    "empty": lambda path: os.truncate(path, 0),
    "grown": lambda path: os.truncate(path, path.stat().st_size + (1 << 20)),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "gone": Path.unlink,
    "folder": _folder,
    "fifo": _fifo,
    "turned": _turned,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))


def _said(reader: Reader, sample: int) -> str:
    """Read a sample; return the error, or nothing if there are as many bytes as the index says."""
    try:
        (payload,) = reader.read(np.array([sample]))
    except DlioError as error:
        return str(error)
    assert len(payload) == reader.sizes[sample]
    return ""


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("name", FORMATS)
def test_files_that_change_while_they_are_read_end_in_data_or_one_line(
    name: str, is_read: bool, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    options = FORMATS[name](made)
    for number, change in enumerate(CHANGES.values()):
        root = tmp_path / f"{number}"
        shutil.copytree(made, root)
        for path in root.rglob("*"):
            os.utime(path, (_MARKED, _MARKED))
        reader = open_reader(str(root), **options)
        every = np.arange(len(reader))
        if is_read:
            reader.read(every)
        for path in sorted(each for each in root.rglob("*") if each.is_file()):
            change(path)
            if path.exists():
                os.utime(path, (_MARKED, _MARKED))
        for sample in every.tolist():
            said = _said(reader, sample)
            assert "\n" not in said
        reader.close()
        shutil.rmtree(root)

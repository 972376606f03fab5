"""Files of a data set that others change between its opening and a read: data or one line."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.errors import DlioError, SourceError
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


@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="Linux alone has leases")
# SECURITY.md: S13
def test_a_file_that_somebody_leases_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"picture")
    reader = open_reader(str(tmp_path / "data"))
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # The kernel asks for the lease by it.
    try:
        with (tmp_path / "data" / "a" / "1.jpg").open("r+b") as file:
            try:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError as error:
                pytest.skip(f"no leases here: {error}")
            # Whoever waits reads it when the kernel takes the lease, after 45 seconds.
            with pytest.raises(SourceError, match=r"1\.jpg cannot be read: .* lease"):
                reader.read(np.arange(3))
        assert len(reader.read(np.arange(3))) == 3
    finally:
        signal.signal(signal.SIGIO, before)
        reader.close()

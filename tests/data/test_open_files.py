"""Files of many samples: opened once, closed by their owner, at most so many at a time."""

import copy
import gc
import os
import pickle
import resource
from pathlib import Path

import pytest

from dlio.data import open_files
from dlio.data.open_files import PersistentFile
from dlio.errors import SourceError


def _open_below(folder: Path) -> list[str]:
    paths = []
    for number in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # The descriptor of the listing.
            continue
    return sorted(each for each in paths if each.startswith(f"{folder}/"))


def _file(folder: Path, name: str = "a", data: bytes = b"0123456789") -> PersistentFile:
    (folder / name).write_bytes(data)
    return PersistentFile(str(folder / name))


def test_is_opened_once_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    class Counted(open_files.Descriptor):
        def __init__(self, number: int) -> None:
            opened.append(number)
            super().__init__(number)

    monkeypatch.setattr(open_files, "Descriptor", Counted)
    file = _file(tmp_path)
    assert not _open_below(tmp_path)
    memory = bytearray(4)
    for at in range(5):
        file.read_into(at, memoryview(memory))
        assert bytes(memory) == b"0123456789"[at : at + 4]
        assert file.read(at, 2) == b"0123456789"[at : at + 2]
    assert file.read(8, 100) == b"89"
    assert file.read(100, 4) == b""
    assert len(opened) == 1
    file.close()
    assert not _open_below(tmp_path)
    assert file.read(0, 1) == b"0"  # A closed file is opened again.
    assert len(opened) == 2


def test_a_dropped_file_is_closed(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert file.read(0, 1) == b"0"
    assert _open_below(tmp_path)
    del file
    gc.collect()
    assert not _open_below(tmp_path)


def test_a_process_keeps_a_limited_number_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 256 + len(os.listdir("/proc/self/fd"))  # Other tests may have left some open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        files = [_file(tmp_path, f"{k}", bytes([k % 256])) for k in range(few)]
        for _ in range(2):
            assert [file.read(0, 1)[0] for file in files] == [k % 256 for k in range(few)]
        assert len(_open_below(tmp_path)) <= few // 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for file in files:
        file.close()
    assert not _open_below(tmp_path)


def test_a_copy_opens_its_own(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert file.read(0, 1) == b"0"
    for other in (pickle.loads(pickle.dumps(file)), copy.copy(file)):
        assert other.opened is None
        assert other.read(1, 1) == b"1"
    file.close()


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path)
    with pytest.raises(SourceError, match="ends 5 bytes early"):
        file.read_into(5, memoryview(bytearray(10)))
    file.close()
    os.remove(tmp_path / "a")
    with pytest.raises(SourceError, match=str(tmp_path)):
        file.read(0, 1)
    os.mkfifo(tmp_path / "a")
    with pytest.raises(SourceError, match="not a regular file"):
        file.read_into(0, memoryview(bytearray(1)))


def test_a_forked_child_reads_its_own(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert file.read(0, 1) == b"0"
    child = os.fork()
    if child == 0:
        try:
            good = file.read(3, 2) == b"34"
            file.close()
            os._exit(0 if good and file.read(4, 1) == b"4" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read(9, 1) == b"9"
    file.close()

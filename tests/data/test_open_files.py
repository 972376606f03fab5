"""Files of many samples: opened once, closed by their owner, at most so many at a time."""

import copy
import errno
import gc
import os
import pickle
import resource
import time
from pathlib import Path

import pytest

from dlio.data import open_files
from dlio.data.identity import look_again
from dlio.data.open_files import InMemoryFile, PersistentFile, open_ranges
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


_LATER_NS = 1_000_000_000


def _later(path: Path, by_ns: int = _LATER_NS) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + by_ns))


def _warnings(caplog: pytest.LogCaptureFixture) -> str:
    text = caplog.text
    caplog.clear()
    return text


def test_a_file_is_looked_at_again_after_a_server_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fstat = _file(tmp_path), os.fstat
    assert file.read(0, 1) == b"0"
    stale = file.opened
    assert stale is not None
    file._due = 0.0

    def old_handle(number: int) -> os.stat_result:
        if number == stale.number and file.opened is stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(number)

    monkeypatch.setattr(os, "fstat", old_handle)
    into = bytearray(2)
    file.read_into(1, memoryview(into))
    assert into == b"12"
    file.close()


def test_the_next_look_does_not_wait_for_long_after_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a process was stopped, or a server did not answer, while it looked."""
    clock = iter((0.0, 200.0, 202.0, 202.0))
    file = _file(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert file.read(0, 1) == b"0"
    (tmp_path / "a").write_bytes(b"9876543210")
    _later(tmp_path / "a")
    monkeypatch.setattr(file, "_content", "another")
    with pytest.raises(SourceError, match="has changed since it was opened"):
        file.read(0, 1)


def test_another_file_of_the_name_is_looked_at_at_once(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert file.stamp
    assert file.read(0, 1) == b"0"
    file._due = float("inf")
    file.opened = None  # As other files need the descriptor.
    (tmp_path / "b").write_bytes(b"9876543210")
    os.replace(tmp_path / "b", tmp_path / "a")
    _later(tmp_path / "a")
    with pytest.raises(SourceError, match="has changed since it was opened"):
        file.read(0, 1)
    file.close()


def test_a_copy_on_another_machine_looks_by_its_own_clock(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file._due = 1e9
    assert pickle.loads(pickle.dumps(file))._due == 0
    file.close()


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_nothing_is_told_of_a_file_that_is_known_to_be_the_same(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "_LOOKING", 0.0)
    path = tmp_path / f"{size}"
    path.write_bytes(bytes(size))
    os.utime(path, ns=(0, 1_234_567_890_123_456_789))
    file = PersistentFile(str(path))
    assert file.stamp
    path.chmod(0o600)
    os.link(path, tmp_path / "other")
    assert len(file.read(0, size)) == size
    # As a server with a clock of whole seconds has it, once it has written the file.
    os.utime(path, ns=(0, 1_234_567_890_000_000_000))
    assert len(file.read(0, size)) == size
    assert not _warnings(caplog)
    _later(path)
    assert len(file.read(0, size)) == size
    # All of a small file was compared.
    assert ("was written to, or touched" in _warnings(caplog)) is (size > 1000)
    file.close()


def test_what_was_not_compared_is_not_said_to_be_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "a").open("wb+") as file:
        look_again(file.fileno(), "a-name", (0, 1), 0, None)
    assert "no part of it was compared" in caplog.text


def test_reads_of_several_threads_refuse_a_file_that_is_overwritten(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert file.stamp
    with open_ranges(file) as read:
        (tmp_path / "a").write_bytes(b"9876543210")
        _later(tmp_path / "a")
        with pytest.raises(SourceError, match="has changed since it was opened"):
            read(0, memoryview(bytearray(4)))
    file.close()


def test_a_file_in_memory_is_not_looked_at(tmp_path: Path) -> None:
    file = _file(tmp_path)
    kept = InMemoryFile(file, memoryview(b"0123"))
    os.remove(tmp_path / "a")
    kept.check()
    file.close()

"""HDF5 and Parquet files are first read by a process that may die of them."""

import contextlib
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dlio.data.source import File
from dlio.errors import DlioError, SourceError, UsageError
from dlio.util.limits import trusting
from dlio_readers import rehearsal, rowgroups
from dlio_readers.hdf5 import Hdf5Reader
from dlio_readers.parquet import ParquetReader

pytestmark = pytest.mark.cold


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[File]:
    """Two files, in a new cache."""
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rehearsal, "_may_copy", lambda: False)
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.arange(10.0)
    return [File(str(tmp_path / name)) for name in ("a.h5", "b.h5")]


def _act(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have rehearsals run another program."""
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(rehearsal, "module_command", lambda *_: command)


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the commands of processes that are started from now on."""
    started: list[object] = []
    real = subprocess.Popen

    def popen(*argv: object, **options: object) -> object:
        started.append(argv[0])
        return real(*argv, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def test_files_are_rehearsed_until_they_are_known(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _counted(monkeypatch)
    path = [file.url for file in files]
    for _ in range(2):
        with contextlib.closing(Hdf5Reader(path)) as reader:
            assert len(reader) == 20
    assert len(started) == 1
    with h5py.File(path[1], "a") as file:
        file["x"][0] = 5.0
    os.utime(path[1], (1e9, 1e9))
    Hdf5Reader(path).close()
    assert len(started) == 2


def test_the_file_that_kills_its_reader_is_named(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = files[1].name
    program = f"import os; print('\"{name}\"', flush=True); os.kill(os.getpid(), 11)"
    _act(monkeypatch, program)
    for _ in range(2):  # It is not known after the first time.
        with pytest.raises(SourceError, match=rf"{name}: h5py .* ends the process .*\(SIGSEGV\)"):
            Hdf5Reader([file.url for file in files])


def test_a_reader_that_computes_for_ever_is_stopped(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_STUCK_CPU_S", 0.3)
    _act(monkeypatch, "while True: pass")
    with pytest.raises(SourceError, match=r"a\.h5: h5py .* does not come to an end"):
        rehearsal.rehearse("hdf5", "h5py", files[0].url, files)


def test_a_reader_that_waits_for_ever_is_stopped(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_SILENT_S", 0.3)
    _act(monkeypatch, "import time; time.sleep(1000)")
    with pytest.raises(SourceError, match="does not come to an end"):
        rehearsal.rehearse("hdf5", "h5py", files[0].url, files)


def test_it_is_said_that_a_rehearsal_is_not_possible(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    _act(monkeypatch, "raise SystemExit(1)")
    for _ in range(2):  # It is said each time.
        with pytest.warns(RuntimeWarning, match="check that dlio is installed"):
            assert len(Hdf5Reader(files[0].url)) == 10


def test_a_file_with_an_ordinary_error_has_not_passed(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _counted(monkeypatch)
    with h5py.File(files[0].url, "a") as file:
        file["y"] = np.zeros((3, 4))
    for count in (1, 2):  # It is tried again.
        with pytest.raises(UsageError, match="differ in rows"):
            Hdf5Reader(files[0].url)
        assert len(started) == count
    for _ in range(2):
        Hdf5Reader(f"{files[0].url}::y", select=(..., slice(0, 2))).close()


@pytest.mark.parametrize("ending", ["print('[1, \"passed\"]')", "pass", "raise SystemExit(7)"])
# SECURITY.md: S2
def test_files_pass_by_the_word_of_the_child_alone(
    files: list[File], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    begins = (
        "import sys, json; token = json.load(sys.stdin)[0]; print(json.dumps([token, 'begun']))"
    )
    _act(monkeypatch, f"{begins}; {ending}")
    for _ in range(2):
        with pytest.raises(SourceError, match=r"a\.h5: h5py .* ends the process that reads it"):
            Hdf5Reader(files[0].url)


@pytest.mark.parametrize("copied", [False, True])
def test_any_error_of_the_child_is_raised_and_the_file_not_opened_here(
    tmp_path: Path, files: list[File], monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(rehearsal, "_may_copy", lambda: copied)
    twice = pyarrow.table([pyarrow.array([1, 2])] * 2, names=["x", "x"])
    path = str(tmp_path / "twice.parquet")
    pyarrow.parquet.write_table(twice, path)
    opened: list[str] = []
    monkeypatch.setattr(rowgroups, "note_opening", opened.append)
    for _ in range(2):  # It is tried again.
        with pytest.raises(DlioError, match="x"):
            ParquetReader(path)
    assert not opened


def test_other_parts_of_a_file_are_tried_anew(
    files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _counted(monkeypatch)
    for path in (files[0].url, f"{files[0].url}::x", f"{files[0].url}::x"):
        Hdf5Reader(path).close()
    assert len(started) == 2


def test_trusted_files_are_read_at_once(files: list[File], monkeypatch: pytest.MonkeyPatch) -> None:
    _act(monkeypatch, "raise SystemExit(1)")
    with trusting(True):
        assert len(Hdf5Reader(files[0].url)) == 10


@pytest.mark.parametrize("ending", ["passes", "dies", "waits", "refuses"])
def test_a_copy_of_the_process_alone_lets_files_pass(
    files: list[File], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(rehearsal, "_may_copy", lambda: True)
    monkeypatch.setattr(rehearsal, "_COPY_SILENT_S", 0.3)
    monkeypatch.setattr(rehearsal, "_SILENT_S", 60.0)
    started = _counted(monkeypatch)
    memory = mmap.mmap(-1, 4096)  # Shared: the copy must not have it.

    class Reader(Hdf5Reader):
        def __init__(self, *given: object, **options: object) -> None:
            if ending == "dies":
                os.kill(os.getpid(), 11)
            if ending == "waits":
                threading.Event().wait()
            maps = Path("/proc/self/maps").read_text()
            assert not any(line.split()[1][1::2] == "ws" for line in maps.splitlines())
            super().__init__(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rehearsal, "resolve_name", lambda _: Reader)
    path = files[0].url
    if ending == "refuses":
        Path(path).write_bytes(Path(path).read_bytes()[:900])
        with pytest.raises(SourceError, match=r"a\.h5 is cut off"):
            Hdf5Reader(path)
    else:
        assert len(Hdf5Reader(path)) == 10
    assert len(started) == (ending in ("dies", "waits"))
    memory.close()

"""A source that hangs while it is opened: the command says so, and ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SOURCES

STAGE = """
import sys, threading
from dlio_readers.folder import _Walk

# As a call on a file system that does not answer: nothing interrupts it.
_Walk._list_folder = lambda *_: threading.Event().wait()
sys.argv = ["dlio", *sys.argv[1:]]
from dlio.cli.__main__ import main
main()
"""


def _run(
    code: str, words: list[str], folder: Path, timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    own = {"DLIO_TIMEOUT": "1", "DLIO_CACHE": str(folder / "cache"), "PYTHONPATH": SOURCES}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("command", ["stage", "ls"])
@pytest.mark.daily("stage")
def test_a_command_ends_whose_source_hangs_at_opening(
    command: str, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "tier").mkdir()
    more = ["--tiers", f"{tmp_path}/tier:64MiB"] if command == "stage" else []
    done = _run(STAGE, [command, str(pictures), *more], tmp_path, 300)
    assert done.returncode == 2, done.stderr
    assert "no answer for 1 s: the source hangs (DLIO_TIMEOUT sets the patience)" in done.stderr


READ = """
import os, sys, threading

source, reads = os.path.realpath(sys.argv.pop(1)), int(sys.argv.pop(1))
lock = threading.Lock()


def hanging(call):
    def read(descriptor, *more):
        global reads
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(source):
            with lock:
                reads -= 1
            if reads < 0:
                threading.Event().wait()
        return call(descriptor, *more)

    return read


os.pread, os.preadv = hanging(os.pread), hanging(os.preadv)
from dlio.cli.__main__ import main
main()
"""


@pytest.mark.parametrize("command", ["stage", "verify", "pack"])
@pytest.mark.daily("verify")
def test_a_command_ends_whose_source_hangs_inside_of_a_read(
    command: str, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "tier").mkdir()
    files = sum(path.is_file() for path in pictures.rglob("*"))
    more = {"stage": ["--tiers", f"{tmp_path}/tier:64MiB"], "pack": [f"{tmp_path}/packed"]}
    # Opening looks into each file once; the samples come after that.
    words = [str(pictures), str(files + 2), command, str(pictures), *more.get(command, [])]
    done = _run(READ, words, tmp_path, 120)
    assert done.returncode == 2, done.stderr
    assert "the source hangs" in done.stderr
    assert not (tmp_path / "packed").exists()

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


@pytest.mark.parametrize("command", ["stage", "ls"])
@pytest.mark.daily("stage")
def test_a_command_ends_whose_source_hangs_at_opening(
    command: str, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "tier").mkdir()
    more = ["--tiers", f"{tmp_path}/tier:64MiB"] if command == "stage" else []
    own = {"DLIO_TIMEOUT": "1", "DLIO_CACHE": str(tmp_path / "cache"), "PYTHONPATH": SOURCES}
    done = subprocess.run(
        [sys.executable, "-c", STAGE, command, str(pictures), *more],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "no answer for 1 s: the source hangs (DLIO_TIMEOUT sets the patience)" in done.stderr

"""The temporary folder of a job: it goes with its launcher, or with the next job."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlio.launch.job_folder import PREFIX, open_job_folder

_KILLED = """
import os, signal, sys, tempfile
from dlio.launch.job_folder import open_job_folder
tempfile.tempdir = sys.argv[1]
with open_job_folder():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_job_takes_its_folder_along(temporary: Path) -> None:
    with open_job_folder() as folder, open_job_folder() as other:
        assert {folder, other} == {str(each) for each in temporary.iterdir()}
        assert os.path.basename(folder).startswith(PREFIX)
        assert os.stat(folder).st_mode & 0o077 == 0
    assert not list(temporary.iterdir())


@pytest.mark.cold
def test_the_next_job_removes_the_folder_of_a_launcher_that_was_killed(temporary: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(temporary)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    kept = temporary / "mine"
    kept.mkdir()
    (temporary / f"{PREFIX}file").touch()
    with open_job_folder():
        assert not left.exists()
    assert sorted(each.name for each in temporary.iterdir()) == [f"{PREFIX}file", "mine"]

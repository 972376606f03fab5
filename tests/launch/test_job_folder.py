"""The temporary folder of a job: it goes with its launcher, or with the next job."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlio.launch.job_folder import PREFIX, open_job_folder
from tests.conftest import SOURCES

_KILLED = """
import os, signal, sys, tempfile
from dlio.launch.job_folder import open_job_folder
tempfile.tempdir = sys.argv[1]
with open_job_folder():
    os.kill(os.getpid(), signal.SIGKILL)
"""

_LOOKS = """
import os
from dlio.train.callbacks import Callback

class Look(Callback):
    def epoch_ends(self, run, report):
        names = [name for name in os.listdir(os.environ["TMPDIR"]) if "torchinductor" not in name]
        print("seen", *names)
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


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.parametrize("fault", ["off", "restart"])
# SECURITY.md: S10
def test_mpirun_keeps_nothing_where_others_may_have_taken_its_names(
    pictures: Path, temporary: Path, fault: str
) -> None:
    """It empties its folder at the end, whoever has put a link to another one in its place."""
    watched = temporary / "shared"
    watched.mkdir()
    (temporary / "looks.py").write_text(_LOOKS)
    words = [str(pictures), "-n", "2", "--epochs", "1", "--image-size", "32", "--tiers", "none"]
    words += ["--backend", "mpi", "--model", "resnet(width=4)", "--callback", "looks:Look"]
    words += ["--fault-tolerance", "restart", "--checkpoint", "c"] if fault != "off" else []
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "train", *words],
        env={**os.environ, "TMPDIR": str(watched), "PYTHONPATH": f"{temporary}:{SOURCES}"},
        cwd=temporary,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [line.split() for line in done.stdout.splitlines() if line.startswith("seen")]
    assert names
    assert [name for line in names for name in line[1:] if not name.startswith(PREFIX)] == []

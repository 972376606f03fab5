"""A data folder belongs to one run at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlio.errors import UsageError
from dlio_bench.storage_cases.claim import claimed, remove_unclaimed


def test_one_run_at_a_time(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    with claimed(folder, keep=False):
        with (
            pytest.raises(UsageError, match="in use by another dlio bench storage"),
            claimed(folder, keep=False),
        ):
            raise AssertionError("two runs have one folder")
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


def test_only_the_run_that_made_a_folder_removes_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    with claimed(folder, keep=True):
        pass
    with claimed(folder, keep=False):
        pass
    assert os.path.isdir(folder)


def test_a_killed_run_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    program = (
        "import os, signal, sys\n"
        "from dlio_bench.storage_cases.claim import claimed\n"
        "with claimed(sys.argv[1], keep=False):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], timeout=400, check=False)
    assert done.returncode < 0
    assert os.path.isdir(folder)
    with claimed(folder, keep=False):
        pass


def test_a_folder_that_another_run_has_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlio_bench.storage_cases.claim._ENDING_S", 0.2)
    folder = str(tmp_path / "data")
    with claimed(folder, keep=True):
        remove_unclaimed(folder)
        assert os.path.isdir(folder)
    remove_unclaimed(folder)
    assert not os.path.exists(folder)


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"create .*nowhere first"),
        claimed(str(tmp_path / "nowhere" / "data"), keep=False),
    ):
        raise AssertionError("made a folder in a missing one")

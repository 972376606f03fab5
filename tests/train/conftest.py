"""A small data set for short runs, and `dlio` in a process of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SOURCES
from tests.drawn import small_pictures


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and val/: 101 and 23 pictures in 4 classes.

    101 is a prime: the last global batch is always smaller.
    """
    folder = tmp_path_factory.mktemp("drawn") / "pictures"
    small_pictures(folder / "train", images=101, classes=4)
    small_pictures(folder / "val", images=23, classes=4, seed=2)
    return folder


@pytest.fixture
def dlio(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `dlio ARGS...` in a process of its own, in an empty folder."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dlio.cli", *args],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": SOURCES,
                "DLIO_CACHE": str(tmp_path / "cache"),
                "DLIO_TIMEOUT": "180",
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that commands run in, with a module of models and callbacks."""
    shutil.copy(Path(__file__).with_name("nets.py"), tmp_path)
    return tmp_path

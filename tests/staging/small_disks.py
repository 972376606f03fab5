"""File systems in memory that fill up."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with some options at a new folder, within a `with` statement; skip the test
    without the right to mount one."""
    place.mkdir()
    if os.geteuid():
        pytest.skip("needs root")
    how = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    if subprocess.run(how, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)

"""No file that is made from the sources is tracked."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_file_that_git_ignores_is_tracked() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone: no git here")
    asked = ["git", "-C", str(ROOT), "ls-files", "-ci", "--exclude-standard"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout == ""


def test_the_root_has_texts_alone() -> None:
    # A script that a test or a trial runs leaves its weights in the working folder.
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone: no git here")
    asked = ["git", "-C", str(ROOT), "ls-files", "-z", ":(glob)*"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=400, check=True)
    names = done.stdout.split("\0")[:-1]
    assert "pyproject.toml" in names
    assert [name for name in names if b"\0" in (ROOT / name).read_bytes()] == []

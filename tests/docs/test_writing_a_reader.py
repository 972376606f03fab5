"""The guide to writing a reader: its package is built and tested as written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "writing-a-reader.md"
_FILE = re.compile(
    r"^`([\w.]+)`:\n\n(?:<!-- [^\n]* -->\n)?```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's files, and the entry points that installing them creates."""
    folder = tmp_path_factory.mktemp("guide")
    for name, text in _FILE.findall(GUIDE.read_text(encoding="utf-8")):
        (folder / name).write_text(text, encoding="utf-8")
    target = folder / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--quiet", "--target", str(target), "."],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "dlio_records.py").unlink()  # The installed copy is tested.
    return folder


def _run(package: Path, *command: str) -> str:
    rooms = [ROOT, *(ROOT / room for room in ("readers", "staging", "bench"))]
    paths = [str(package / "installed"), *map(str, rooms)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=package,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "DLIO_CACHE": str(package / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_reader_is_found_and_read_from(package: Path) -> None:
    assert _run(package, "train.py").count("torch.Size([100, 16])") == 10
    listed = _run(package, "-m", "dlio.cli", "ls", "numbers.records")
    assert "records" in listed
    assert "1,000" in listed


def test_the_reader_keeps_the_contract(package: Path) -> None:
    said = _run(package, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_records.py")
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= 20, said

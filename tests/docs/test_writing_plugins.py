"""The guides to writing a reader and a compressor: their packages are built and tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FILE = re.compile(
    r"^`([\w.]+)`:\n\n(?:<!-- [^\n]* -->\n)?```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def _install(folder: Path, guide: str) -> Path:
    """Write a guide's files to a folder, and install its package into `installed` there."""
    text = (ROOT / "docs" / "guides" / guide).read_text(encoding="utf-8")
    for name, body in _FILE.findall(text):
        (folder / name).write_text(body, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--quiet", "--target", str(folder / "installed"), "."],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for module in folder.glob("dlio_*.py"):
        module.unlink()  # The installed copy is tested.
    return folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the guide to readers."""
    return _install(tmp_path_factory.mktemp("reader"), "writing-a-reader.md")


@pytest.fixture(scope="module")
def compressor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the guide to compressors."""
    return _install(tmp_path_factory.mktemp("compressor"), "writing-a-compressor.md")


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


def _passed(package: Path, tests: str) -> int:
    """Run a guide's tests, and return how many passed."""
    said = _run(package, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tests)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    return int(passed[1])


def test_the_reader_is_found_and_read_from(reader: Path) -> None:
    assert _run(reader, "train.py").count("torch.Size([100, 16])") == 10
    listed = _run(reader, "-m", "dlio.cli", "ls", "numbers.records")
    assert "records" in listed
    assert "1,000" in listed


def test_the_reader_keeps_the_contract(reader: Path) -> None:
    assert _passed(reader, "test_records.py") >= 20


def test_the_compressor_is_found_by_its_name(compressor: Path) -> None:
    assert "4.00 bits per entry" in _run(compressor, "measure.py")


def test_exchanges_of_whole_weights_refuse_the_compressor(compressor: Path) -> None:
    parse = "from dlio.exchange.exchange_spec import parse_exchange as p;"
    _run(compressor, "-c", f"{parse} p('allreduce+nibbles'); p('diloco(32)+nibbles')")
    for refuses in ("asgd", "noloco(32)"):
        with pytest.raises(AssertionError, match="sends whole weights, of which nibbles"):
            _run(compressor, "-c", f"{parse} p('{refuses}+nibbles')")


def test_the_compressor_keeps_the_contract(compressor: Path) -> None:
    assert _passed(compressor, "test_nibbles.py") >= 15

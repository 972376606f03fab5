"""Staging onto a disk that takes fewer files than its free bytes promise."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SOURCES
from tests.staging.small_disks import mounted

pytestmark = pytest.mark.cold
_INODES = 200


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for bytes, but few files; skipped without the right to mount one."""
    with mounted(tmp_path / "disk", f"size=64m,nr_inodes={_INODES}") as place:
        yield place


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 samples, of which each fills a block of its own."""
    path = tmp_path_factory.mktemp("source") / "rows.npy"
    np.save(path, np.zeros((40, 300_000), np.uint8))
    return path


def _dlio(*words: object, cache: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dlio.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": SOURCES, "DLIO_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def _leave(disk: Path, inodes: int) -> None:
    """Take all inodes of a disk but some."""
    (disk / "others").mkdir()
    for number in range(os.statvfs(disk).f_favail - inodes):
        (disk / "others" / str(number)).touch()


def _blocks(disk: Path) -> int:
    return len(list(disk.rglob("*.blk")))


@pytest.mark.parametrize("inodes", [12, 20])
def test_what_fits_is_staged_and_the_rest_is_told(
    inodes: int, disk: Path, source: Path, tmp_path: Path
) -> None:
    (disk / "tier").mkdir()
    _leave(disk, inodes)
    argv = ["stage", source, "--tiers", f"{disk}/tier:40MiB", "--pin"]
    done = _dlio(*argv, cache=tmp_path / "cache")
    assert done.returncode == 4, done
    said = done.stdout + done.stderr
    assert "/proc/self" not in said
    assert "df -i" in done.stderr
    kept = _blocks(disk)
    total = int(done.stderr.split(" of ")[1].split(" blocks")[0])
    assert f"{total - kept} of {total} blocks" in done.stderr
    assert kept < total
    assert kept > 0 or inodes < 20
    # Where blocks are, there is a list of them; no half of one is left.
    assert not list(disk.rglob("tmp.*"))
    again = _dlio(*argv, "--allow-partial", cache=tmp_path / "cache")
    assert again.returncode == 0, again
    if kept:
        listed = _dlio("verify", f"{disk}/tier", cache=tmp_path / "cache")
        assert listed.returncode == 0, listed


def test_a_disk_without_any_room_is_an_error_with_its_folder(
    disk: Path, source: Path, tmp_path: Path
) -> None:
    (disk / "tier").mkdir()
    _leave(disk, 1)
    argv = ["stage", source, "--tiers", f"{disk}/tier:40MiB", "--allow-partial"]
    done = _dlio(*argv, cache=tmp_path / "cache")
    assert done.returncode == 2, done
    assert len(done.stderr.splitlines()) == 1
    assert f"{disk}/tier" in done.stderr
    assert "No space left" in done.stderr
    assert "/proc/self" not in done.stderr

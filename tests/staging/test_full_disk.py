"""Packing onto a full disk: one line that names it, and nothing half-written, in every format."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlio_staging.pack_writers import WRITERS
from tests.conftest import SOURCES
from tests.staging.small_disks import mounted

pytestmark = pytest.mark.cold


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skipped without the right to mount one."""
    with mounted(tmp_path / "disk", "size=1m") as place:
        yield place


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of files with bytes that cannot be compressed, 3 MB together."""
    folder = tmp_path_factory.mktemp("source")
    for k in range(60):
        inside = folder / "ab"[k % 2]
        inside.mkdir(exist_ok=True)
        (inside / f"{k}.jpg").write_bytes(os.urandom(50_000))
    return folder


@pytest.mark.parametrize(
    "left",
    [
        300_000,
        pytest.param(1 << 20, marks=pytest.mark.nightly),
        pytest.param(10_000, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("format_", WRITERS)
def test_a_full_disk_is_one_line(
    format_: str, left: int, source: Path, small_disk: Path, tmp_path: Path
) -> None:
    if left < 1 << 20:
        (small_disk / "other").write_bytes(bytes((1 << 20) - left))
    before = sorted(small_disk.iterdir())
    done = subprocess.run(
        [
            *[sys.executable, "-m", "dlio.cli", "pack", str(source)],
            *[str(small_disk / "packed"), "--format", format_, "--workers", "1"],
        ],
        env={
            **os.environ,
            "PYTHONPATH": SOURCES,
            "DLIO_CACHE": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 2, done
    # On a busy machine, progress is told meanwhile.
    said = [line for line in done.stderr.splitlines() if not line.startswith("packing: ")]
    assert len(said) == 1, done.stderr
    assert "No space left on device; free some space" in said[0]
    assert str(small_disk) in said[0]
    assert sorted(small_disk.iterdir()) == before

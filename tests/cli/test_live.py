"""A terminal shows at once how far a job of `-n` is."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

_TIMEOUT_S = 120.0


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for k in range(8):
            pixels = random.integers(0, 255, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{k}.png")
    return tmp_path / "data"


def _on_terminal(*argv: str, folder: Path) -> str:
    """Run dlio on a terminal of 80 columns and return all that it shows."""
    top, bottom = pty.openpty()
    own = {**os.environ, "COLUMNS": "80", "DLIO_CACHE": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dlio.cli", *argv],
        stdin=subprocess.DEVNULL,
        stdout=bottom,
        stderr=bottom,
        env=own,
        start_new_session=True,
    )
    os.close(bottom)
    shown, deadline = b"", time.monotonic() + _TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            if not select.select([top], [], [], 0.5)[0]:
                continue
            try:
                part = os.read(top, 1 << 16)
            except OSError:  # All that held the terminal have ended.
                break
            shown += part
        assert process.wait(60) == 0, shown.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(top)
    return shown.decode()


@pytest.mark.mpi
@pytest.mark.cold("nightly")
@pytest.mark.parametrize("backend", ["mpi", pytest.param("torch", marks=pytest.mark.nightly)])
def test_a_job_of_several_ranks_shows_a_bar(backend: str, pictures: Path, tmp_path: Path) -> None:
    options = ["--epochs", "2", "--image-size", "32", "--batch-size", "2", "--tiers", "none"]
    shown = _on_terminal(
        "train", str(pictures), "-n", "2", "--backend", backend, *options, folder=tmp_path
    )
    drawn = shown.replace("\r\n", "\n").split("\r\x1b[K")
    assert shown.index("starting 2 ranks") < shown.index("waiting for the first batch")
    assert shown.index("waiting for the first batch") < shown.index("epoch 1/2")
    bars = [row for row in drawn if row.startswith("epoch ") and "\n" not in row]
    assert any("#" in row for row in bars)
    assert all(len(row) < 80 for row in bars)
    assert "dlio-progress" not in shown
    assert "epoch 2/2: loss" in shown

"""`dlio bench search`: SIGKILLs change no result, and the source is read once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlio_bench.search_bench import SearchChoice, measure
from tests.drawn import draw_once


@pytest.fixture(name="pictures")
def _pictures(tmp_path: Path) -> Path:
    """A folder with drawn pictures in class folders, `train` and `val`."""
    folder = tmp_path / "drawn"
    draw_once(folder, images=48, validation=16, classes=4)
    return folder


@pytest.mark.nightly
@pytest.mark.cold
def test_ten_kills_of_24_trials_change_no_result(pictures: Path, tmp_path: Path) -> None:
    folders = (str(pictures / "train"), str(pictures / "val"))
    choice = SearchChoice(*folders, epochs=4, sample_ms=4, every_s=2.5, seed=3)
    report: dict[str, Any] = measure(choice, str(tmp_path))
    rows = {row["case"]: row for row in report["rows"]}
    assert [row["trials"] for row in rows.values()] == [24] * 4
    assert [row["source_read_times"] for row in rows.values()] == [1] * 4
    assert rows["asha"]["epochs"] < rows["packed"]["epochs"] == 96
    assert rows["storm"]["best"] == rows["asha"]["best"]
    assert not [line for line in report["said"] if "DIFFER" in line], report["said"]
    assert sum(map(int, re.findall(r": (\d+)", report["said"][-1]))) == 10


@pytest.mark.nightly
@pytest.mark.cold
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_kernel_sees_each_byte_of_the_source_read_once(pictures: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    subprocess.run(
        [
            *("strace", "-ff", "-y", "-qq", "-e", "trace=read,pread64,readv,preadv,preadv2"),
            *("-o", str(log), sys.executable, "-P", "-m", "dlio.cli", "search", "train"),
            *("--val", "val", "--set", "lr=0.01..0.1", "--sampler", "random", "--trials", "3"),
            *("--epochs", "2", "-n", "2", "--image-size", "32", "--model", "lenet"),
            *("--study", str(tmp_path / "search")),
        ],
        cwd=pictures,
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    read: dict[str, int] = {}
    probed: dict[str, int] = {}
    # A file of each thread: no call is interrupted by lines of others.
    calls = "\n".join(path.read_text(errors="replace") for path in tmp_path.glob("calls.*"))
    for line in calls.splitlines():
        match = re.search(r"\b(\w+)\(\d*<?.*?(/(?:train|val)/[^>]*\.jpg)>.* = (\d+)$", line)
        if match is not None:
            # The data set's identity is made of samples of its files, which pread64 reads.
            counts = probed if match[1] == "pread64" else read
            counts[match[2]] = counts.get(match[2], 0) + int(match[3])
    sizes = {
        str(path).removeprefix(str(pictures)): path.stat().st_size
        for path in pictures.glob("*/*/*.jpg")
    }
    assert read == sizes
    assert max(probed.values()) <= 3 * 4096

"""Networks of the field, each trained for a few hundred steps by `dlio train` on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlio.train.train_options import MODEL_NAMES
from tests.conftest import SOURCES


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name != "unet"])
def test_a_few_hundred_steps_lower_the_loss(name: str, pictures: Path, tmp_path: Path) -> None:
    side, epochs = ("32", 64) if name == "lenet" else ("64", 16)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlio.cli", "train", str(pictures / "train"), "-n", "2"),
            *("--model", name, "--image-size", side, "--batch-size", "4", "--epochs", str(epochs)),
            *("--optimizer", "adamw", "--lr", "0.0005", "--report", "r.json"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCES, "DLIO_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [epoch["loss"] for epoch in json.loads((tmp_path / "r.json").read_text())["epochs"]]
    assert len(losses) == epochs  # Of 13 steps each.
    assert losses[-1] < 0.9 * losses[0], losses


def test_a_network_of_another_task_is_refused(pictures: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlio.cli", "train", str(pictures / "train")),
            *("--task", "classify", "--model", "unet", "--image-size", "32"),
        ],
        env={**os.environ, "PYTHONPATH": SOURCES, "DLIO_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "--task segment" in done.stderr

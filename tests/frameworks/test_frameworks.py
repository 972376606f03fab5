"""Lightning, Accelerate and Hugging Face's Trainer train an epoch from it, with 1 and 2 ranks."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

BODY = str(Path(__file__).with_name("train.py"))
pytestmark = pytest.mark.usefixtures("open_mpi_segments")


def _run(framework: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed (pip install 'dlio[dev]')")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv = [sys.executable, *(launcher if ranks > 1 else []), BODY, framework, str(folder)]
    # Without a network, and without looking for one.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    # Ranks share one output with messages of frameworks: a line may begin in another.
    parts = done.stdout.split('{"seen"')[1:]
    return [json.JSONDecoder().raw_decode('{"seen"' + part)[0] for part in parts]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_an_epoch_is_every_sample_once(framework: str, ranks: int, tmp_path: Path) -> None:
    reports = _run(framework, ranks, tmp_path)
    assert len(reports) == ranks
    assert sorted(chain.from_iterable(each["seen"] for each in reports)) == list(range(40))
    for each in reports:
        assert each["class"] == "dlio.loader.dataloader.DataLoader"
        assert each["options"] == ["global", 5, "skip"]
        assert each["engine"] == "threads"

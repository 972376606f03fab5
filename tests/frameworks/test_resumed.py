"""A run that is resumed in the middle of an epoch trains on exactly the rest, on any ranks."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MpiRun

BODY = str(Path(__file__).with_name("resumed.py"))
FRAMEWORKS = ("lightning", "accelerate", "transformers")


def _seen(folder: Path, part: str, framework: str, ranks: int) -> dict[str, list[int]]:
    """The samples of each epoch, sorted."""
    seen: dict[str, list[int]] = {}
    for rank in range(ranks):
        text = (folder / f"{part}-{framework}-{ranks}-{rank}.json").read_text()
        for epoch, samples in json.loads(text).items():
            seen[epoch] = sorted(seen.get(epoch, []) + samples)
    return seen


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi_segments")
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, FRAMEWORKS)), reason="pip install 'dlio[dev]'"
)
@pytest.mark.parametrize("ranks", ["1-2", "2-1", "2-2", "1-1"])
@pytest.mark.daily("1-2")
def test_a_resumed_epoch_is_the_rest_once(mpirun: MpiRun, tmp_path: Path, ranks: str) -> None:
    before, after = map(int, ranks.split("-"))
    for count, part in ((before, "train"), (after, "resume")):
        argv = [BODY, str(tmp_path), part, ",".join(FRAMEWORKS)]
        env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if count > 1:
            done = mpirun(count, *argv, env=env, timeout_s=800)
        else:
            done = subprocess.run(
                [sys.executable, *argv],
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                timeout=800,
                check=False,
            )
        assert done.returncode == 0, done.stderr[-4000:]
    everything = list(range(24))
    for framework in FRAMEWORKS:
        first = _seen(tmp_path, "train", framework, before)
        rest = _seen(tmp_path, "resume", framework, after)
        assert first["0"] == everything, framework
        assert len(first["1"]) == 8, framework
        assert sorted(first["1"] + rest["1"]) == everything, framework
        assert rest["2"] == everything, framework


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.usefixtures("open_mpi_segments")
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, FRAMEWORKS)), reason="pip install 'dlio[dev]'"
)
@pytest.mark.parametrize("loader", ["DataLoader", "StatefulDataLoader"])
def test_the_rest_is_each_sample_once_where_ranks_do_not_divide_it(
    mpirun: MpiRun, tmp_path: Path, loader: str
) -> None:
    frameworks = FRAMEWORKS[:2]  # Trainer resumes after whole steps alone.
    for count, part in ((2, "train"), (3, "resume")):
        argv = [BODY, str(tmp_path), part, ",".join(frameworks)]
        done = mpirun(count, *argv, env={"LOADER": loader}, timeout_s=800)
        assert done.returncode == 0, done.stderr[-4000:]
    everything = list(range(24))
    for framework in frameworks:
        before = set(_seen(tmp_path, "train", framework, 2)["1"])
        rest = _seen(tmp_path, "resume", framework, 3)
        assert len(before) == 8, framework
        assert sorted(before ^ set(rest["1"])) == everything, framework
        # Of 4 samples in the last step one rank has none: it computes on two that count nothing.
        assert len(rest["1"]) == 16 + 2, framework
        assert rest["2"] == everything, framework


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="pip install 'dlio[dev]'")
def test_lightning_resumes_each_loader_with_the_batches_of_a_whole_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BODY, str(tmp_path), "train", "boundaries"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads((tmp_path / "train-boundaries-1-0.json").read_text())
    assert len(seen) == 7 * 2 * 4
    differ = {when: (whole, again) for when, (whole, again) in seen.items() if whole != again}
    assert differ == {}

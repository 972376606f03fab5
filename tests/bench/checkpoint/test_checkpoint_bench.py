"""`dlio bench checkpoint`: every method gives back what it wrote, and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio_bench.checkpoint_cases.methods import METHODS, StallTraining, measure_stalls, random_state


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dd"])
def test_each_method_gives_back_the_state_at_the_time_of_saving(tmp_path: Path, name: str) -> None:
    tensors = random_state(100_000, 3, tensor_bytes=40_000)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 100_000
    before = {key: value.clone() for key, value in tensors.items()}
    method = METHODS[name](str(tmp_path / "c"))
    method.save(1, tensors)
    method.before_update()
    for value in tensors.values():
        value.zero_()  # As an optimizer step changes them, while the files are written.
    method.finish()
    back = {key: torch.empty_like(value) for key, value in tensors.items()}
    method.read(1, back)
    assert all(torch.equal(back[key], before[key]) for key in before)
    assert any((tmp_path / "c").rglob("*"))
    method.close()
    assert not list(tmp_path.iterdir())


def test_dd_writes_as_many_bytes(tmp_path: Path) -> None:
    method = METHODS["dd"](str(tmp_path / "c"))
    method.save(1, random_state(12_345_678, 0))
    (path,) = (tmp_path / "c").iterdir()
    assert path.stat().st_size == 12_345_680
    method.read(1, {})
    method.close()


@pytest.mark.nightly  # By day, the command measures stalls below.
def test_stalls_are_of_each_method_and_repeat(tmp_path: Path) -> None:
    training = StallTraining(200_000, 4)
    names = ("dlio", "dcp async_save")
    stalls = measure_stalls(str(tmp_path), names, training, 2, 2, SingleCommunicator())
    assert sorted(each.method for each in stalls) == sorted(names * 2)
    assert all(each.blocked_s >= 0 and each.step_s > 0 for each in stalls)
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi
def test_ranks_report_bandwidth_and_stall(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlio.cli", "bench", "checkpoint", ".", "-n", "2"]
    options = ["--size", "64KiB", "--repeats", "1", "--steps", "1", "--batch-size", "2"]
    done = subprocess.run(
        [*command, *options, "--report", "r.json"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    figures = {(each["name"], each["labels"]["method"]) for each in report["figures"]}
    assert {("write", name) for name in METHODS} <= figures
    assert {("blocked", "dlio"), ("slower", "dcp save"), ("read", "dd")} <= figures
    assert {each["name"] for each in report["ratios"]} >= {"write, dlio / dd"}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]

"""Scripts in float64 and in 16 bits train on several ranks as in one process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

_SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(default, model):
    torch.set_default_dtype(default)
    torch.manual_seed(0)
    x = torch.randn(64, 6, dtype=torch.float64).to(model)
    y = x @ torch.randn(6, 2, dtype=torch.float64).to(model)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(model)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=12):
            loss = nn.functional.mse_loss(net(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return net.state_dict()

f16, b16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pairs = {"model": (f32, f64), "default": (f64, f64), "b16": (b16, b16), "f16": (f16, f16)}
torch.save({k: train(*v) for k, v in pairs.items()}, sys.argv[1])
"""


def _run(argv: Sequence[str], out: Path) -> dict[str, dict[str, torch.Tensor]]:
    done = subprocess.run(
        [sys.executable, *argv, str(out)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    saved: dict[str, dict[str, torch.Tensor]] = torch.load(out)
    return saved


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--fault-tolerance", "shrink"),
        ("--exchange", "local-sgd(1)+int8"),
        ("--exchange", "local-sgd(1)"),  # With equal parts the mean of weights is one process's.
    ],
    ids=["plain", "shrink", "packed", "weights"],
)
@pytest.mark.daily("plain", "shrink")
def test_scripts_of_other_types_train_as_in_one_process(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    whole = _run([str(script)], tmp_path / "whole.pt")
    argv = ["-m", "dlio.cli", "run", "-n", "2", *options, str(script)]
    parts = _run(argv, tmp_path / "parts.pt")
    loose = bool(options) and "int8" in options[-1]
    for kind, most in {"model": 1e-14, "default": 1e-14, "b16": 0.05, "f16": 0.01}.items():
        for name, tensor in whole[kind].items():
            assert parts[kind][name].dtype is tensor.dtype
            error = float((parts[kind][name].double() - tensor.double()).abs().max())
            assert error < (0.1 if loose else most), f"{kind}, {name}"

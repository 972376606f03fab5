"""Orders of samples in every pass of a script: one process's, or the same on all ranks and told."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MpiRun

_SCRIPT = """
import os, random, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset[torch.Tensor]):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        flip = torch.rand(1).lt(0.5) + 0 * random.random() if FLIP else 0
        return torch.tensor([float(index)]) + 0.1 * flip

FLIP = sys.argv[1] == "flip"
torch.manual_seed(5)
generator = torch.Generator().manual_seed(3) if "own" in sys.argv else None
workers = int("workers" in sys.argv)
loader = DataLoader(Numbers(), 4, shuffle=True, generator=generator, num_workers=workers)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-5)
for epoch in range(3):
    for batch, x in enumerate(loader):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        text = " ".join(str(int(each)) for each in x)
        sys.__stderr__.write(f"ORDER {epoch} {batch} [{text}]\\n")
"""


def _orders(text: str) -> dict[tuple[int, int], list[list[int]]]:
    """Return the samples that each rank got, by epoch and batch."""
    by_place: dict[tuple[int, int], list[list[int]]] = {}
    for epoch, batch, samples in re.findall(r"ORDER (\d+) (\d+) \[([\d ]*)\]", text):
        by_place.setdefault((int(epoch), int(batch)), []).append([int(k) for k in samples.split()])
    return by_place


def _samples(batch: list[list[int]]) -> list[int]:
    return sorted({sample for part in batch for sample in part})


@pytest.fixture
def both(tmp_path: Path, mpirun: MpiRun) -> Callable[..., tuple[str, str]]:
    """Runs the script in one process and on 2 ranks; returns the standard errors."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT, encoding="utf-8")

    def run(*args: str) -> tuple[str, str]:
        one = subprocess.run(
            [sys.executable, script, *args], capture_output=True, text=True, timeout=300, check=True
        )
        two = mpirun(2, "-m", "dlio.cli", "run", str(script), *args)
        assert two.returncode == 0, two.stderr
        return one.stderr, two.stderr

    return run


@pytest.mark.mpi
@pytest.mark.parametrize("args", [("plain",), ("flip", "own"), ("flip", "workers")])
def test_orders_of_all_epochs_are_one_process_s(
    both: Callable[..., tuple[str, str]], args: tuple[str, ...]
) -> None:
    one, two = both(*args)
    expected, got = _orders(one), _orders(two)
    assert len(expected) == 18
    assert {place: _samples(batch) for place, batch in got.items()} == {
        place: _samples(batch) for place, batch in expected.items()
    }


@pytest.mark.mpi
def test_orders_after_samples_that_draw_are_the_same_on_all_ranks_and_told(
    both: Callable[..., tuple[str, str]],
) -> None:
    one, two = both("flip")
    got = _orders(two)
    for epoch in range(3):
        taken = [_samples(batch) for place, batch in got.items() if place[0] == epoch]
        assert sorted(sample for batch in taken for sample in batch) == list(range(22))
    expected = _orders(one)
    assert [_samples(got[0, k]) for k in range(6)] == [_samples(expected[0, k]) for k in range(6)]
    notice = "train.py:22: samples of Numbers draw random numbers of random and torch in the script"
    assert two.count(notice) == 1


_ENDLESS = """
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
torch.manual_seed(0)
x = torch.randn(40, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = RandomSampler(data, replacement=True, num_samples=10**10)
batches = iter(DataLoader(data, 8, sampler=sampler))
for step in range(4):
    a, b = next(batches)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f} {torch.rand(1).item():.4f}")
"""


@pytest.mark.mpi
@pytest.mark.timeout(400)
def test_a_pass_that_draws_samples_again_for_ever_begins_at_once(
    mpirun: MpiRun, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ENDLESS, encoding="utf-8")
    one = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=True
    )
    two = mpirun(2, "-m", "dlio.cli", "run", str(script), timeout_s=300)
    assert two.returncode == 0, two.stderr
    assert two.stdout.split() == one.stdout.split()


_BY_LOSSES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 2, torch.arange(24))
net, losses, kept = nn.Linear(4, 2), torch.ones(24), torch.ones(24)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for weights in (kept, losses):
        for x, y, which in DataLoader(data, 8, sampler=WeightedRandomSampler(weights, 24)):
            each = nn.functional.cross_entropy(net(x), y, reduction="none")
            losses[which] = each.detach()
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
"""


@pytest.mark.mpi
def test_an_order_by_losses_of_a_rank_s_samples_is_told(tmp_path: Path, mpirun: MpiRun) -> None:
    script = tmp_path / "train.py"
    script.write_text(_BY_LOSSES, encoding="utf-8")
    said = mpirun(2, "-m", "dlio.cli", "run", str(script)).stderr
    assert said.count("a sampler draws another order there on each rank") == 1
    assert "train.py:11: a sampler draws" in said

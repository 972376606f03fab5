"""Counts the sums over ranks in each step of several losses."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dlio.comm import Request
from dlio.comm.mpi import MpiCommunicator

BATCH, STEPS = 8, 8
count = [0]
original = MpiCommunicator.iallreduce


def counted(self: MpiCommunicator, array: "np.ndarray[Any, Any]") -> Request:
    count[0] += 1
    return original(self, array)


setattr(MpiCommunicator, "iallreduce", counted)  # noqa: B010 - mypy refuses a method
torch.manual_seed(0)
inputs = torch.randn(BATCH * STEPS, 6)
targets = torch.arange(BATCH * STEPS) % 4
masked = targets.clone()
masked[(torch.arange(len(masked)) * 7) % 11 < 4] = -100
late = targets.clone()
late[3 * BATCH] = late[5 * BATCH] = -100
empty = masked.clone()
empty[4 * BATCH : 5 * BATCH] = -100


def entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(out, y)


LOSSES: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "mean": (targets, entropy),
    "masked": (masked, entropy),
    "empty": (empty, entropy),
    "sum": (targets, lambda out, y: functional.cross_entropy(out, y, reduction="sum") / BATCH),
    "smoothed": (targets, lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.1)),
    "two": (masked, lambda out, y: entropy(out, y) + 0.5 * out.square().mean()),
    "changes": (late, lambda out, y: entropy(out, y) + 0.5 * out.square().mean()),
}
saved = {}
for name, (labels, loss_of) in LOSSES.items():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = []
    for step, (x, y) in enumerate(DataLoader(TensorDataset(inputs, labels), BATCH)):
        before = count[0]
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if name == "empty" and step == 4:
            assert loss.isnan()
        optimizer.step()
        sums.append(count[0] - before)
    print(f"{name}: sums {' '.join(map(str, sums))}")
    saved[name] = model.weight.detach()
torch.save(saved, sys.argv[1])

"""Weights that the script changes itself, without an optimizer, next to another object's `step`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """Counts batches."""

    def step(self) -> None:
        print(".", end="")


torch.manual_seed(3)
x = torch.randn(50, 4)
model, progress = nn.Linear(4, 1), Progress()
for _ in range(2):
    for a, b in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=7, shuffle=True):
        model.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        progress.step()
torch.save(model.state_dict(), sys.argv[1])

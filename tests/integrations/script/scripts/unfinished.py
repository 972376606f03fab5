"""Passes that the script leaves unfinished, which Python frees at another moment on each rank."""

import gc
import os
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
gc.disable()
torch.manual_seed(1)
data = TensorDataset(torch.randn(33, 6), torch.randn(33, 4))
short = TensorDataset(torch.randn(22, 6), torch.randn(22, 4))


def train(turns_to_free):
    """Frees earlier passes, on each rank in another turn."""
    torch.manual_seed(2)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn, (x, t) in enumerate(DataLoader(data, 7, shuffle=True)):
        if turn == turns_to_free[RANK]:
            gc.collect()
        target = t + torch.randn(len(x), 4)
        loss = functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    return [p.detach() for p in model.parameters()]


def look(keeps):
    """Leaves a pass after a batch, in a cycle of references."""
    turns = iter(DataLoader(short, 4))
    next(turns)
    cycle = [turns]
    cycle.append(cycle)
    if keeps:
        kept.append(turns)


def train_with(keeps):
    """Leaves a pass of batches that it has trained on."""
    torch.manual_seed(2)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turns = iter(DataLoader(short, 5))
    cycle = [turns]
    cycle.append(cycle)
    for x, t in DataLoader(data, 9):
        u, v = next(turns)
        loss = functional.mse_loss(model(x), t) + functional.l1_loss(model(u), v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if keeps:
        kept.append(turns)
    return [p.detach() for p in model.parameters()]


kept = []
saved = {}
for keeps in (False, True):
    look(keeps)
    saved[f"looked {keeps}"] = train([0, 1, 3, 9])
    for epoch in range(2):
        saved[f"together {keeps} {epoch}"] = train_with(keeps)
        saved[f"after {keeps} {epoch}"] = train([9, 0, 2, 3])
torch.save(saved, sys.argv[1])

"""A short training for one process; `plain.py EXCHANGE` trains on ranks by `dlio.distribute`."""

import contextlib
import sys

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH = 12
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(10 * BATCH, 6), torch.arange(10 * BATCH) % 3)
mine = slice(None)
ranks: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if len(sys.argv) > 1:
    import dlio
    from dlio.comm import world

    mine = slice(world().rank, None, world().size)
    ranks = dlio.distribute(model, optimizer, sys.argv[1])
with ranks:
    for inputs, targets in DataLoader(data, BATCH):
        loss = functional.cross_entropy(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        loss.item()

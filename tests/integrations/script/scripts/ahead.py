"""A loop that takes each batch before it trains on the one before, as prefetchers do."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
inputs = torch.randn(106, 10)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=20, shuffle=True)
for _ in range(2):
    batches = iter(loader)
    following = next(batches, None)
    while following is not None:
        x, y = following
        following = next(batches, None)
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
torch.save(model.state_dict(), sys.argv[1])

"""Counts how often each sample is in a gradient: weight i gets a gradient from sample i alone."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N, EPOCHS = 101, 3
ahead = len(sys.argv) > 2  # Take the next batch before this one is trained on.
model = nn.Embedding(N, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(N)), batch_size=16, shuffle=True)


def taken_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loader, each after the next one has been taken."""
    before = None
    for item in loader:
        if before is not None:
            yield before
        before = item
    yield before


for epoch in range(EPOCHS):
    counts = torch.zeros(N, dtype=torch.int64)
    steps = 0
    for (x,) in taken_ahead(loader) if ahead else loader:
        old = model.weight.detach().clone()
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        counts += (model.weight.detach() != old)[:, 0]
        steps += 1
    print(f"epoch {epoch}: {counts.tolist()} in {steps} steps")
torch.save(model.state_dict(), sys.argv[1])

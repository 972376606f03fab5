"""Parameters that are not trained from the start: unfrozen, added to a group, and those of a second
optimizer over the same model; a discriminator-like part that is frozen in every other step; an
optimizer that is made between a forward and its backward, as lazy layers have it."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(66, 10)
labels = (inputs @ torch.randn(10, 3)).argmax(1)
backbone, head = nn.Linear(10, 16), nn.Linear(16, 3)
backbone.requires_grad_(False)
model = nn.Sequential(backbone, nn.Tanh(), head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=11)
extra = nn.Linear(3, 3)


def epoch(optimizer):
    for step, (x, y) in enumerate(loader):
        head.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(extra(model(x)), y).backward()
        optimizer.step()


epoch(optimizer)
backbone.requires_grad_(True)
epoch(optimizer)
optimizer.add_param_group({"params": extra.parameters(), "lr": 0.05})
epoch(optimizer)
epoch(torch.optim.Adam([*backbone.parameters(), *extra.parameters()], lr=0.01))
lazy, optimizer = nn.LazyLinear(3), None
for x, y in loader:
    loss = nn.functional.cross_entropy(lazy(x), y)
    if optimizer is None:
        optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(
    {"model": model.state_dict(), "extra": extra.state_dict(), "lazy": lazy.state_dict()},
    sys.argv[1],
)

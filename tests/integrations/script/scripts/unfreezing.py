"""Parameters that are not trained from the start: unfrozen, added to a group, and those of a second
optimizer over the same model; a discriminator-like part that is frozen in every other step; an
optimizer that is made between a forward and its backward, as lazy layers have it; and a first
gradient that the script reads: sharpness-aware steps (SAM) right after a part was unfrozen."""

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
sharp = nn.Sequential(nn.Linear(10, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 3))
optimizer = torch.optim.SGD(sharp[2].parameters(), lr=0.1)
for step, (x, y) in enumerate(loader):
    if step == 2:
        optimizer.add_param_group({"params": sharp[0].requires_grad_(True).parameters()})
    optimizer.zero_grad()
    nn.functional.cross_entropy(sharp(x), y).backward()
    with torch.no_grad():
        read = [(p, 0.5 * p.grad / p.grad.norm()) for p in sharp.parameters() if p.requires_grad]
        for p, way in read:
            p.add_(way)
    optimizer.zero_grad()
    nn.functional.cross_entropy(sharp(x), y).backward()
    with torch.no_grad():
        for p, way in read:
            p.sub_(way)
    optimizer.step()
torch.save(
    {
        "model": model.state_dict(),
        "extra": extra.state_dict(),
        "lazy": lazy.state_dict(),
        "sharp": sharp.state_dict(),
    },
    sys.argv[1],
)

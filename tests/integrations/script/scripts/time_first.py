"""Losses over batches whose first dimension is time, as many steps as a part has samples."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x, y = torch.randn(70, 5, 6), torch.randn(70, 5, 2)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def first_time(samples: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(each, 1) for each in zip(*samples, strict=True))


def by_sum(far: torch.Tensor) -> torch.Tensor:
    return far.square().sum(1).mean()


def by_time(far: torch.Tensor) -> torch.Tensor:
    return far.square().sum(0).mean()


def by_size(far: torch.Tensor) -> torch.Tensor:
    return far.square().sum() / far.shape[1]


def by_step(far: torch.Tensor) -> torch.Tensor:
    return torch.stack([each.square().mean() for each in far]).mean()


# Of 8 samples one rank has 5 at first, of 10 each has.
for loss_of in (by_sum, by_time, by_size, by_step):
    for size in (8, 10):
        for a, b in DataLoader(TensorDataset(x, y), size, collate_fn=first_time):
            optimizer.zero_grad()
            loss_of(model(a) - b).backward()
            optimizer.step()
torch.save(model.state_dict(), sys.argv[1])

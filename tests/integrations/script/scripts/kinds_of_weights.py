"""Weights without a shape at first, complex ones, and an optimizer's step with an argument."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.cfloat))
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.cdouble))

    def forward(self, x):
        spectrum = torch.fft.rfft(x) @ self.weight + self.wide.to(torch.cfloat)
        return spectrum.abs()


class Plain(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * factor * parameter.grad


torch.manual_seed(3)
inputs = torch.randn(66, 8)
targets = inputs.cumsum(1)[:, :2]
model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), Waves(), nn.LazyLinear(2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
plain = Plain(model.parameters(), lr=0.05)
for epoch in range(2):
    for x, y in loader:
        plain.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        plain.step(0.5**epoch)
torch.save({name: torch.view_as_real(each) if each.is_complex() else each
            for name, each in model.state_dict().items()}, sys.argv[1])  # fmt: skip

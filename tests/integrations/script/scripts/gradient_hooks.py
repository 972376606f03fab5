"""Hooks on gradients that are not linear, before and after they are added up, and noise of them."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(66, 8)
targets = torch.tanh(inputs @ torch.randn(8, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
lengths = []
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


def scaled(parameter):
    parameter.grad /= 0.1 + parameter.grad.norm()


model[0].weight.register_post_accumulate_grad_hook(scaled)
watch = model[2].weight.register_hook(lambda gradient: lengths.append(gradient.norm().item()))
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
for _ in range(3):
    for number, (x, y) in enumerate(loader):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        if number % 2:
            for parameter in model.parameters():
                parameter.grad += torch.randn_like(parameter.grad) * 0.01
            optimizer.step()
            optimizer.zero_grad()
    watch.remove()
    print(len(lengths), f"{sum(lengths):.4f}")
# Each layer's optimizer steps as soon as its gradient is there.
own = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}


def steps(parameter):
    own[parameter].step()
    own[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(steps)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
torch.save(model.state_dict(), sys.argv[1])

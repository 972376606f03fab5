"""Uses of the gradients of samples and activations: adversarial samples, penalties."""

import itertools
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(77, 6)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept: dict[str, torch.Tensor] = {}


def loss_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(a), b)


def by_backward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.requires_grad_()
    loss_of(a, b).backward()
    loss_of(a, b).backward()  # Adds to it.
    return a.detach() + 3 * a.grad


def by_grad(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.requires_grad = True
    (gradient,) = torch.autograd.grad(loss_of(a, b), a)
    return a.detach() + 3 * gradient


def by_optimizer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    change = torch.zeros_like(a, requires_grad=True)
    attack = torch.optim.SGD([change], lr=2.0, momentum=0.5, maximize=True)
    for _ in range(2):
        attack.zero_grad()
        loss_of(a + change, b).backward()
        attack.step()
    return a + change.detach()


def by_activation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first = model[0](a)
    first.retain_grad()
    hidden = torch.tanh(first)
    hidden.register_hook(lambda gradient: kept.update(hidden=gradient))
    functional.cross_entropy(model[2](hidden), b).backward()
    return a + (first.grad @ model[0].weight + kept["hidden"][:, :6]).detach()


# A half of 24 has the first layer's 12 rows.
for size, make in itertools.product((7, 24), (by_backward, by_grad, by_optimizer, by_activation)):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True):
        changed = make(a.clone(), b)
        optimizer.zero_grad()
        loss_of(changed, b).backward()
        optimizer.step()
for a, b in DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True):
    a.requires_grad_()
    loss = loss_of(a, b)
    (gradient,) = torch.autograd.grad(loss, a, create_graph=True)
    optimizer.zero_grad()
    (loss + gradient.square().sum()).backward()
    optimizer.step()


# A backward inside of another: its gradients go on into the outer one.


class Again(torch.autograd.Function):
    """Computes a layer once more in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(a, weight)
        ctx.kind = kind
        return a @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            made = a @ weight.T
        if ctx.kind == "grad":
            return *torch.autograd.grad(made, (a, weight), gradients), None
        torch.autograd.backward(made, gradients)
        return a.grad, weight.grad, None


def through(a: torch.Tensor, kind: str) -> torch.Tensor:
    before = model[1](model[0](a))
    if kind == "checkpoint":
        made: torch.Tensor = checkpoint(model[2], before, use_reentrant=True)
        return made
    return Again.apply(before, model[2].weight, kind) + model[2].bias


for kind in ("checkpoint", "backward", "grad"):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True):
        optimizer.zero_grad()
        functional.cross_entropy(through(a, kind), b).backward()
        optimizer.step()
torch.save(model.state_dict(), sys.argv[1])

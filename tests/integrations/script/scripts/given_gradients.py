"""Backward of a vector with the gradient that the script gives it, and a loss of one element."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(45, 4)  # The last batch has 5: on 3 ranks or more, some have none of it.
data = TensorDataset(x, x @ torch.randn(4, 6))


def mean(net, a, b):
    each = functional.mse_loss(net(a), b, reduction="none")[:, 0]
    each.backward(torch.ones_like(each) / each.numel())


def mean_of_batch(net, a, b):
    each = functional.l1_loss(net(a), b, reduction="none")
    torch.autograd.backward([each], [torch.full_like(each, 1 / 8)])


def split(net, a, b):
    hidden = net[:2](a)
    below = hidden.detach().requires_grad_()
    loss = functional.mse_loss(net[2](below), b)
    loss.backward()
    hidden.backward(below.grad)
    return loss


def one_element(net, a, b):
    loss = (net(a) - b).square().sum(1, keepdim=True).mean(0)
    loss.backward()
    return loss


saved = []
for step in (mean, mean_of_batch, split, one_element):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for a, b in DataLoader(data, 8, shuffle=True):
        optimizer.zero_grad()
        last = step(net, a, b)
        optimizer.step()
    if step in (split, one_element):
        print(f"{step.__name__}: {float(last):.4f}")
    saved.append([p.detach() for p in net.parameters()])
torch.save(saved, sys.argv[1])

"""Gradients that no backward makes: assigned, added in place, and for a part of the model."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(66, 6)
targets = torch.tanh(inputs @ torch.randn(6, 1))
first, second = nn.Linear(6, 8), nn.Linear(8, 1)
model = nn.Sequential(first, nn.Tanh(), second)


def gradients(loss, module):
    parameters = list(module.parameters())
    return zip(parameters, torch.autograd.grad(loss, parameters), strict=True)


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in DataLoader(TensorDataset(inputs, targets), batch_size=11):
        loss = nn.functional.mse_loss(model(x), y)
        if epoch == 0:
            for parameter, gradient in gradients(loss, model):
                parameter.grad = gradient
        elif epoch == 1:
            optimizer.zero_grad(set_to_none=False)
            for parameter, gradient in gradients(loss, model):
                parameter.grad += gradient
        else:
            optimizer.zero_grad()
            loss.backward(inputs=list(first.parameters()), retain_graph=True)
            for parameter, gradient in gradients(loss, second):
                parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
torch.save(model.state_dict(), sys.argv[1])

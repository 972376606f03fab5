"""Passes that train or not by the use of their batches, not from `train` and `eval`."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
inputs = torch.randn(90, 6)
labels = (inputs.sum(1) > 0).long()
train = TensorDataset(inputs[:60], labels[:60])
test = TensorDataset(inputs[60:], labels[60:])
loaders = {"train": DataLoader(train, 8, shuffle=True), "val": DataLoader(test, 7)}
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
teacher = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate(loader, with_gradients):
    right = seen = 0
    for x, y in loader:
        with torch.set_grad_enabled(with_gradients):
            out = model(x)
        right += int((out.argmax(1) == y).sum())
        seen += len(x)
    return f"{right} of {seen}"


def attack(loader):
    """Evaluate with a backward of each batch, but no step."""
    right = 0
    for x, y in loader:
        x.requires_grad_(True)
        functional.cross_entropy(model(x), y).backward()
        right += int((model(x + 0.1 * x.grad.sign()).argmax(1) == y).sum())
    optimizer.zero_grad()
    return right


def run(phase):
    right = 0
    for x, y in loaders[phase]:
        with torch.set_grad_enabled(phase == "train"):
            out = model(x)
            loss = functional.cross_entropy(out, y)
        if phase == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            right += int((out.argmax(1) == y).sum())
    return right


print("before", evaluate(loaders["val"], with_gradients=False))
model[1].eval()
for _ in range(2):
    for step, (x, y) in enumerate(DataLoader(train, 9)):
        teacher.eval()
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        out = model(x)
        loss = functional.cross_entropy(out, y) + functional.cross_entropy(out, soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print("inside", evaluate(loaders["val"], with_gradients=False))
    for phase in ("train", "val"):
        print(phase, run(phase))
    print("after", evaluate(loaders["val"], with_gradients=True), attack(loaders["val"]))
    print("of the training data", evaluate(loaders["train"], with_gradients=False))
torch.save(model.state_dict(), sys.argv[1])

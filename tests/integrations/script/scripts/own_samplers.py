"""Samplers of the script's: resumed from their state, without an end, and in a thread; `squeeze` of
a last batch of few samples; the best weights in a temporary folder."""

import os
import queue
import sys
import tempfile
import threading

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset


class Resumed(Sampler):
    def __init__(self, count):
        self.count, self.done, self.epoch = count, 0, 0

    def __iter__(self):
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        while self.done < self.count:
            self.done += 1
            yield order[self.done - 1].item()
        self.done, self.epoch = 0, self.epoch + 1

    def __len__(self):
        return self.count - self.done


class Endless(Sampler):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        while True:
            yield from torch.randperm(self.count, generator=generator).tolist()


class Pairs(BatchSampler):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(len(self)):
            first = np.random.choice(self.count // 2, 5, replace=False)  # noqa: NPY002
            yield [*first, *(first + self.count // 2)]

    def __len__(self):
        return 4


torch.manual_seed(3)
np.random.seed(3)  # noqa: NPY002
inputs = torch.randn(67, 8)
targets = torch.tanh(inputs @ torch.randn(8, 1))[:, 0]
data = TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).squeeze(), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def passes(loader):
    for x, y in loader:
        train(x, y)


# Its last batch has 3 samples.
sampler = Resumed(67)
loader = DataLoader(data, batch_size=16, sampler=sampler)
passes(loader)
passes(loader)
for number, (x, y) in enumerate(loader):
    train(x, y)
    if number == 1:
        done = sampler.done, sampler.epoch
        break
print(done)
sampler = Resumed(67)
sampler.done, sampler.epoch = done
passes(DataLoader(data, batch_size=16, sampler=sampler))
print(sampler.done, sampler.epoch)

batches = iter(DataLoader(data, batch_size=16, sampler=Endless(67)))
for _ in range(12):
    train(*next(batches))
del batches
passes(DataLoader(data, batch_sampler=Pairs(66)))
print(np.random.rand())  # noqa: NPY002

# As Lightning does, which never asks for the batch behind the last one.
generator = torch.Generator().manual_seed(2)
loader = DataLoader(data, batch_size=16, shuffle=True, generator=generator)
for _ in range(3):
    batches = iter(loader)
    for _ in range(len(loader)):
        train(*next(batches))
    print(generator.get_state().sum().item())
del batches

taken = queue.Queue(3)


def take():
    for batch in DataLoader(data, batch_size=16, shuffle=True):
        taken.put(batch)
    taken.put(None)


threading.Thread(target=take).start()
while (batch := taken.get()) is not None:
    train(*batch)

with tempfile.TemporaryDirectory() as folder:
    best = os.path.join(folder, "best.pt")
    torch.save(model.state_dict(), best)
    for x, y in DataLoader(data, batch_size=16):
        train(x, y)
    model.load_state_dict(torch.load(best))
    print(os.listdir(folder))
for x, y in DataLoader(data, batch_size=16):
    train(x, y)
torch.save(model.state_dict(), sys.argv[1])

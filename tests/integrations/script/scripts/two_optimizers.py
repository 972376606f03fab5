"""Two optimizers over parts of one model, with a shared layer that is frozen half of the time.

One of the optimizers makes only every second step.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
data = TensorDataset(torch.randn(160, 5), torch.randint(0, 2, (160,)))
body, head = nn.Linear(5, 20), nn.Linear(20, 2)
fast = torch.optim.Adagrad(head.parameters(), lr=0.05)
slow = torch.optim.SGD(body.parameters(), lr=0.01, nesterov=True, momentum=0.8)
step = 0
for _ in range(2):
    for x, y in DataLoader(data, batch_size=16, shuffle=True, drop_last=True):
        body.requires_grad_(step % 4 != 3)
        loss = nn.functional.cross_entropy(head(torch.relu(body(x))), y)
        fast.zero_grad()
        slow.zero_grad()
        loss.backward()
        fast.step()
        if step % 2 == 0:
            slow.step()
        step += 1
body.requires_grad_(True)
torch.save({"body": body.state_dict(), "head": head.state_dict()}, sys.argv[1])

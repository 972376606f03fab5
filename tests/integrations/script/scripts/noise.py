"""A denoising network that draws noise and its strength for each sample, as one process does."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
np.random.seed(2)  # noqa: NPY002 - scripts do
data = torch.randn(64, 5)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(data), batch_size=8, shuffle=True):
        time = torch.randint(0, 10, (len(x),)) / 10
        noise = torch.randn_like(x) * time[:, None]
        target = x + torch.empty(len(x), 5).uniform_(0, 0.1) + 0.1 * torch.rand(len(x), 1)
        target += torch.from_numpy(np.random.normal(0, 0.1, size=x.shape)).float()  # noqa: NPY002
        if torch.rand(1) < 0.3:  # One number for the batch.
            target = target.flip(1)
        loss = nn.functional.mse_loss(model(torch.cat([x + noise, time[:, None]], 1)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}, next {torch.rand(()):.6f}")
torch.save(model.state_dict(), sys.argv[1])

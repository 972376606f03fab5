"""Gradients accumulated over 3 batches, a gradient scaler, and a sampler of its own."""

import sys

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

torch.manual_seed(5)
data = TensorDataset(torch.randn(240, 8), torch.randn(240, 4))
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
sampler = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(9)), 12, False)
loader = DataLoader(data, batch_sampler=sampler)
for _ in range(3):
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.smooth_l1_loss(model(x), y) / 3
        scaler.scale(loss).backward()
        if step % 3 == 2 or step == len(loader) - 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])

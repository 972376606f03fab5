"""A training script for one process, which knows nothing of dlio.

python examples/single_process.py
dlio run -n 2 examples/single_process.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
for _ in range(2):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("weights:", [round(value, 3) for value in model.weight.flatten().tolist()])

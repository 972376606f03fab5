"""An autoencoder with convolutions, tied weights and a bare parameter.

It writes to TensorBoard, to standard output and to files, as typical scripts do.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.relu(self.encode(x))
        up = nn.functional.conv_transpose2d(
            code, self.encode.weight, stride=2, padding=1, output_padding=1
        )
        return up * (1 + self.scale) + self.bias


torch.manual_seed(4)
whole = TensorDataset(torch.rand(180, 1, 8, 8))
train, held_out = random_split(whole, [160, 20], torch.Generator().manual_seed(0))
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(train, batch_size=16, shuffle=True, num_workers=0)
for epoch in range(2):
    total = 0.0
    for (x,) in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        error = sum(float(((model(x) - x) ** 2).sum()) for (x,) in DataLoader(held_out, 7))
    print(f"epoch {epoch} held out {error:.4f}")
torch.save(model.state_dict(), sys.argv[1])

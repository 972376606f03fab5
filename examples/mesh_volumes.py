"""Train a 3-D U-Net whose volumes ranks share: each rank reads and computes its slab.

mpirun -n 4 python examples/mesh_volumes.py volumes.h5 data=2,space=2
"""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio


def draw(path: str, count: int = 8, side: int = 32) -> None:
    """Write noisy volumes with a ball in each, and the ball's voxels as classes."""
    generator = np.random.default_rng(0)
    axes = np.ogrid[:side, :side, :side]
    with h5py.File(path, "w") as file:
        volumes = file.create_dataset("volume", (count, 1, side, side, side), "f4")
        classes = file.create_dataset("classes", (count, side, side, side), "i8")
        for k in range(count):
            middle, radius = generator.uniform(8, side - 8, 3), generator.uniform(4, 8)
            away = sum((axis - at) ** 2 for axis, at in zip(axes, middle, strict=True))
            classes[k] = away < radius**2
            volumes[k, 0] = classes[k] + generator.normal(0, 0.5, (side, side, side))


class UNet(nn.Module):
    """A U-Net of two levels; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool3d(2), nn.Conv3d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)
        self.out = nn.Conv3d(16, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = self.down(x)
        logits: torch.Tensor = self.out(torch.cat([down, self.up(self.bottom(down))], 1))
        return logits


path, axes = sys.argv[1:]
torch.manual_seed(0)
with dlio.Mesh(axes) as mesh:
    if mesh.rank == 0 and not Path(path).exists():
        draw(path)
    mesh.barrier()
    data, slab = mesh.open(f"{path}::volume,classes", tiers="ram:256MiB")
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with (
        data,
        dlio.DataLoader(data, batch_size=2, shuffle=True, mesh=mesh) as loader,
        mesh.distribute(model, optimizer),
    ):
        for epoch in range(3):
            loader.set_epoch(epoch)
            for batch in loader:
                # This rank's slab of the batch, as a tensor that the ranks share.
                volumes = mesh.split(batch["volume"], slab)
                classes = mesh.split(batch["classes"], slab)
                loss = cross_entropy(model(volumes), classes)  # of whole volumes
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            source = loader.stats()["bytes"]["source"]
            print(f"epoch {epoch} rank {mesh.rank}: loss {loss:.4f}, read {source} bytes")

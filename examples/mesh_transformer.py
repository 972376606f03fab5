"""Train a transformer whose layers ranks share (DTensor), or one in shards (FSDP2).

torchrun --nproc-per-node 4 examples/mesh_transformer.py rows.h5 data=2,model=2
torchrun --nproc-per-node 2 examples/mesh_transformer.py rows.h5 data=2 fsdp
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import dlio
from dlio.features.mesh import average_gradients, tensor_parallel

WIDTH, SIDE = 32, 8


def draw(path: str) -> None:
    """Write sequences of numbers; the class is the step with the largest first number."""
    rows = np.random.default_rng(0).standard_normal((64, 10, 4), np.float32)
    with h5py.File(path, "w") as file:
        file["sequence"], file["label"] = rows, rows[:, :, 0].argmax(1)


class Block(nn.Module):
    """Attention and two linear layers; a rank may have some of the heads and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, tokens, WIDTH); -1 stands for the heads of this rank.
        n, tokens, _ = x.shape
        normal = self.norm1(x)
        query, key, value = (
            layer(normal).view(n, tokens, -1, SIDE).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        heads = scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x = x + self.out(heads.reshape(n, tokens, -1))
        out: torch.Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return out


path, axes = sys.argv[1:3]
if "RANK" in os.environ:  # torchrun
    dist.init_process_group("gloo")  # "nccl" on GPUs
else:
    dlio.init_process_group()  # mpirun: the same over MPI
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Flatten(), nn.Linear(320, 10))
with dlio.Mesh(axes) as mesh:
    if mesh.rank == 0 and not Path(path).exists():
        draw(path)
    mesh.barrier()
    if "fsdp" in sys.argv:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer, mesh=mesh.device_mesh()["data"])
        fully_shard(model, mesh=mesh.device_mesh()["data"])
    else:
        columns = dict.fromkeys(("*.query", "*.key", "*.value", "*.up"), "column")
        tensor_parallel(model, {**columns, "*.out": "row", "*.down": "row"}, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with (
        dlio.open(path, tiers="ram:64MiB") as data,
        dlio.DataLoader(data, batch_size=8, shuffle=True, mesh=mesh) as loader,
        # FSDP2 averages gradients itself.
        nullcontext() if "fsdp" in sys.argv else average_gradients(mesh, optimizer),
    ):
        for epoch in range(8):
            loader.set_epoch(epoch)
            losses = []
            for batch in loader:
                loss = cross_entropy(model(batch["sequence"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            print(f"epoch {epoch} rank {mesh.rank}: loss {sum(losses) / len(losses):.4f}")
dist.destroy_process_group()

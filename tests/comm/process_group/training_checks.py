"""torch's trainers on MPI, compared with training in one process; run under mpirun.

Usage: python training_checks.py CHECK... [FOLDER]
"""

import copy
import sys
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dlio.comm.process_group import init_process_group

STEPS = 6
BATCH = 24
"""Samples in a batch of all ranks together."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)
    )


def train(net: Any, optimizer: Any, rank: int, ranks: int) -> None:
    """Train on this rank's share of each global batch."""
    source = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 16, generator=source)
        wanted = torch.randn(BATCH, 4, generator=source)
        share = slice(rank, None, ranks)
        loss = torch.nn.functional.mse_loss(net(inputs[share]), wanted[share])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def alone() -> torch.nn.Module:
    net = model()
    train(net, torch.optim.SGD(net.parameters(), 0.1, 0.9), 0, 1)
    return net


def distance(first: Any, second: Any) -> float:
    """Return the largest difference between two models' weights."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((_full(a) - _full(b)).detach().abs().max()) for a, b in pairs)


def _full(weights: Any) -> Any:
    return weights.full_tensor() if hasattr(weights, "full_tensor") else weights


def check_ddp() -> None:
    for size_mb in (25, 0.01):  # One bucket; several, which are reduced concurrently.
        net = DistributedDataParallel(model(), bucket_cap_mb=size_mb)
        train(
            net, torch.optim.SGD(net.parameters(), 0.1, 0.9), dist.get_rank(), dist.get_world_size()
        )
        assert distance(net.module, alone()) < 1e-6
        assert distance(net.module, model()) > 1e-2


def check_unused() -> None:
    """With unused parameters, DDP's reducer makes an additional operation of its own."""
    branches = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    branches(torch.ones(1, 2), dist.get_rank() % 2).sum().backward()
    assert all(p.grad is not None for p in branches.parameters())


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return self.left(x) if which else self.right(x)


def check_hooks() -> None:
    plain = alone()
    # torch allows its bfloat16 hook with NCCL only.
    for name in ("fp16", "powersgd"):
        net = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=1
            )
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            net.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
        train(
            net, torch.optim.SGD(net.parameters(), 0.1, 0.9), dist.get_rank(), dist.get_world_size()
        )
        away = distance(net.module, plain)
        assert away < (0.01 if name == "fp16" else 0.2), (name, away)
        weights = torch.cat([p.detach().flatten() for p in net.module.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, weights)
        assert all(torch.equal(each, weights) for each in everyone), name


def check_fsdp() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net: Any = model()
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.SGD(net.parameters(), 0.1, 0.9), dist.get_rank(), dist.get_world_size())
    assert distance(net, alone()) < 1e-6
    # In half precision: gathered and reduced as bfloat16.
    half: Any = model()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32)
    fully_shard(half, mesh=mesh, mp_policy=policy)
    train(
        half, torch.optim.SGD(half.parameters(), 0.1, 0.9), dist.get_rank(), dist.get_world_size()
    )
    assert distance(half, alone()) < 0.05


def check_mesh() -> None:
    """A mesh of two by two ranks, in which each row and each column is a group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    rank = dist.get_rank()
    for name, others in (("row", {rank, (rank + 2) % 4}), ("column", {rank, rank ^ 1})):
        group = mesh.get_group(name)
        assert set(dist.get_process_group_ranks(group)) == others
        total = torch.tensor([10**rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(10**other for other in others)
    # Sharded within rows, replicated between them.
    net: Any = model()
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.SGD(net.parameters(), 0.1, 0.9), rank, 4)
    assert distance(net, alone()) < 1e-6


def _sharded() -> tuple[Any, Any]:
    net: Any = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net, torch.optim.AdamW(net.parameters(), 1e-2)


def check_save(folder: str) -> None:
    net, optimizer = _sharded()
    train(net, optimizer, dist.get_rank(), dist.get_world_size())
    weights, moments = get_state_dict(net, optimizer)
    save({"weights": weights, "moments": moments}, checkpoint_id=folder)
    later = async_save({"weights": weights, "moments": moments}, checkpoint_id=folder + "-later")
    later.result()  # type: ignore[union-attr]


def check_load(folder: str) -> None:
    wanted = copy.deepcopy(model())
    optimizer = torch.optim.AdamW(wanted.parameters(), 1e-2)
    train(wanted, optimizer, 0, 1)
    for name in (folder, folder + "-later"):
        net, optimizer = _sharded()
        weights, moments = get_state_dict(net, optimizer)
        load({"weights": weights, "moments": moments}, checkpoint_id=name)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        assert distance(net, wanted) < 1e-5
        train(net, optimizer, dist.get_rank(), dist.get_world_size())


def main() -> None:
    warnings.simplefilter("ignore")  # torch warns of its own deprecated functions.
    torch.set_num_threads(1)
    init_process_group()
    folder = [argument for argument in sys.argv[1:] if "/" in argument]
    for name in sys.argv[1:]:
        if "/" not in name:
            globals()[f"check_{name}"](*(folder if name in ("save", "load") else []))
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("dlio")]
    assert left == [], left
    print("kept the promises", flush=True)


if __name__ == "__main__":
    main()

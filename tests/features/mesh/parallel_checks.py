"""Checks of layers that ranks share, and of FSDP2: over gloo, and over MPI."""

import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import dlio
from dlio.errors import UsageError
from dlio.features.mesh.dtensor_layers import average_gradients, tensor_parallel
from dlio.features.mesh.rank_mesh import Mesh
from tests.features.mesh.nets import Transformer

STEPS = 8
PLAN: dict[str, Literal["column", "row"]] = {
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.out": "row",
    "*.up": "column",
    "*.down": "row",
}


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(net: nn.Module, one: nn.Module) -> float:
    """Return the largest difference of any weight. Collective."""
    wanted = one.state_dict()
    return max(
        float((whole_of(value) - wanted[name]).abs().max())
        for name, value in net.state_dict().items()
    )


def step(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    loss = functional.cross_entropy(net(inputs), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def nets() -> tuple[Transformer, Transformer]:
    """Return two networks of the same weights, the same on all ranks."""
    made: list[Transformer] = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(Transformer(8))
    return made[0], made[1]


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def check_parallel() -> None:
    """A transformer in parts trains as one process does, with `data` or without."""
    ranks = dist.get_world_size()
    with Mesh("data=2,model=2" if ranks == 4 else f"model={ranks}") as mesh:
        net, one = nets()
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"*.nothing": "row"}, "no linear layer is called"),
            ({"*.out": "across"}, "choose column or row"),
            ({"head": "column"}, "5 columns"),
        ]
        for plan, error in wrong:
            with pytest.raises(UsageError, match=error):
                tensor_parallel(net, plan, mesh)
        tensor_parallel(net, PLAN, mesh)
        with pytest.raises(UsageError, match="average_gradients"):
            mesh.distribute(net, sgd(net))
        query = net.blocks[0].attention.query.weight
        assert isinstance(query, DTensor)
        assert query.to_local().shape[0] == 16 // mesh.size("model")
        mine, its = sgd(net), sgd(one)
        data = mesh.along("data")
        generator = torch.Generator().manual_seed(1)
        with average_gradients(mesh, mine) as averaged:
            for _ in range(STEPS):
                inputs = torch.randn(8, 6, 8, generator=generator)
                labels = torch.randint(0, 5, (8,), generator=generator)
                step(net, mine, *(each.chunk(data.size)[data.rank] for each in (inputs, labels)))
                step(one, its, inputs, labels)
                worst = difference(net, one)
                assert worst < 1e-5, worst
            assert bool(averaged.bytes) == (data.size > 1)
        print(f"parallel differs by {worst:.1e}", file=sys.stderr)


def check_samples() -> None:
    """Ranks along `model` get the same samples, those along `data` disjoint ones."""
    with (
        Mesh(f"model={dist.get_world_size() // 2}") as mesh,
        dlio.open(os.environ["MESH_SEQUENCES"], tiers="ram:16MiB", seed=2) as data,
        dlio.DataLoader(data, 4, True, mesh=mesh, num_workers=1) as loader,
    ):
        assert mesh.size("data") == 2
        seen = []
        for batch in loader:
            assert len(batch["label"]) == 4
            seen += loader.last_samples.tolist()
        assert mesh.along("model").allgather(seen) == [seen] * mesh.size("model")
        everyone = [number for each in mesh.along("data").allgather(seen) for number in each]
        assert sorted(everyone) == list(range(len(data)))


def check_sharded() -> None:
    """FSDP2, fed by dlio's loader, trains as one process does on the same samples."""
    from torch.distributed.fsdp import fully_shard

    with (
        Mesh({"data": dist.get_world_size()}) as mesh,
        dlio.open(os.environ["MESH_SEQUENCES"], tiers="ram:16MiB", seed=2) as data,
        dlio.DataLoader(data, 4, True, mesh=mesh, num_workers=1) as loader,
    ):
        net, one = nets()
        axis = mesh.device_mesh()["data"]
        for layer in net.blocks:
            fully_shard(layer, mesh=axis)
        fully_shard(net, mesh=axis)
        assert all(isinstance(p, DTensor) for p in net.parameters())
        mine, its = sgd(net), sgd(one)
        steps = 0
        for epoch in range(STEPS // 4):
            loader.set_epoch(epoch)
            for batch in loader:
                inputs, labels = batch["sequence"], batch["label"]
                everyone = mesh.data_ranks().allgather([inputs.tolist(), labels.tolist()])
                step(net, mine, inputs, labels)
                step(
                    one,
                    its,
                    torch.cat([torch.tensor(each[0]) for each in everyone]),
                    torch.cat([torch.tensor(each[1]) for each in everyone]),
                )
                steps += 1
                worst = difference(net, one)
                assert worst < 1e-5, worst
        assert steps == STEPS, steps
        print(f"sharded differs by {worst:.1e}", file=sys.stderr)


CHECKS: dict[str, Callable[[], None]] = {
    "parallel": check_parallel,
    "samples": check_samples,
    "sharded": check_sharded,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dlio.init_process_group()
    for check in sys.argv[1:]:
        CHECKS[check]()
        print(f"kept {check}", flush=True)
    dist.destroy_process_group()

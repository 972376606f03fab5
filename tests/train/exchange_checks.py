"""What exchanges promise, on however many ranks run this file: `exchange_checks.py CHECK`."""

import math
import sys
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from dlio.comm import Communicator, world
from dlio.order import share
from dlio.train.exchange import Exchange, make_exchange
from dlio.train.exchange.buckets import averaged_state, broadcast_state, consensus_distance

_FEATURES = 500
_BATCH = 4


class Net(nn.Module):
    """Three buckets of parameters; a layer that is never used, one that is not trained, and a
    parameter of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 600)
        self.unused = nn.Linear(20, 20)
        self.second = nn.Linear(600, 700)
        self.scale = nn.Parameter(torch.ones(700))
        self.frozen = nn.Linear(700, 700)
        self.last = nn.Linear(700, 5)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        logits: torch.Tensor = self.last(torch.tanh(self.frozen(out)))
        return logits


def check_allreduce(comm: Communicator) -> None:
    """Training on shares equals training on the whole, uneven and empty shares included."""
    net, whole = _net(comm.rank + 1), _net(1)
    broadcast_state(net, comm)
    exchange = make_exchange("allreduce", net, comm, seed=0)
    optimizer, reference = _optimizer(net), _optimizer(whole)
    full = comm.size * _BATCH
    # Full batches, then smaller ones, down to a single sample: the other ranks have none.
    for step, planned in enumerate([full, full, full - 1, comm.size, 1, full]):
        inputs, labels = _samples(step, planned)
        mine = share(planned, comm.size, comm.rank)
        _step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
        reference.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]
        reference.step()
        for (name, a), b in zip(net.named_parameters(), whole.parameters(), strict=True):
            error = _difference(a, b)
            assert error < 1e-6, f"step {step}: {name} differs by {error}"
    checksums = comm.allgather([float(p.detach().double().sum()) for p in net.parameters()])
    assert all(each == checksums[0] for each in checksums)
    counted = exchange.statistics()
    if comm.size > 1:
        assert counted["messages"] == 6 * 3
        assert counted["bytes"] == 6 * 4 * (1 + sum(p.numel() for p in _trainable(net)))
    exchange.close()


def check_skipped(comm: Communicator) -> None:
    """Samples that were planned but could not be read do not weaken the others' gradient."""
    net, whole = _net(1), _net(1)
    exchange = make_exchange("allreduce", net, comm, seed=0)
    planned = comm.size * _BATCH
    inputs, labels = _samples(0, planned)
    mine = list(share(planned, comm.size, comm.rank))
    kept = [k for k in range(planned) if k % _BATCH]  # each rank loses its first sample
    used = [k for k in mine if k in kept]
    _step(net, exchange, _optimizer(net), inputs[used], labels[used], planned, comm.size)
    reference = _optimizer(whole)
    nn.functional.cross_entropy(whole(inputs[kept]), labels[kept]).backward()  # type: ignore[no-untyped-call]
    reference.step()
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        assert _difference(a, b) < 1e-6
    exchange.close()


def check_half(comm: Communicator) -> None:
    """bfloat16 weights travel as float32."""
    for name in ("allreduce", "gossip"):
        net = _net(1).to(torch.bfloat16)
        exchange = make_exchange(name, net, comm, seed=0)
        inputs, labels = _samples(comm.rank, _BATCH)
        args = (inputs.bfloat16(), labels, comm.size * _BATCH, comm.size)
        _step(net, exchange, _optimizer(net), *args)
        exchange.finish()
        assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in net.parameters())
        exchange.close()


def check_gossip(comm: Communicator) -> None:
    """Without gradients, one round of gossip brings the weights to their mean."""
    net = _net(comm.rank)
    exchange = make_exchange("gossip", net, comm, seed=3)
    mean = averaged_state(net, comm)
    before = consensus_distance(net, mean, comm)
    assert before > 0.01
    total = {name: float(tensor.double().sum()) for name, tensor in mean.items()}
    period = math.ceil(math.log2(comm.size))
    for _ in range(period):
        # As on a rank without samples: no forward pass joins what is under way.
        exchange.before_backward(0, comm.size)
        exchange.before_step()
        exchange.after_step()
    exchange.finish()
    trained = [(name, p.detach()) for name, p in net.named_parameters() if p.requires_grad]
    after = max(float((parameter - mean[name]).abs().max()) for name, parameter in trained)
    if comm.size & (comm.size - 1) == 0:
        assert after < 1e-6
    else:
        assert consensus_distance(net, mean, comm) < before
    for name, tensor in averaged_state(net, comm).items():
        assert abs(float(tensor.double().sum()) - total[name]) < 1e-3 * (1 + abs(total[name]))
    assert exchange.statistics()["messages"] == period * 3
    exchange.close()


def check_gossip_trains(comm: Communicator) -> None:
    """Ranks that train on different samples stay together, idle ranks included."""
    net, alone = _net(1), _net(1)
    exchange = make_exchange("gossip", net, comm, seed=0)
    optimizer, optimizer_alone = _optimizer(net), _optimizer(alone)
    for step in range(12):
        planned = comm.size * _BATCH if step != 6 else 1
        inputs, labels = _samples(step, planned)
        mine = share(planned, comm.size, comm.rank)
        _step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
        if len(mine):
            optimizer_alone.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(alone(inputs[mine]), labels[mine])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer_alone.step()
    exchange.finish()
    together, apart = (
        consensus_distance(each, averaged_state(each, comm), comm) for each in (net, alone)
    )
    assert together < 0.5 * apart, f"distance {together} with gossip, {apart} without"
    exchange.close()


def check_mean(comm: Communicator) -> None:
    """The mean of models leaves them alone, and keeps types."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.fill_(comm.rank + 1)
    mean = averaged_state(net, comm)
    for name, tensor in net.state_dict().items():
        assert (tensor == comm.rank + 1).all()
        assert mean[name].dtype == tensor.dtype
        if tensor.is_floating_point():
            assert torch.allclose(mean[name], torch.tensor((comm.size + 1) / 2))
    broadcast_state(net, comm)
    assert all((tensor == 1).all() for tensor in net.state_dict().values())


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "allreduce": check_allreduce,
    "skipped": check_skipped,
    "half": check_half,
    "gossip": check_gossip,
    "gossip_trains": check_gossip_trains,
    "mean": check_mean,
}


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max())


def _net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def _trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _optimizer(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(_trainable(net), lr=0.1)


def _samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(count, _FEATURES, generator=generator)
    return inputs, torch.randint(0, 5, (count,), generator=generator)


def _step(
    net: nn.Module,
    exchange: Exchange,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    planned: int,
    ranks: int,
) -> None:
    """One step as the trainer makes it."""
    exchange.before_backward(len(inputs), planned)
    optimizer.zero_grad(set_to_none=True)
    if len(inputs):
        losses = nn.functional.cross_entropy(net(inputs), labels, reduction="sum")
        losses.div(planned / ranks).backward()  # type: ignore[no-untyped-call]
    exchange.before_step()
    optimizer.step()
    exchange.after_step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:]:
        CHECKS[asked](world())
        print(f"kept {asked}", flush=True)

"""What exchanges promise, on however many ranks run this file: `exchange_checks.py CHECK`."""

import copy
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

import dlio
from dlio.comm import Communicator, world
from dlio.plan.order import share
from dlio.plan.shares import fastest_shares
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
        # As a ring has them, of 3 buckets.
        hops = 2 * (comm.size - 1)
        assert counted["messages"] == 6 * 3 * hops
        whole_bytes = 6 * 4 * (3 + sum(p.numel() for p in _trainable(net)))
        assert counted["bytes"] == whole_bytes * hops / comm.size
    exchange.close()


def check_shares(comm: Communicator) -> None:
    """Shares by speed change no gradient: training on them equals training on the whole."""
    full = comm.size * _BATCH
    cost = [1.0 + 2 * (rank == comm.size - 1) for rank in range(comm.size)]
    shares = fastest_shares(full, [0.0] * comm.size, cost)
    assert comm.size == 1 or shares.counts[0] > shares.counts[-1]
    for name in ("allreduce", "tree", "hierarchical", "parameter-server"):
        net, whole = _net(1), _net(1)
        exchange = make_exchange(name, net, comm, seed=0)
        for step, planned in enumerate([full, full - 1, 1]):
            inputs, labels = _samples(step, planned)
            mine = shares.part(planned, comm.rank)
            for each in (net, whole):
                each.zero_grad(set_to_none=True)
            exchange.before_backward(len(mine), planned)
            if len(mine):
                losses = nn.functional.cross_entropy(
                    net(inputs[mine]), labels[mine], reduction="sum"
                )
                losses.div(planned / comm.size).backward()  # type: ignore[no-untyped-call]
            exchange.before_step()
            nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]
            for a, b in zip(_trainable(net), _trainable(whole), strict=True):
                if b.grad is not None:
                    assert a.grad is not None
                    assert _difference(a.grad, b.grad) < 1e-6
            exchange.after_step()
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


SUMS: Final = ("allreduce", "hierarchical", "tree", "parameter-server", "local-sgd(1)")


def _identical(net: nn.Module, comm: Communicator) -> bool:
    raw = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return len({*comm.allgather(hashlib.sha256(raw).hexdigest())}) == 1


def check_sums(comm: Communicator) -> None:
    """Every way to sum trains as one process does, and leaves identical bytes on all ranks."""
    for name in SUMS:
        net, whole = _net(1), _net(1)
        exchange = make_exchange(name, net, comm, seed=0, pretend_nodes=max(1, comm.size // 2))
        optimizer, reference = _optimizer(net), _optimizer(whole)
        for step in range(3):
            planned = comm.size * _BATCH
            inputs, labels = _samples(step, planned)
            mine = share(planned, comm.size, comm.rank)
            _step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
            reference.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]
            reference.step()
        exchange.finish()
        for (what, a), b in zip(net.named_parameters(), whole.parameters(), strict=True):
            assert _difference(a, b) < 2e-6, f"{name}: {what} differs by {_difference(a, b)}"
        assert _identical(net, comm), name
        exchange.close()


def check_compressed(comm: Communicator) -> None:
    """Whatever is left out, all ranks hold identical bytes; and bytes are as few as promised."""
    size = 4 * sum(p.numel() for p in _trainable(_net(1)))
    for name in (*SUMS, "diloco(2)"):
        for compressor, fewer in _FEWER.items():
            net = _net(1)
            spec = f"{name}+{compressor}"
            exchange = make_exchange(spec, net, comm, seed=0, pretend_nodes=max(1, comm.size // 2))
            optimizer = torch.optim.SGD(_trainable(net), lr=0.01)
            for step in range(4):
                planned = comm.size * _BATCH
                inputs, labels = _samples(step, planned)
                mine = share(planned, comm.size, comm.rank)
                _step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
            exchange.finish()
            assert all(p.isfinite().all() for p in net.parameters())
            assert _identical(net, comm), spec
            told = exchange.statistics()
            sums = 2 if name == "diloco(2)" else 4
            most = sums * size * (comm.size if name == "parameter-server" else 2 * comm.size)
            assert 0 < told["bytes"] < most / fewer, f"{spec}: {told['bytes']} of {most}"
            exchange.close()


_FEWER: Final = {"onebit": 20, "threshold": 50, "adaptive": 50, "int8": 3, "bf16": 1.9, "fp16": 1.9}
"""Times fewer bytes, at least, of layers as narrow as these."""


def check_gossips(comm: Communicator) -> None:
    """Variants of gossip keep ranks together that train on different samples."""
    apart = None
    for name in (
        "gossip",
        "gossip(hypercube)",
        "gossip(gradient)",
        "gossip+int8",
        "gossip+bf16",
        "gossip+adaptive",
        "gossip+onebit",
        "gossip(gradient)+int8",
    ):
        if apart is None:
            alone = _net(1)
            _train_apart(alone, None, comm)
            apart = consensus_distance(alone, averaged_state(alone, comm), comm)
        net = _net(1)
        exchange = make_exchange(name, net, comm, seed=0)
        _train_apart(net, exchange, comm)
        exchange.finish()
        together = consensus_distance(net, averaged_state(net, comm), comm)
        nearer = 1.0 if name in _DRIFT else 0.5
        assert together < nearer * apart, f"{name}: distance {together}, {apart} without"
        told = exchange.statistics()
        assert told["messages"] <= 70 * 3
        exchange.close()


_DRIFT: Final = ("gossip(gradient)", "gossip(gradient)+int8", "gossip+adaptive", "gossip+onebit")
"""Where ranks are nearer than alone, not more."""


def _train_apart(net: Net, exchange: Exchange | None, comm: Communicator) -> None:
    optimizer = torch.optim.SGD(_trainable(net), lr=0.02)
    for step in range(70):
        inputs, labels = _samples(1000 * comm.rank + step, _BATCH)
        if exchange is not None:
            _step(net, exchange, optimizer, inputs, labels, comm.size * _BATCH, comm.size)
            continue
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def check_asgd(comm: Communicator) -> None:
    """Ranks wait for nobody, one of them slow; nothing is left under way."""
    alone = _net(1)
    optimizer = torch.optim.SGD(_trainable(alone), lr=0.05)
    for step in range(70):
        inputs, labels = _taught(1000 * comm.rank + step)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(alone(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    apart = consensus_distance(alone, averaged_state(alone, comm), comm)
    for name in ("asgd", "asgd+bf16"):
        net = _net(1)
        exchange = make_exchange(name, net, comm, seed=0)
        optimizer = torch.optim.SGD(_trainable(net), lr=0.05)
        for step in range(70):
            if comm.rank == 0:
                time.sleep(0.01)
            inputs, labels = _taught(1000 * comm.rank + step)
            _step(net, exchange, optimizer, inputs, labels, comm.size * len(inputs), comm.size)
        told = exchange.statistics()
        exchange.close()
        together = consensus_distance(net, averaged_state(net, comm), comm)
        assert together < 1.5 * apart, f"{name}: distance {together}, {apart} without"
        assert told["wait_s"] == 0
        assert sum(comm.allgather(told["accepted"] + told["refused"])) > 0
        assert 0 < told["messages"] <= 2 * 70


def check_distribute(comm: Communicator) -> None:
    """A hand-written loop with two optimizers, accumulation, clipping and uneven shares trains as
    one process does."""

    def train(net: Net, together: bool) -> None:
        # With the usual eps, gradients of next to nothing turn rounding into steps.
        first = torch.optim.Adam(net.first.parameters(), lr=1e-3, eps=1e-5)
        rest = [p for p in _trainable(net) if all(p is not q for q in net.first.parameters())]
        optimizers = [first, torch.optim.SGD(rest, lr=0.05, momentum=0.9)]
        ranks = dlio.distribute(net, optimizers) if together else None
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(2):
                count = comm.size * _BATCH - 1
                inputs, labels = _samples(10 * step + part, count)
                if ranks is not None:
                    mine = share(count, comm.size, comm.rank)
                    inputs, labels = inputs[mine], labels[mine]
                    ranks.weigh(len(mine))
                loss = nn.functional.cross_entropy(net(inputs), labels) / 2
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(_trainable(net), 0.3)
            for optimizer in optimizers:
                optimizer.step()
        if ranks is not None:
            assert ranks.statistics()["messages"] > 0
            ranks.close()

    net, whole = _net(comm.rank + 5), _net(5)
    train(net, together=True)
    train(whole, together=False)
    for (name, a), b in zip(net.named_parameters(), whole.named_parameters(), strict=True):
        error = _difference(a, b[1])
        assert error < 1e-5, f"{name} differs by {error}"
    # Hooks are gone.
    before = net.last.weight.detach().clone()
    nn.functional.cross_entropy(net(torch.ones(1, _FEATURES)), torch.tensor([0])).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(before, net.last.weight)


def check_presets(comm: Communicator) -> None:
    """Every preset trains a hand-written loop, and those that sum leave identical bytes."""
    names = ("allreduce", "hierarchical", "tree+int8", "parameter-server", "gossip", "asgd")
    for name in (*names, "gossip(gradient)+int8", "local-sgd(2)+adaptive", "diloco(2)"):
        net = _net(comm.rank)
        optimizer = torch.optim.SGD(_trainable(net), lr=0.02)
        with dlio.distribute(net, optimizer, name, pretend_nodes=comm.size) as ranks:
            for step in range(4):
                inputs, labels = _samples(1000 * comm.rank + step, _BATCH)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            ranks.finish()
            assert ranks.statistics()["messages"] > 0, name
        assert all(p.isfinite().all() for p in net.parameters())
        if not name.startswith(("gossip", "asgd")):
            assert _identical(net, comm), name


def check_parts(comm: Communicator) -> None:
    """Losses of one step that reach different parameters, one after the other, and backwards that
    are held until the last: all gradients are the mean's."""
    for held in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
        exchange = make_exchange("allreduce", net, comm, seed=0)
        whole = copy.deepcopy(net)
        inputs = [_samples(step, 2 * comm.size)[0][:, :4] for step in range(3)]
        for number, x in enumerate(inputs):
            part = number % 2
            mine = x[share(len(x), comm.size, comm.rank)]
            exchange.weigh(len(mine))
            exchange.hold(held and number < 2)
            net[part](mine).square().mean().backward()
            whole[part](x).square().mean().backward()
        exchange.before_step()
        for a, b in zip(net.parameters(), whole.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert _difference(a.grad, b.grad) < 1e-6
        if comm.size > 1:
            backwards = 1 if held else 3
            assert exchange.statistics()["messages"] == backwards * 2 * (comm.size - 1)
        exchange.close()


def _taught(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples whose labels a linear teacher gives, so that ranks' steps have a common direction."""
    inputs, _ = _samples(seed, 64)
    teacher = torch.randn(_FEATURES, 5, generator=torch.Generator().manual_seed(7))
    return inputs, (inputs @ teacher).argmax(1)


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "allreduce": check_allreduce,
    "shares": check_shares,
    "skipped": check_skipped,
    "half": check_half,
    "gossip": check_gossip,
    "gossip_trains": check_gossip_trains,
    "mean": check_mean,
    "sums": check_sums,
    "compressed": check_compressed,
    "gossips": check_gossips,
    "asgd": check_asgd,
    "distribute": check_distribute,
    "parts": check_parts,
    "presets": check_presets,
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
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for asked in sys.argv[1:]:
        CHECKS[asked](world())
        print(f"kept {asked}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        assert world().size == 1  # What the world had is closed.
        assert not [thread.name for thread in threading.enumerate() if "dlio" in thread.name]

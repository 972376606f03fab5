"""Checks of exchanges that send weights, on any number of ranks; run by `exchange_checks`."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.exchange import Exchange, parse_exchange
from dlio.exchange.buckets import averaged_state, consensus_distance
from dlio.exchange.gossip import Gossip, partners
from dlio.plan.order import share
from tests.exchange.training import (
    BATCH,
    FEATURES,
    Net,
    make_net,
    make_optimizer,
    parameters_of,
    samples,
    started,
    train_step,
)


def check_gossip(comm: Communicator) -> None:
    """Without gradients, one round of gossip averages the weights."""
    net = make_net(comm.rank)
    exchange = started("gossip", net, comm, seed=3)
    mean = averaged_state(net, comm)
    before = consensus_distance(net, mean, comm)
    assert before > 0.01
    total = {name: float(tensor.double().sum()) for name, tensor in mean.items()}
    period = math.ceil(math.log2(comm.size))
    for _ in range(period):
        # As on a rank without samples: no forward pass completes the messages under way.
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
    """Ranks that train on different samples stay close, also when some are idle."""
    net, alone = make_net(1), make_net(1)
    exchange = started("gossip", net, comm, seed=0)
    optimizer, optimizer_alone = make_optimizer(net), make_optimizer(alone)
    for step in range(12):
        planned = comm.size * BATCH if step != 6 else 1
        inputs, labels = samples(step, planned)
        mine = share(planned, comm.size, comm.rank)
        train_step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
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


def check_gossips(comm: Communicator) -> None:
    """With every variant of gossip, ranks that train on different samples stay close."""
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
            alone = make_net(1)
            _train_apart(alone, None, comm)
            apart = consensus_distance(alone, averaged_state(alone, comm), comm)
        net = make_net(1)
        exchange = started(name, net, comm, seed=0)
        _train_apart(net, exchange, comm)
        exchange.finish()
        together = consensus_distance(net, averaged_state(net, comm), comm)
        nearer = 1.0 if name in _DRIFT else 0.5
        assert together < nearer * apart, f"{name}: distance {together}, {apart} without"
        counts = exchange.statistics()
        assert counts["messages"] <= 3 * _steps(comm)
        exchange.close()


_DRIFT: Final = ("gossip(gradient)", "gossip(gradient)+int8", "gossip+adaptive", "gossip+onebit")
"""Variants for which ranks need only be closer together than without gossip."""


def _steps(comm: Communicator) -> int:
    """Steps of training: the more ranks, the later each hears of all others."""
    return 70 if comm.size > 2 else 35


def _train_apart(net: Net, exchange: Exchange | None, comm: Communicator) -> None:
    optimizer = torch.optim.SGD(parameters_of(net), lr=0.02)
    for step in range(_steps(comm)):
        inputs, labels = samples(1000 * comm.rank + step, BATCH)
        if exchange is not None:
            train_step(net, exchange, optimizer, inputs, labels, comm.size * BATCH, comm.size)
            continue
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def check_asgd(comm: Communicator) -> None:
    """No rank waits, although one is slow; no message is left under way."""
    alone = make_net(1)
    optimizer = torch.optim.SGD(parameters_of(alone), lr=0.05)
    for step in range(70):
        inputs, labels = _taught(1000 * comm.rank + step)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(alone(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    apart = consensus_distance(alone, averaged_state(alone, comm), comm)
    for name in ("asgd", "asgd+bf16"):
        net = make_net(1)
        exchange = started(name, net, comm, seed=0)
        optimizer = torch.optim.SGD(parameters_of(net), lr=0.05)
        for step in range(70):
            if comm.rank == 0:
                time.sleep(0.01)
            inputs, labels = _taught(1000 * comm.rank + step)
            train_step(net, exchange, optimizer, inputs, labels, comm.size * len(inputs), comm.size)
        counts = exchange.statistics()
        exchange.close()
        together = consensus_distance(net, averaged_state(net, comm), comm)
        assert together < 1.5 * apart, f"{name}: distance {together}, {apart} without"
        assert counts["wait_s"] == 0
        assert sum(comm.allgather(counts["accepted"] + counts["refused"])) > 0
        assert 0 < counts["messages"] <= 2 * 70


def check_noloco(comm: Communicator) -> None:
    """Weights follow the formula of arXiv 2506.10911, written out for all ranks in one place."""
    for momentum, rate in ((0.5, 0.7), (0.0, 1.0)):
        _noloco_follows_the_formula(comm, momentum, rate)


def _noloco_follows_the_formula(comm: Communicator, momentum: float, rate: float) -> None:
    period, rounds, keeps = 3, 4, rate
    net = make_net(1)
    exchange = started(f"noloco({period},rate={rate},momentum={momentum})", net, comm, seed=5)
    trained = parameters_of(net)
    slow = [_flat(trained)] * comm.size
    velocity = [torch.zeros_like(slow[0])] * comm.size
    for turn in range(rounds):
        for step in range(period):
            with torch.no_grad():
                for parameter in trained:
                    parameter.add_(0.01 * (comm.rank + 1) * (turn + 1) * (step - 0.2))
            exchange.after_step()
            if step < period - 1:
                assert exchange.statistics()["messages"] <= turn * 3
        train = sum(0.01 * (turn + 1) * (step - 0.2) for step in range(period))
        fast = [slow[rank] + train * (rank + 1) for rank in range(comm.size)]
        pairs = [
            partners(turn, rank, comm.size, 5, "pairs")[0] if comm.size > 1 else 0
            for rank in range(comm.size)
        ]
        moves = [
            momentum * velocity[rank]
            + rate * ((fast[rank] - slow[rank]) + (fast[pair] - slow[pair])) / 2
            - keeps * (slow[rank] - (slow[rank] + slow[pair]) / 2)
            for rank, pair in enumerate(pairs)
        ]
        if comm.size > 1:
            slow = [torch.add(*each) for each in zip(slow, moves, strict=True)]
            velocity = moves
        else:
            slow = fast
        exchange.finish()
        away = float((_flat(trained) - slow[comm.rank]).abs().max())
        assert away < 1e-5, f"round {turn}: {away} from the formula"
    sent = sum(
        partners(turn, comm.rank, comm.size, 5, "pairs")[0] != comm.rank for turn in range(rounds)
    )
    assert exchange.statistics()["messages"] == 3 * sent
    assert exchange.statistics()["bytes"] == 4 * len(slow[0]) * sent
    exchange.close()


def check_noloco_of_differences(comm: Communicator) -> None:
    """Without training, ranks agree on the mean of their weights, by messages of few bits."""
    turns = math.ceil(math.log2(comm.size)) if comm.size > 1 else 1
    # Only pairs of a power of two meet in turns that mix all ranks.
    slower = 2 if comm.size & (comm.size - 1) else 1
    for name, most, fewer in (
        ("noloco(1)+onebit", 0.04, 28),
        ("noloco(3)+onebit", 0.04, 28),
        ("noloco(1)+ternary", 0.04, 18),
        ("noloco(1)+adaptive", 0.4, 75),
    ):
        net = make_net(1)
        exchange = started(name, net, comm)
        period = parse_exchange(name).period

        def meet(count: int, exchange: Exchange = exchange, period: int = period) -> None:
            for _ in range(count * turns * period):
                exchange.after_step()
                exchange.finish()

        meet(1)
        entries = sum(each.numel() for each in parameters_of(net))
        first = exchange.statistics()["bytes"]
        assert first <= 2 * entries * turns, f"{name}: whole weights travel as bfloat16"
        with torch.no_grad():
            for parameter in parameters_of(net):
                seed = 7 * comm.rank + parameter.numel()
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.add_(noise)
        mean = averaged_state(net, comm)
        apart = consensus_distance(net, mean, comm)
        meet(32)
        later = averaged_state(net, comm)
        together = consensus_distance(net, later, comm)
        assert together <= most * slower * apart, f"{name}: distance {together} of {apart}"
        moved = max(
            float((later[key] - mean[key]).abs().max()) for key, _ in net.named_parameters()
        )
        assert moved < 1e-4, f"{name}: the mean moved by {moved}"
        bytes_later = exchange.statistics()["bytes"] - first
        assert bytes_later < 4 * entries * 32 * turns / fewer, f"{name}: {bytes_later} bytes"
        # When others were interrupted by a loss, this rank begins anew, too.
        assert isinstance(exchange, Gossip)
        exchange.drop()
        meet(1)
        assert exchange.statistics()["bytes"] - bytes_later == 2 * first
        exchange.close()


def check_differences_resume(comm: Communicator) -> None:
    """A resumed exchange of differences goes on exactly as an uninterrupted one."""
    for name in ("noloco(2)+onebit", "noloco(1)+adaptive"):
        _differences_resume(name, comm)


def _differences_resume(name: str, comm: Communicator) -> None:
    nets = [make_net(1), make_net(1)]
    exchanges = [started(name, net, comm, seed=3) for net in nets]
    for step in range(12):
        if step == 7:
            nets[1].load_state_dict(nets[0].state_dict())
            exchanges[1].load_state({k: v.clone() for k, v in exchanges[0].state().items()})
        for net, exchange in zip(nets, exchanges, strict=True):
            if step < 7 and net is nets[1]:
                continue
            exchange.finish()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.9).add_(0.01 * (comm.rank + 1) * (step - 4))
            exchange.after_step()
            exchange.finish()
    ours, theirs = (_flat(list(net.parameters())) for net in nets)
    assert torch.equal(ours, theirs), name
    for exchange in exchanges:
        exchange.close()


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in parameters])


def check_noloco_trains(comm: Communicator) -> None:
    """Ranks that train on different samples stay close, also with compressed messages."""
    alone = make_net(1)
    _train_apart(alone, None, comm)
    apart = consensus_distance(alone, averaged_state(alone, comm), comm)
    for name in ("noloco(5)", "noloco(5)+bf16", "noloco(5)+int8"):
        net = make_net(1)
        exchange = started(name, net, comm)
        _train_apart(net, exchange, comm)
        exchange.finish()
        together = consensus_distance(net, averaged_state(net, comm), comm)
        assert together < 0.7 * apart, f"{name}: distance {together}, {apart} without"
        exchange.close()


def _taught(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw samples labelled by a linear teacher, so that ranks' steps have a common direction."""
    inputs, _ = samples(seed, 64)
    teacher = torch.randn(FEATURES, 5, generator=torch.Generator().manual_seed(7))
    return inputs, (inputs @ teacher).argmax(1)


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "gossip": check_gossip,
    "gossip_trains": check_gossip_trains,
    "gossips": check_gossips,
    "noloco": check_noloco,
    "noloco_trains": check_noloco_trains,
    "noloco_of_differences": check_noloco_of_differences,
    "differences_resume": check_differences_resume,
    "asgd": check_asgd,
}

"""Checks of gossip between nodes, on real ranks: `node_gossip_checks.py NODES CHECK...`."""

import hashlib
import math
import sys
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import nn

from dlio.comm import Buffer, Communicator, Request, world
from dlio.exchange.buckets import in_buckets, trainable
from dlio.exchange.gossip import Gossip, partners
from dlio.exchange.node_gossip import NodeGossip
from tests.exchange.training import started

_FEATURES: Final = 6
_RATE: Final = 0.1


class Line(nn.Module):
    """A linear model, whose gradient of squared errors is easy to compute in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Linear(_FEATURES, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.plane(x)[:, 0]
        return out


class Deep(nn.Module):
    """A net with three buckets, attention that reads a child's weights, and an optional layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 512)
        self.attention = nn.MultiheadAttention(512, 4, batch_first=True)
        self.last = nn.Linear(512, 1)
        self.at_times = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, detour: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))[None]
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0][0] + hidden[0]
        if detour:
            hidden = hidden + self.at_times(hidden)
        out: torch.Tensor = self.last(hidden)[:, 0]
        return out


def _samples(step: int, rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(count, _FEATURES, generator=generator)
    return inputs, torch.randn(count, generator=generator)


def _counts(step: int, ranks: int) -> list[int]:
    """Return the samples of each rank: uneven numbers, sometimes 0."""
    return [(3 * step + 2 * rank) % 5 for rank in range(ranks)]


def check_oracle(comm: Communicator, nodes: int) -> None:
    """Compare weights with gossip between nodes in numpy; a node steps by its samples' gradient."""
    for means in (False, True):
        torch.manual_seed(5)
        net = Line()
        exchange = started("gossip", net, comm, seed=3, pretend_nodes=nodes)
        assert isinstance(exchange, NodeGossip)
        optimizer = torch.optim.SGD(net.parameters(), lr=_RATE)
        start = net.plane.weight.detach().numpy()[0].astype(np.float64)
        weights = np.repeat(start[None], nodes, axis=0)
        node_of = [rank * nodes // comm.size for rank in range(comm.size)]
        for step in range(9):
            counts = _counts(step, comm.size)
            if means:
                counts = [count + 1 for count in counts]
            planned = sum(counts)
            inputs, labels = _samples(step, comm.rank, counts[comm.rank])
            errors = (net(inputs) - labels).square() if len(inputs) else None
            optimizer.zero_grad(set_to_none=True)
            if means:
                assert errors is not None
                exchange.weigh(len(inputs))
                errors.mean().backward()
            else:
                exchange.before_backward(len(inputs), planned)
                if errors is not None:
                    (errors.sum() / (planned / comm.size)).backward()
            exchange.before_step()
            optimizer.step()
            exchange.after_step()
            # The same step in numpy.
            for node in range(nodes):
                members = [rank for rank in range(comm.size) if node_of[rank] == node]
                slope, count = np.zeros(_FEATURES), 0
                for rank in members:
                    x, y = (
                        each.numpy().astype(np.float64)
                        for each in _samples(step, rank, counts[rank])
                    )
                    slope += 2 * (x @ weights[node] - y) @ x
                    count += len(x)
                whole = count if means else planned * len(members) / comm.size
                weights[node] -= _RATE * slope / max(whole, 1)
            sources = [partners(step, node, nodes, 3)[1] for node in range(nodes)]
            weights = (weights + weights[sources]) / 2
        exchange.finish()
        mine = net.plane.weight.detach().numpy()[0]
        assert np.allclose(mine, weights[node_of[comm.rank]], rtol=0, atol=1e-5), (mine, weights)
        exchange.close()


VARIANTS: Final = (
    "gossip",
    "gossip(hypercube)",
    "gossip(gradient)+int8",
    "gossip+adaptive",
    "gossip(gradient)",
    "gossip+bf16",
    "gossip+int8",
    "gossip(hypercube)+onebit",
)


def check_nodes(comm: Communicator, nodes: int) -> None:
    """In every variant, the ranks of a node hold identical bytes.

    Messages are counted, and their number is the same in every step.
    """
    node = comm.rank * nodes // comm.size
    leader = all(other * nodes // comm.size != node for other in range(comm.rank))
    on_node = sum(other * nodes // comm.size == node for other in range(comm.size))
    for name in VARIANTS if nodes == 2 else VARIANTS[:4]:
        for half in (False, True):
            torch.manual_seed(1)
            net: nn.Module = Deep()
            if half:
                if name not in ("gossip", "gossip+adaptive"):
                    continue
                net = net.to(torch.bfloat16)
            exchange = started(name, net, comm, seed=0, pretend_nodes=nodes)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            counts = []
            for step in range(6):
                count = _counts(step, comm.size)[comm.rank]
                inputs, labels = _samples(step, comm.rank, count)
                if half:
                    inputs, labels = inputs.bfloat16(), labels.bfloat16()
                exchange.before_backward(count, 2 * comm.size)
                optimizer.zero_grad(set_to_none=True)
                if count:
                    # The node's first rank does not use the optional layer.
                    loss = (net(inputs, comm.rank % 2 == 1) - labels).square().sum()
                    loss.div(2).backward()
                exchange.before_step()
                optimizer.step()
                exchange.after_step()
                counts.append(exchange.statistics())
            exchange.finish()
            raw = b"".join(p.detach().float().numpy().tobytes() for p in net.parameters())
            assert all(p.isfinite().all() for p in net.parameters())
            hashes = comm.allgather([node, hashlib.sha256(raw).hexdigest()])
            assert len({tuple(each) for each in hashes}) == nodes, name
            if nodes > 2 or "gradient" in name:
                # The nodes differ; otherwise equal ranks would prove nothing.
                assert len({each[1] for each in hashes}) == nodes, name
            if name == "gossip":
                counts = [*counts, exchange.statistics()]
                buckets = len(in_buckets(trainable(net)))
                assert buckets > 2
                between = buckets if leader else 0
                ring = 2 * (on_node - 1) * buckets
                hand_on = buckets * (on_node - 1) if leader else 0
                assert counts[-1]["between_messages"] == 6 * between
                assert counts[-1]["messages"] == 6 * (between + ring + hand_on)
                size = 4 * sum(p.numel() for p in net.parameters())
                assert counts[-1]["between_bytes"] == (6 * size if leader else 0)
            exchange.close()


def check_flat(comm: Communicator, nodes: int) -> None:
    """Gossip ignores nodes if asked to, if there is only one, or if each has one rank."""
    for name, pretend in (("gossip(flat)", nodes), ("gossip", 1), ("gossip", comm.size)):
        net = Line()
        with torch.no_grad():
            net.plane.weight.fill_(comm.rank)
        exchange = started(name, net, comm, seed=0, pretend_nodes=pretend)
        assert isinstance(exchange, Gossip)
        rounds = math.ceil(math.log2(comm.size))
        for _ in range(rounds):
            exchange.before_step()
            exchange.after_step()
        exchange.finish()
        assert exchange.statistics()["messages"] == rounds
        if comm.size & (comm.size - 1) == 0:
            assert torch.allclose(net.plane.weight, torch.tensor((comm.size - 1) / 2))
        exchange.close()


def check_late(comm: Communicator, nodes: int) -> None:
    """A node's first rank forwards a late bucket, although it does not use the layer itself.

    It does so before it waits for the ranks that use it.
    """
    net = Deep()
    exchange = started("gossip", net, comm, seed=0, pretend_nodes=nodes)
    assert isinstance(exchange, NodeGossip)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if comm.rank == comm.size // 2:
        assert exchange._between is not None
        between = exchange._between._comm
        send = between.isend

        def late(data: Buffer, dest: int, tag: int) -> Request:
            if tag == 1:  # The last bucket to be sent, that of `at_times`.
                time.sleep(0.3)
            return send(data, dest, tag)

        between.isend = late  # type: ignore[method-assign]
    for step in range(3):
        inputs, labels = _samples(step, comm.rank, 2)
        exchange.before_backward(2, 2 * comm.size)
        optimizer.zero_grad(set_to_none=True)
        loss = (net(inputs, detour=exchange._between is None) - labels).square().mean()
        loss.backward()
        exchange.before_step()
        optimizer.step()
        exchange.after_step()
    exchange.finish()
    exchange.close()


def check_unfinished(comm: Communicator, nodes: int) -> None:
    """Closing in the middle of a step leaves no message that a rank would wait for."""
    net = Deep()
    exchange = started("gossip", net, comm, seed=0, pretend_nodes=nodes)
    exchange.before_step()
    exchange.after_step()
    exchange.close()
    assert net(torch.ones(2, _FEATURES)).isfinite().all()


def check_again(comm: Communicator, nodes: int) -> None:
    """After a restart all ranks are at one step: any of them may lead its node later."""
    net = Line()
    exchange = started("gossip", net, comm, seed=0, pretend_nodes=nodes)
    for _ in range(3):
        exchange.before_step()
        exchange.after_step()
    state = exchange.state()
    exchange.close()
    exchange = started("gossip", net, comm, seed=0, pretend_nodes=nodes)
    exchange.load_state(state)
    assert isinstance(exchange, NodeGossip)
    # What others have heard is counted from the restart on, as the dealing counts steps.
    assert exchange.peer_steps.begun == 3
    exchange.before_step()
    exchange.after_step()
    assert comm.allgather(int(exchange.state()["step"])) == [4] * comm.size
    exchange.close()


CHECKS: Final[dict[str, Callable[[Communicator, int], None]]] = {
    "oracle": check_oracle,
    "nodes": check_nodes,
    "flat": check_flat,
    "late": check_late,
    "unfinished": check_unfinished,
    "again": check_again,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[2:]:
        CHECKS[asked](world(), int(sys.argv[1]))
        print(f"kept {asked}", flush=True)

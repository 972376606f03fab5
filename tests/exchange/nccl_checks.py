"""Checks of sums in a device's memory, with CPU tensors by gloo: `nccl_checks.py CHECK...`.

Run as ranks of torchrun. Each exchange is compared with the one through the host on the same ranks.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pytest
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.errors import CommTimeout
from dlio.exchange import Exchange
from dlio.exchange.buffer_placement import find_path
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_spec import parse_exchange
from dlio.util.settings import DEVICE_EXCHANGE
from tests.exchange.training import (
    BATCH,
    Net,
    difference,
    make_net,
    parameters_of,
    run,
    samples,
    started,
    train_step,
)

_STEPS: Final = 6
_OTHERS: Final = ("allreduce+int8", "tree", "gossip", "local-sgd(2)")


@contextmanager
def _path(path: str) -> Iterator[None]:
    """Have exchanges that are started in the body take a path: `host` or `gloo`."""
    os.environ.pop(DEVICE_EXCHANGE, None)
    if path == "gloo":
        os.environ[DEVICE_EXCHANGE] = "1"
    try:
        yield
    finally:
        os.environ.pop(DEVICE_EXCHANGE, None)


def _started(path: str, name: str, net: Net, comm: Communicator) -> Exchange:
    with _path(path):
        cpu = [torch.device("cpu")]
        assert find_path(cpu, parse_exchange(name), comm) == path, name
        return started(name, net, comm, seed=1, pretend_nodes=comm.size)


def _train(exchange: Exchange, net: Net, comm: Communicator, steps: Sequence[int]) -> torch.Tensor:
    """Train, with fewer samples at some steps; return this rank's weights."""
    optimizer = torch.optim.SGD(parameters_of(net), lr=0.02)
    for step in steps:
        planned = comm.size * BATCH - step % 3
        inputs, labels = samples(step, planned)
        mine = slice(comm.rank * BATCH, (comm.rank + 1) * BATCH)
        train_step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
    exchange.finish()
    return torch.cat([p.detach().reshape(-1) for p in parameters_of(net)])


def check_sums(comm: Communicator) -> None:
    """Weights and counts are those through the host, within the rounding of sums."""
    weights, counts = [], []
    for path in ("host", "gloo"):
        net = make_net(1)
        exchange = _started(path, "allreduce", net, comm)
        weights.append(_train(exchange, net, comm, range(_STEPS)))
        counted = exchange.statistics()
        counts.append((counted["messages"], counted["bytes"]))
        assert exchange.state() == {}
        exchange.close()
    assert counts[0] == counts[1] > (0, 0)
    assert difference(*weights) < 1e-6


def check_others(comm: Communicator) -> None:
    """All other exchanges pass through the host where there is a group."""
    with _path("gloo"):
        for name in _OTHERS:
            assert find_path([torch.device("cpu")], parse_exchange(name), comm) == "host", name


def _cut(net: Net) -> list[TensorCut]:
    """Remove every sixth neuron of the first layer."""
    keep = torch.tensor([k for k in range(net.first.out_features) if k % 6])
    of = {"first.weight": (0,), "first.bias": (0,), "second.weight": (1,)}
    cuts = []
    for name, parameter in net.named_parameters():
        if name in of:
            shape = tuple(parameter.shape)
            cut = TensorCut(name, parameter, shape, tuple((dim, keep) for dim in of[name]))
            parameter.data = cut.of(parameter.data)
            parameter.grad = None
            cuts.append(cut)
    return cuts


def check_reshaped(comm: Communicator) -> None:
    """After neurons were removed, training is that through the host."""
    weights = []
    for path in ("host", "gloo"):
        net = make_net(1)
        exchange = _started(path, "allreduce", net, comm)
        _train(exchange, net, comm, range(2))
        exchange.reshape(_cut(net))
        weights.append(_train(exchange, net, comm, range(2, 5)))
        exchange.close()
    assert difference(*weights) < 1e-6


def check_mixed(comm: Communicator) -> None:
    """Ranks with different paths, as a CPU next to a GPU, agree on the host's and train."""
    weights = []
    for path in ("host", "gloo" if comm.rank == 0 else "host"):
        net = make_net(1)
        with _path(path):
            assert find_path([torch.device("cpu")], parse_exchange("allreduce"), comm) == "host"
            exchange = started("allreduce", net, comm)
        weights.append(_train(exchange, net, comm, range(2)))
        exchange.close()
    assert torch.equal(*weights)
    # A GPU's rank copies its buckets to the host; the CPU's has them there.
    device = torch.device("cuda:0" if comm.rank == 0 else "cpu")
    path = find_path([device], parse_exchange("allreduce"), comm)
    assert path == ("pinned" if comm.rank == 0 else "host")


def _step(exchange: Exchange, net: nn.Module) -> None:
    exchange.weigh(1.0)
    net(torch.ones(1, 3)).sum().backward()
    exchange.before_step()
    exchange.after_step()
    exchange.finish()


def check_lost(comm: Communicator) -> None:
    """A rank that leaves is an error of those that wait for it, long before the deadline."""
    net = nn.Linear(3, 3)
    with _path("gloo"):
        exchange = started("allreduce", net, comm)
    comm.barrier()
    if comm.rank:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(CommTimeout, match="another rank is stopped, far behind, or left"):
        _step(exchange, net)
    assert time.monotonic() - began < 10
    print("kept lost", flush=True)
    os._exit(0)


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "sums": check_sums,
    "others": check_others,
    "reshaped": check_reshaped,
    "mixed": check_mixed,
    "lost": check_lost,
}

if __name__ == "__main__":
    run(CHECKS)

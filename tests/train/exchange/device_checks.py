"""Checks of exchanges in a device's memory, with CPU tensors by gloo: `device_checks.py CHECK...`.

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
from dlio.errors import CommTimeout, DlioError
from dlio.exchange import ExchangeCalls
from dlio.exchange.buckets import averaged_state
from dlio.exchange.buffer_placement import find_path
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_spec import parse_exchange
from dlio.util.settings import DEVICE_EXCHANGE
from tests.train.exchange.training import (
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
_SUMS: Final = ("allreduce", "tree", "hierarchical", "parameter-server")
_EXACT: Final = (
    *("allreduce", "allreduce+int8", "allreduce+bf16", "allreduce+fp16", "tree+bf16"),
    *("local-sgd(2)", "local-sgd(4,fragments=2)+int8", "diloco(2)", "diloco(3,fragments=3)+bf16"),
    *("gossip", "gossip(hypercube)+int8", "gossip(gradient)", "gossip(gradient)+fp16"),
    *("noloco(2)", "noloco(2)+bf16"),
)
"""Exchanges whose messages are the host's, up to the rounding of sums."""
_SIGNS: Final = (
    *("allreduce+onebit", "diloco(2)+onebit", "gossip+onebit", "noloco(2)+onebit"),
    *("allreduce+ternary", "local-sgd(2)+adaptive", "gossip+ternary"),
)
"""Exchanges of signs: one of a value near zero may differ, and few weights with it."""
_LISTS: Final = (
    *("allreduce+threshold", "allreduce+adaptive"),
    *("diloco(2)+threshold", "noloco(1)+adaptive"),
)
"""Exchanges of lists of entries, which the host cuts to the length that is used."""


_LOST: Final = ("allreduce", "allreduce+int8", "gossip", "local-sgd(1)")


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


def _started(path: str, name: str, net: Net, comm: Communicator) -> ExchangeCalls:
    with _path(path):
        cpu = [torch.device("cpu")]
        assert find_path(cpu, parse_exchange(name), comm) == path, name
        return started(name, net, comm, seed=1, pretend_nodes=comm.size)


def _train(
    exchange: ExchangeCalls, net: Net, comm: Communicator, steps: Sequence[int]
) -> torch.Tensor:
    """Train, with fewer samples at some steps; return this rank's weights."""
    optimizer = torch.optim.SGD(parameters_of(net), lr=0.02)
    for step in steps:
        planned = comm.size * BATCH - step % 3
        inputs, labels = samples(step, planned)
        mine = slice(comm.rank * BATCH, (comm.rank + 1) * BATCH)
        train_step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
    exchange.finish()
    return torch.cat([p.detach().reshape(-1) for p in parameters_of(net)])


def _both(comm: Communicator, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Train through the host and by the group, which must count the same; return the weights."""
    weights, counts = [], []
    for path in ("host", "gloo"):
        net = make_net(1)
        exchange = _started(path, name, net, comm)
        weights.append(_train(exchange, net, comm, range(_STEPS)))
        counted = exchange.statistics()
        heads = 0.0
        if path == "host" and "+" in name and name.startswith(_SUMS[1:]):
            heads = 8 * counted["messages"]  # Their lengths, which a device's messages leave out.
        counts.append((counted["messages"], counted["bytes"] - heads))
        exchange.close()
    (messages, sent), (of_group, filled) = counts
    assert messages == of_group > 0, f"{name}: {counts}"
    if name in _LISTS:
        assert sent < filled < 1.5 * sent, f"{name}: {counts}"
    else:
        assert sent == filled, f"{name}: {counts}"
    return weights[0], weights[1]


def check_exact(comm: Communicator) -> None:
    """Weights and counts are those through the host, within the rounding of sums."""
    for name in _EXACT:
        host, group = _both(comm, name)
        error = difference(host, group)
        # Where sums differ by rounding, a compressed value may differ by its last bit.
        assert error < (2e-4 if "+" in name else 1e-6), f"{name} differs by {error}"


def check_few(comm: Communicator) -> None:
    """As `check_exact`, with one exchange of each kind."""
    for name in ("allreduce", "allreduce+int8", "diloco(2)", "gossip"):
        host, group = _both(comm, name)
        assert difference(host, group) < (2e-4 if "+" in name else 1e-6), name


def check_routes(comm: Communicator) -> None:
    for name in ("tree", "hierarchical", "parameter-server", "hierarchical+int8"):
        host, group = _both(comm, name)
        assert difference(host, group) < 2e-4, name


def check_signs(comm: Communicator) -> None:
    for name in (*_SIGNS, *_LISTS):
        host, group = _both(comm, name)
        moved = difference(host, torch.cat([p.reshape(-1) for p in parameters_of(make_net(1))]))
        apart = float((host - group).abs().mean())
        assert apart < 1e-2 * moved, f"{name} differs by {apart} of {moved}"


def check_resumed(comm: Communicator) -> None:
    """A checkpoint of either path goes on on the other."""
    names = ("allreduce+int8", "diloco(4)+bf16", "gossip+onebit", "noloco(2)+onebit")
    for name in (*names, "allreduce+threshold"):
        for first, second in (("gloo", "host"), ("host", "gloo")):
            whole = make_net(1)
            exchange = _started("host", name, whole, comm)
            _train(exchange, whole, comm, range(3))
            expected = _train(exchange, whole, comm, range(3, _STEPS))
            exchange.close()
            net = make_net(1)
            exchange = _started(first, name, net, comm)
            _train(exchange, net, comm, range(3))
            state = {key: value.clone() for key, value in exchange.state().items()}
            assert all(value.device.type == "cpu" for value in state.values())
            exchange.close()
            exchange = _started(second, name, net, comm)
            exchange.load_state(state)
            got = _train(exchange, net, comm, range(3, _STEPS))
            exchange.close()
            apart = float((got - expected).abs().mean())
            assert apart < 1e-4, f"{name} from {first} to {second} differs by {apart}"


def _cut(net: Net) -> list[TensorCut]:
    """Remove every sixth neuron of the first layer."""
    keep = torch.tensor([k for k in range(600) if k % 6])
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
    """After neurons were removed, both paths go on with what they owe, and with the momenta."""
    for name in ("allreduce+int8", "diloco(4)+bf16", "gossip+onebit", "noloco(2)"):
        weights, states = [], []
        for path in ("host", "gloo"):
            net = make_net(1)
            exchange = _started(path, name, net, comm)
            _train(exchange, net, comm, range(2))
            exchange.reshape(_cut(net))
            states.append({key: value.clone() for key, value in exchange.state().items()})
            weights.append(_train(exchange, net, comm, range(2, 5)))
            exchange.close()
        assert states[0].keys() == states[1].keys(), name
        assert any(each.is_floating_point() and each.any() for each in states[0].values()), name
        for key, value in states[0].items():
            assert value.shape == states[1][key].shape, f"{name}: {key}"
            assert torch.allclose(value.float(), states[1][key].float(), atol=2e-3), (
                f"{name}: {key}"
            )
        assert float((weights[0] - weights[1]).abs().mean()) < 1e-4, name


def check_distances(comm: Communicator) -> None:
    """Ranks of gossip come to the mean of their weights."""
    net = make_net(comm.rank)
    mean = averaged_state(net, comm)
    exchange = _started("gloo", "gossip", net, comm)
    for _ in range((comm.size - 1).bit_length()):
        exchange.before_backward(0, comm.size)
        exchange.before_step()
        exchange.after_step()
    exchange.finish()
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert difference(parameter, mean[name]) < 1e-6
    exchange.close()


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


def check_infinite(comm: Communicator) -> None:
    """A gradient that is not finite is refused by the name of a tensor."""
    net = make_net(1)
    exchange = _started("gloo", "allreduce+int8", net, comm)
    exchange.weigh(1.0)
    with pytest.raises(DlioError, match=r"the gradient of .* cannot be compressed"):
        (net(samples(0, BATCH)[0]).sum() * float("nan")).backward()
    comm.barrier()
    exchange.close()


def _step(exchange: ExchangeCalls, net: nn.Module) -> None:
    exchange.weigh(1.0)
    net(torch.ones(1, 3)).sum().backward()
    exchange.before_step()
    exchange.after_step()
    exchange.finish()


def check_lost(comm: Communicator) -> None:
    """A rank that leaves is an error of those that wait for it, long before the deadline."""
    models = [nn.Linear(3, 3) for _ in _LOST]
    with _path("gloo"):
        exchanges = [started(name, net, comm) for name, net in zip(_LOST, models, strict=True)]
    comm.barrier()
    if comm.rank:
        os._exit(0)
    for name, net, exchange in zip(_LOST, models, exchanges, strict=True):
        began = time.monotonic()
        with pytest.raises(CommTimeout, match="another rank is stopped, far behind, or left"):
            _step(exchange, net)
        assert time.monotonic() - began < 30, name
    print("kept lost", flush=True)
    os._exit(0)


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "exact": check_exact,
    "few": check_few,
    "routes": check_routes,
    "signs": check_signs,
    "resumed": check_resumed,
    "reshaped": check_reshaped,
    "distances": check_distances,
    "mixed": check_mixed,
    "infinite": check_infinite,
    "lost": check_lost,
}

if __name__ == "__main__":
    run(CHECKS)

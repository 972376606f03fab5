"""Checks that exchanges keep the precision of a model's numbers, on any number of ranks."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import nn

import dlio
from dlio.comm import Communicator
from dlio.errors import UsageError
from tests.exchange.training import identical, started

_SIDE: Final = 6
_SUMS: Final = ("allreduce", "hierarchical", "tree", "parameter-server", "local-sgd(1)")
_PLAIN: Final = (
    *_SUMS,
    "local-sgd(2)",
    "local-sgd(2,fragments=2)",
    "diloco(2,rate=1,momentum=0)",
    "gossip",
    "gossip(flat)",
    "gossip(gradient)",
    "noloco(2,rate=1,momentum=0)",
)
_PACKED: Final = (
    "gossip+bf16",
    "gossip+adaptive",
    "noloco(1)+onebit",
    "noloco(2,rate=1,momentum=0)+int8",
)
_LOSSY: Final = (
    "allreduce+bf16",
    "tree+int8",
    "local-sgd(2)+fp16",
    "diloco(2)+onebit",
    "asgd+bf16",
)


class _Mixed(nn.Module):
    """Layers of four types, one in the midst of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        kinds = (torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(_SIDE, _SIDE, dtype=kind) for kind in kinds)
        self.scale = nn.Parameter(torch.ones(_SIDE, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))  # type: ignore[arg-type]
        scaled: torch.Tensor = x.double() * self.scale
        return scaled


def _loss(net: _Mixed, step: int, part: slice = slice(None)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(12, _SIDE, dtype=torch.float64, generator=generator)
    loss: torch.Tensor = (net(inputs[part]) - inputs[part].roll(1, 1)).square().mean()
    return loss


def _apart(net: nn.Module, whole: nn.Module, kind: torch.dtype) -> float:
    pairs = zip(net.parameters(), whole.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a.dtype is kind)


def _alone(steps: int) -> _Mixed:
    net = _Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        _loss(net, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


def _together(name: str, comm: Communicator, shared: bool, steps: int = 4) -> _Mixed:
    """Train on each rank's share of the data, or all on all of it."""
    net = _Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nodes = 2 if name == "hierarchical" or (comm.size > 2 and name == "gossip") else None
    with dlio.distribute(net, optimizer, name, pretend_nodes=nodes) as ranks:
        for step in range(steps):
            optimizer.zero_grad()
            part = slice(comm.rank, None, comm.size) if shared else slice(None)
            _loss(net, step, part).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ranks.finish()
    return net


def check_precise(comm: Communicator) -> None:
    """Float64 layers train as in one process to the last bits, next to others of any type."""
    whole = _alone(4)
    for name in _SUMS:
        net = _together(name, comm, shared=True)
        assert identical(net, comm), name
        # Later layers of 16 bits round their parts of the batch otherwise: their error is not ours.
        _check_near(net, whole, name, 2e-4)
    for name in (*_PLAIN, *_PACKED):
        # Ranks with the same data: the mean equals each of them.
        _check_near(_together(name, comm, shared=False), whole, name, 1e-15)
    for name in _LOSSY:
        net = _together(name, comm, shared=False)
        assert all(p.isfinite().all() for p in net.parameters()), name
        assert _apart(net, whole, torch.float64) < 0.5, name


def _check_near(net: _Mixed, whole: _Mixed, name: str, most: float) -> None:
    for kind in (torch.float64, torch.float32):
        error = _apart(net, whole, kind)
        assert error <= max(most, torch.finfo(kind).eps), f"{name}: {kind} by {error}"


def check_float64(comm: Communicator) -> None:
    """A float64 network on shares of the data trains as one process does."""
    for name in _SUMS:
        net, whole = (nn.Linear(_SIDE, _SIDE, dtype=torch.float64) for _ in range(2))
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(6 * comm.size, _SIDE, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            for each in (net, whole):
                for number, parameter in enumerate(each.parameters()):
                    parameter.fill_((number + 1) / 3)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (net, whole)]
        with dlio.distribute(net, optimizers[0], name) as ranks:
            for _ in range(5):
                for each, optimizer in zip((net, whole), optimizers, strict=True):
                    mine = inputs[comm.rank :: comm.size] if each is net else inputs
                    optimizer.zero_grad()
                    each(mine).tanh().square().mean().backward()
                    optimizer.step()
            ranks.finish()
        for a, b in zip(net.parameters(), whole.parameters(), strict=True):
            error = float((a - b).detach().abs().max())
            assert error < 1e-15, f"{name}: {error}"


def check_converted(comm: Communicator) -> None:
    """A network that becomes float64 after its exchange was made trains as one that was before."""
    whole = _made_double()
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.3)
    inputs = torch.linspace(-1, 1, 8 * _SIDE, dtype=torch.float64).view(8, _SIDE)
    for _ in range(4):
        whole_optimizer.zero_grad()
        whole(inputs).tanh().square().mean().backward()
        whole_optimizer.step()
    for name in (*_PLAIN, "gossip+adaptive", "noloco(1)+onebit"):
        net = nn.Linear(_SIDE, _SIDE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        nodes = 2 if comm.size > 2 and name == "gossip" else None
        with dlio.distribute(net, optimizer, name, pretend_nodes=nodes) as ranks:
            net.double().load_state_dict(_made_double().state_dict())
            for _ in range(4):
                optimizer.zero_grad()
                net(inputs).tanh().square().mean().backward()
                optimizer.step()
            ranks.finish()
        for a, b in zip(net.parameters(), whole.parameters(), strict=True):
            error = float((a - b).detach().abs().max())
            assert error < 1e-15, f"{name}: {error}"
    net = nn.Linear(_SIDE, _SIDE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    with dlio.distribute(net, optimizer, "asgd"):
        net.double()
        if comm.size > 1:
            with pytest.raises(UsageError, match="became float64"):
                optimizer.step()


def _made_double() -> nn.Linear:
    net = nn.Linear(_SIDE, _SIDE, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_((number + 1) / 4)  # As exact in float32.
    return net


def check_asgd_keeps(comm: Communicator) -> None:
    """Weights that no step changes stay as they are to the last bit, however often they travel."""
    net, before = _Mixed(), _Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with dlio.distribute(net, optimizer, "asgd") as ranks:
        for step in range(40):
            _loss(net, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            comm.barrier()
        totals = ranks.statistics()
    assert comm.size == 1 or totals["messages"] > 0
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True)
    )


def check_state(comm: Communicator) -> None:
    """The state of an exchange of float64 weights continues it to the last bit."""
    for name in ("local-sgd(3)", "diloco(3)", "noloco(2)", "noloco(1)+adaptive", "gossip+adaptive"):
        nets = [_Mixed(), _Mixed()]
        for number, net in enumerate(nets):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            exchange = started(name, net, comm)
            for step in range(6):
                if step == 2 and number:
                    state = {key: value.clone() for key, value in exchange.state().items()}
                    exchange.close()
                    exchange = started(name, net, comm)
                    exchange.load_state(state)
                elif step == 2:
                    exchange.state()
                exchange.before_backward(6, 6 * comm.size)
                optimizer.zero_grad()
                _loss(net, step, slice(comm.rank, None, comm.size)).backward()  # type: ignore[no-untyped-call]
                exchange.before_step()
                optimizer.step()
                exchange.after_step()
            exchange.finish()
            exchange.close()
        pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name


def check_defaults(comm: Communicator) -> None:
    """The default type of a script is nothing to its exchange."""
    before = torch.get_default_dtype()
    for kind in (torch.float64, torch.bfloat16, torch.float16):
        torch.set_default_dtype(kind)
        try:
            for name in ("allreduce", "tree", "allreduce+int8", "local-sgd(2)", "gossip", "asgd"):
                net = nn.Linear(4, 2)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                with dlio.distribute(net, optimizer, name):
                    for _ in range(3):
                        net(torch.ones(3, 4)).square().mean().backward()
                        optimizer.step()
                assert all(p.dtype is kind and p.isfinite().all() for p in net.parameters())
        finally:
            torch.set_default_dtype(before)


def check_gradient_types(comm: Communicator) -> None:
    """Gradients of a type of their own are summed in it, also of parameters without one here."""
    if not hasattr(torch.Tensor, "grad_dtype"):  # Before torch 2.9.
        return
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad_dtype = torch.float64
    net = nn.ParameterList(parameters)
    exchange = started("allreduce", net, comm)
    exchange.before_backward(1, comm.size)
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    # Rank 0 has a gradient of the one, the others of the other.
    parameters[min(comm.rank, 1)].grad = third * comm.size
    exchange.before_step()
    assert parameters[0].grad is not None
    assert torch.allclose(parameters[0].grad, third, rtol=0, atol=1e-15)
    assert comm.size == 1 or parameters[1].grad is not None
    exchange.close()


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "precise": check_precise,
    "float64": check_float64,
    "converted": check_converted,
    "asgd_keeps": check_asgd_keeps,
    "state": check_state,
    "defaults": check_defaults,
    "gradient_types": check_gradient_types,
}

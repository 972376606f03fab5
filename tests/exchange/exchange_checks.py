"""Checks of exchanges, on any number of ranks: `exchange_checks.py CHECK...`.

The checks of exchanges that send weights are in `gossip_checks`.
"""

import copy
from collections.abc import Callable, Iterable
from itertools import cycle, product
from typing import Final
from unittest import mock

import pytest
import torch
from torch import nn

import dlio
from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio.exchange import buckets
from dlio.exchange.buckets import averaged_state, broadcast_state
from dlio.plan.order import share
from dlio.plan.rank_shares import fastest_shares
from tests.exchange.gossip_checks import CHECKS as WEIGHT_CHECKS
from tests.exchange.training import (
    BATCH,
    FEATURES,
    Net,
    difference,
    identical,
    make_net,
    make_optimizer,
    parameters_of,
    run,
    samples,
    started,
    train_step,
)
from tests.exchange.type_checks import CHECKS as TYPE_CHECKS


def check_allreduce(comm: Communicator) -> None:
    """Training on shares of a batch, also uneven and empty ones, equals training on the batch."""
    net, whole = make_net(comm.rank + 1), make_net(1)
    broadcast_state(net, comm)
    exchange = started("allreduce", net, comm, seed=0)
    optimizer, reference = make_optimizer(net), make_optimizer(whole)
    full = comm.size * BATCH
    # Full batches, then smaller ones, down to one sample in the whole batch.
    for step, planned in enumerate([full, full, full - 1, comm.size, 1, full]):
        inputs, labels = samples(step, planned)
        mine = share(planned, comm.size, comm.rank)
        train_step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
        reference.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]
        reference.step()
        for (name, a), b in zip(net.named_parameters(), whole.parameters(), strict=True):
            error = difference(a, b)
            assert error < 1e-6, f"step {step}: {name} differs by {error}"
    checksums = comm.allgather([float(p.detach().double().sum()) for p in net.parameters()])
    assert all(each == checksums[0] for each in checksums)
    counted = exchange.statistics()
    if comm.size > 1:
        # The counts of a ring with 3 buckets, each with a weight, and with a flag per parameter.
        hops = 2 * (comm.size - 1)
        assert counted["messages"] == 6 * 3 * hops
        parameters = parameters_of(net)
        whole_bytes = 6 * 4 * (3 + len(parameters) + sum(p.numel() for p in parameters))
        assert counted["bytes"] == whole_bytes * hops / comm.size
    exchange.close()


def check_shares(comm: Communicator) -> None:
    """Training on shares by speed equals training on the whole batch."""
    full = comm.size * BATCH
    cost = [1.0 + 2 * (rank == comm.size - 1) for rank in range(comm.size)]
    shares = fastest_shares(full, [0.0] * comm.size, cost)
    assert comm.size == 1 or shares.counts[0] > shares.counts[-1]
    for name in ("allreduce", "tree", "hierarchical", "parameter-server"):
        net, whole = make_net(1), make_net(1)
        exchange = started(name, net, comm, seed=0)
        for step, planned in enumerate([full, full - 1, 1]):
            inputs, labels = samples(step, planned)
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
            for a, b in zip(parameters_of(net), parameters_of(whole), strict=True):
                if b.grad is not None:
                    assert a.grad is not None
                    assert difference(a.grad, b.grad) < 1e-6
            exchange.after_step()
        exchange.close()


def check_skipped(comm: Communicator) -> None:
    """Unreadable samples of a batch do not change the weight of the others in the gradient."""
    net, whole = make_net(1), make_net(1)
    exchange = started("allreduce", net, comm, seed=0)
    planned = comm.size * BATCH
    inputs, labels = samples(0, planned)
    mine = list(share(planned, comm.size, comm.rank))
    kept = [k for k in range(planned) if k % BATCH]  # each rank loses its first sample
    used = [k for k in mine if k in kept]
    train_step(net, exchange, make_optimizer(net), inputs[used], labels[used], planned, comm.size)
    reference = make_optimizer(whole)
    nn.functional.cross_entropy(whole(inputs[kept]), labels[kept]).backward()  # type: ignore[no-untyped-call]
    reference.step()
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        assert difference(a, b) < 1e-6
    exchange.close()


def check_half(comm: Communicator) -> None:
    """Gradients of bfloat16 weights are sent as float32."""
    for name in ("allreduce", "gossip"):
        net = make_net(1).to(torch.bfloat16)
        exchange = started(name, net, comm, seed=0)
        inputs, labels = samples(comm.rank, BATCH)
        args = (inputs.bfloat16(), labels, comm.size * BATCH, comm.size)
        train_step(net, exchange, make_optimizer(net), *args)
        exchange.finish()
        assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in net.parameters())
        exchange.close()


def check_mean(comm: Communicator) -> None:
    """The mean of models does not change them, and has their types."""
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


def check_sums(comm: Communicator) -> None:
    """Every exchange that sums trains as one process does; all ranks hold identical bytes."""
    for name in SUMS:
        net, whole = make_net(1), make_net(1)
        exchange = started(name, net, comm, seed=0, pretend_nodes=max(1, comm.size // 2))
        optimizer, reference = make_optimizer(net), make_optimizer(whole)
        for step in range(3):
            planned = comm.size * BATCH
            inputs, labels = samples(step, planned)
            mine = share(planned, comm.size, comm.rank)
            train_step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
            reference.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]
            reference.step()
        exchange.finish()
        for (what, a), b in zip(net.named_parameters(), whole.parameters(), strict=True):
            assert difference(a, b) < 2e-6, f"{name}: {what} differs by {difference(a, b)}"
        assert identical(net, comm), name
        exchange.close()


def check_compressed(comm: Communicator) -> None:
    """With compression, all ranks hold identical bytes, and the bytes sent keep their bound."""
    _check_compressed(comm, product((*SUMS, "diloco(2)"), _FEWER))


def check_compressed_pairs(comm: Communicator) -> None:
    """The same, for each exchange and each compressor once; all pairs take ten seconds."""
    _check_compressed(comm, zip(cycle((*SUMS, "diloco(2)")), _FEWER, strict=False))


def _check_compressed(comm: Communicator, specs: Iterable[tuple[str, str]]) -> None:
    size = 4 * sum(p.numel() for p in parameters_of(make_net(1)))
    for name, compressor in specs:
        net = make_net(1)
        spec = f"{name}+{compressor}"
        exchange = started(spec, net, comm, seed=0, pretend_nodes=max(1, comm.size // 2))
        optimizer = torch.optim.SGD(parameters_of(net), lr=0.01)
        for step in range(4):
            planned = comm.size * BATCH
            inputs, labels = samples(step, planned)
            mine = share(planned, comm.size, comm.rank)
            train_step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
        exchange.finish()
        assert all(p.isfinite().all() for p in net.parameters())
        assert identical(net, comm), spec
        counts = exchange.statistics()
        sums = 2 if name == "diloco(2)" else 4
        most = sums * size * (comm.size if name == "parameter-server" else 2 * comm.size)
        assert 0 < counts["bytes"] < most / _FEWER[compressor], (
            f"{spec}: {counts['bytes']} of {most}"
        )
        exchange.close()


_FEWER: Final = {
    "onebit": 20,
    "ternary": 15,
    "threshold": 50,
    "adaptive": 50,
    "int8": 3,
    "bf16": 1.9,
    "fp16": 1.9,
}
"""Factor by which each compressor at least reduces the bytes, for layers as narrow as these."""


def check_distribute(comm: Communicator) -> None:
    """A loop with two optimizers, accumulation, clipping and uneven shares.

    It trains as one process does.
    """

    def train(net: Net, together: bool) -> None:
        # With the usual eps, rounding of tiny gradients would become whole steps.
        first = torch.optim.Adam(net.first.parameters(), lr=1e-3, eps=1e-5)
        rest = [p for p in parameters_of(net) if all(p is not q for q in net.first.parameters())]
        optimizers = [first, torch.optim.SGD(rest, lr=0.05, momentum=0.9)]
        ranks = dlio.distribute(net, optimizers) if together else None
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(2):
                count = comm.size * BATCH - 1
                inputs, labels = samples(10 * step + part, count)
                if ranks is not None:
                    mine = share(count, comm.size, comm.rank)
                    inputs, labels = inputs[mine], labels[mine]
                    ranks.weigh(len(mine))
                loss = nn.functional.cross_entropy(net(inputs), labels) / 2
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters_of(net), 0.3)
            for optimizer in optimizers:
                optimizer.step()
        if ranks is not None:
            assert ranks.statistics()["messages"] > 0
            ranks.close()

    net, whole = make_net(comm.rank + 5), make_net(5)
    train(net, together=True)
    train(whole, together=False)
    for (name, a), b in zip(net.named_parameters(), whole.named_parameters(), strict=True):
        error = difference(a, b[1])
        assert error < 1e-5, f"{name} differs by {error}"
    # The hooks have been removed.
    before = net.last.weight.detach().clone()
    nn.functional.cross_entropy(net(torch.ones(1, FEATURES)), torch.tensor([0])).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(before, net.last.weight)


def check_presets(comm: Communicator) -> None:
    """Every preset trains a hand-written loop; with those that sum, ranks hold identical bytes."""
    names = ("allreduce", "hierarchical", "tree+int8", "parameter-server", "gossip", "asgd")
    for name in (*names, "gossip(gradient)+int8", "local-sgd(2)+adaptive", "diloco(2)"):
        net = make_net(comm.rank)
        optimizer = torch.optim.SGD(parameters_of(net), lr=0.02)
        with dlio.distribute(net, optimizer, name, pretend_nodes=comm.size) as ranks:
            for step in range(4):
                inputs, labels = samples(1000 * comm.rank + step, BATCH)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            ranks.finish()
            assert ranks.statistics()["messages"] > 0, name
        assert all(p.isfinite().all() for p in net.parameters())
        if not name.startswith(("gossip", "asgd")):
            assert identical(net, comm), name


def check_later(comm: Communicator) -> None:
    """Parameters that come later are exchanged: unfrozen, added, and by a second optimizer.

    With those that sum, ranks hold identical bytes; with `allreduce`, those of one process. Rank 0
    tells if a parameter was another one on each rank.
    """

    def train(net: nn.Sequential, more: nn.Module, together: str) -> list[float]:
        first, last = net[0].requires_grad_(False), net[2]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ranks = dlio.distribute(net, optimizer, together) if together else None
        sent = []
        for stage in range(4):
            if stage == 1:
                first.requires_grad_(True)
            elif stage == 2:
                optimizer.add_param_group({"params": more.parameters()})
            elif stage == 3:
                optimizer = torch.optim.SGD([*last.parameters(), *more.parameters()], lr=0.05)
            for step in range(4):
                inputs = samples(10 * stage + step, 2 * comm.size)[0][:, :4]
                if ranks is not None:
                    inputs = inputs[share(len(inputs), comm.size, comm.rank)]
                optimizer.zero_grad()
                more(net(inputs)).square().mean().backward()
                optimizer.step()
            if ranks is not None:
                ranks.finish()
                sent.append(ranks.statistics()["bytes"])
        if ranks is not None:
            ranks.close()
        return sent

    def made(seed: int) -> tuple[nn.Sequential, nn.Module]:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 2)

    for name in ("allreduce", "tree+int8", "gossip", "asgd", "local-sgd(2)", "diloco(2)"):
        net, more = made(comm.rank if name != "allreduce" else 0)
        with mock.patch("dlio.exchange.distribute.log_line") as warning:
            sent = train(net, more, name)
        growth = [after - before for before, after in zip([0.0, *sent], sent, strict=False)]
        assert all(bytes_ > 0 for bytes_ in growth), f"{name}: {sent}"
        assert growth[1] > growth[0], f"{name}: {sent}"  # With those that were frozen.
        assert growth[2] > growth[1], f"{name}: {sent}"
        if not name.startswith(("gossip", "asgd")):
            assert identical(nn.ModuleList([net, more]), comm), name
        unlike = comm.rank == 0 and comm.size > 1 and name != "allreduce"
        assert warning.call_count == unlike, f"{name}: {warning.mock_calls}"
        if name == "allreduce":
            whole, other = made(0)
            train(whole, other, "")
            pairs = zip(
                [*net.parameters(), *more.parameters()],
                [*whole.parameters(), *other.parameters()],
                strict=True,
            )
            assert all(difference(a, b) < 1e-6 for a, b in pairs)


def check_parting(comm: Communicator) -> None:
    """Rank 0 tells once if learning rates or weights that are to be alike differ by rank."""
    words_of = {"rate": "other learning rates", "weight": "weights of weight differ", "": ""}
    for (way, words), name in product(words_of.items(), ("allreduce", "tree+int8", "local-sgd(2)")):
        torch.manual_seed(3)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with (
            mock.patch("dlio.exchange.step_watch.log_line") as warning,
            dlio.distribute(net, optimizer, name),
        ):
            for step in range(6):
                optimizer.zero_grad()
                net(torch.ones(2, 4) * (comm.rank + step)).square().mean().backward()
                if step == 2 and way == "rate":
                    optimizer.param_groups[0]["lr"] = 0.01 * (1 + comm.rank)
                optimizer.step()
                if step == 2 and way == "weight":
                    with torch.no_grad():
                        net.weight *= 1 + 0.1 * comm.rank
        lines = [" ".join(map(str, call.args)) for call in warning.mock_calls]
        tells = bool(way) and comm.rank == 0 and comm.size > 1 and name != "local-sgd(2)"
        assert len(lines) == tells, f"{way}, {name}: {lines}"
        assert all(words in line for line in lines), f"{way}, {name}: {lines}"


def check_assigned(comm: Communicator) -> None:
    """Gradients that were assigned, or changed in place without a backward, are averaged; those of
    a backward that were clipped, or of a second step, are not exchanged again."""
    for name in ("allreduce", "tree+int8"):
        torch.manual_seed(3)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with dlio.distribute(net, optimizer, name) as ranks:
            sent = []
            for way in range(5):
                mine = torch.full_like(net.weight, float(comm.rank + way))
                if way == 0:
                    net.weight.grad = mine
                elif way == 1:
                    optimizer.zero_grad(set_to_none=False)
                    assert net.weight.grad is not None
                    net.weight.grad += mine
                else:
                    optimizer.zero_grad()
                    (net.weight * mine).sum().backward()  # type: ignore[no-untyped-call]
                    assert net.weight.grad is not None
                    if way == 3:
                        net.weight.grad.mul_(0.5)
                optimizer.step()
                mean = ((comm.size - 1) / 2 + way) * (0.5 if way == 3 else 1)
                assert net.weight.grad is not None
                off = (net.weight.grad - mean).abs().max()
                assert off < (0.1 if "int8" in name else 1e-5), f"{name}, {way}: {off}"
                sent.append(ranks.statistics()["messages"])
            optimizer.step()
            sent.append(ranks.statistics()["messages"])
            each = [after - before for before, after in zip([0.0, *sent], sent, strict=False)]
            assert len(set(each[:5])) == 1, f"{name}: {each}"
            assert each[5] == 0, f"{name}: {each}"
            assert identical(net, comm)


def check_parts(comm: Communicator) -> None:
    """Several losses of one step that reach different parameters have the mean's gradients.

    Their backward passes come one after another, or are held until the last.
    """
    for held in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
        exchange = started("allreduce", net, comm, seed=0)
        whole = copy.deepcopy(net)
        inputs = [samples(step, 2 * comm.size)[0][:, :4] for step in range(3)]
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
            assert difference(a.grad, b.grad) < 1e-6
        if comm.size > 1:
            backwards = 1 if held else 3
            assert exchange.statistics()["messages"] == backwards * 2 * (comm.size - 1)
        exchange.close()


def check_types(comm: Communicator) -> None:
    """Models of any types become rank 0's to the last bit, and their mean keeps the precision."""
    net = nn.Linear(2, 2, dtype=torch.float64)
    net.register_buffer("numbers", torch.tensor([2**53 + 1, -5]) * (1 + comm.rank))
    net.register_buffer("waves", torch.tensor([1 + 2j, 3j]) * (1 + comm.rank))
    broadcast_state(net, comm)
    assert net.get_buffer("numbers").tolist() == [2**53 + 1, -5]
    assert net.get_buffer("waves").tolist() == [1 + 2j, 3j]
    mean = averaged_state(net, comm)
    assert difference(mean["weight"], net.weight) < 1e-15
    net.register_parameter("wave", nn.Parameter(torch.tensor([1j])))
    for name in ("gossip", "allreduce+int8"):
        if comm.size > 1:
            with pytest.raises(UsageError, match="wave is complex64"):
                started(name, net, comm)
    net.register_parameter("wide", nn.Parameter(torch.full((2, 3), 1 + 2j, dtype=torch.complex128)))
    exchange = started("allreduce", net, comm)
    for parameter in net.parameters():
        factor = 1 + comm.rank * (2j if parameter.is_complex() else 2)
        torch.autograd.backward(parameter.sum().mul(factor).abs())
    exchange.before_step()
    for parameter in net.parameters():
        own = parameter.detach().clone().requires_grad_()
        expected = torch.zeros_like(own)
        for rank in range(comm.size):
            own.grad = None
            factor = 1 + rank * (2j if own.is_complex() else 2)
            torch.autograd.backward(own.sum().mul(factor).abs())
            assert own.grad is not None
            expected += own.grad / comm.size
        assert parameter.grad is not None
        assert difference(parameter.grad, expected) < 1e-6
    exchange.close()


def check_reached(comm: Communicator) -> None:
    """Ranks whose backwards reach different parameters have the mean's gradients, all of them.

    The layers fill a bucket each, of equal size, so that one could be taken for the other.
    """
    for name in ("allreduce", "hierarchical", "allreduce+int8"):
        torch.manual_seed(4)
        side = int((buckets.BUCKET_BYTES / 4) ** 0.5)
        layers = [nn.Linear(side, side, bias=False) for _ in range(3)]
        net = nn.Sequential(*layers)
        exchange = started(name, net, comm, pretend_nodes=comm.size)
        whole = copy.deepcopy(layers)
        for rank in range(comm.size):
            inputs = samples(rank, 4)[0][:, :1].expand(4, side)
            if rank == comm.rank:
                layers[rank % 2](inputs).square().mean().backward()
            (whole[rank % 2](inputs).square().mean() / comm.size).backward()
        exchange.before_step()
        for a, b in zip(layers, whole, strict=True):
            assert (a.weight.grad is None) == (b.weight.grad is None), name
            if a.weight.grad is not None and b.weight.grad is not None:
                error = difference(a.weight.grad, b.weight.grad)
                assert error < (0.05 if "int8" in name else 1e-6), f"{name}: {error}"
        assert layers[2].weight.grad is None
        given = [float(a.weight.grad.double().sum()) for a in layers if a.weight.grad is not None]
        everyone = comm.allgather(given)
        assert all(each == everyone[0] for each in everyone), name
        exchange.close()


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "allreduce": check_allreduce,
    "shares": check_shares,
    "skipped": check_skipped,
    "half": check_half,
    "mean": check_mean,
    "sums": check_sums,
    "compressed": check_compressed,
    "compressed_pairs": check_compressed_pairs,
    "distribute": check_distribute,
    "later": check_later,
    "parting": check_parting,
    "assigned": check_assigned,
    "parts": check_parts,
    "reached": check_reached,
    "types": check_types,
    "presets": check_presets,
}

if __name__ == "__main__":
    run({**CHECKS, **WEIGHT_CHECKS, **TYPE_CHECKS})

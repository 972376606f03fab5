"""Losses of the batches of two loaders, and schedules that follow a rank's own metric, as ranks of
mpirun; each rank raises an error where one is wrong."""

import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dlio
from dlio.comm import world

_Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]
_said: list[str] = []


class _Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _said.append(record.getMessage())


def one_loss(net: nn.Module, x: torch.Tensor, u: torch.Tensor) -> None:
    torch.autograd.backward(net(x).square().mean() + net(u).square().mean())


def joined(net: nn.Module, x: torch.Tensor, u: torch.Tensor) -> None:
    torch.autograd.backward(net(torch.cat([x, u])).square().mean())


def one_after_another(net: nn.Module, x: torch.Tensor, u: torch.Tensor) -> None:
    torch.autograd.backward(net(x).square().mean())
    torch.autograd.backward(net(u).square().mean())


def train(loss: _Loss, counts: tuple[int, int]) -> torch.Tensor:
    """Return the weights after an epoch of batches of 4 on each rank, in order."""
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sets = [TensorDataset(torch.randn(n, 4) + k) for k, n in enumerate(counts)]
    with dlio.distribute(net, optimizer):
        for (x,), (u,) in zip(*(dlio.DataLoader(each, 4) for each in sets), strict=True):
            optimizer.zero_grad()
            loss(net, x, u)
            optimizer.step()
        mine = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    whole = [torch.randn(n, 4) + k for k, n in enumerate(counts)]
    for x, u in zip(*(torch.split(each, 4 * world().size) for each in whole), strict=True):
        optimizer.zero_grad()
        loss(net, x, u)
        optimizer.step()
    return mine - torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def follow(metrics: list[list[float]], exchange: str = "allreduce") -> list[float]:
    """Return the learning rates after each step with a rank's metric of each list."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = []
    with dlio.distribute(net, optimizer, exchange):
        for each in metrics:
            schedule.step(each[world().rank])
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


def follow_uneven(way: str) -> tuple[float, list[int]]:
    """Return the metric that a schedule gets of 1 from rank 0 and 8 from rank 1, and the numbers of
    samples that they have had for it."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    seen = 4 - world().rank
    with dlio.distribute(net, optimizer) as ranks:
        if way == "weigh":
            ranks.weigh(seen)
        # An evaluation has other shares than the training before it.
        for count in {"weigh": (), "loader": (7,), "evaluation": (7, 5)}[way]:
            net.train(count == 7)
            seen = 0
            loader = dlio.DataLoader(TensorDataset(torch.randn(count, 1)), batch_size=2)
            for (x,) in loader:
                torch.autograd.backward(net(x).sum())
                seen += loader.batch_share.samples if loader.batch_share else 0
            assert sum(world().allgather(seen)) == count
        schedule.step(8.0 if world().rank else 1.0)
    return float(schedule.best), world().allgather(seen)


def check_plateaus() -> None:
    for way in ("weigh", "loader", "evaluation"):
        metric, (first, second) = follow_uneven(way)
        assert first != second
        assert metric == (first + 8 * second) / (first + second), (way, first, second)
    for metrics, exchange, wanted, words in (
        ([[3.0, 1.0], [1.0, 2.0], [2.0, 4.0]], "allreduce", [1.0, 1.0, 0.5], "gets their mean"),
        ([[3.0, 3.0], [4.0, 4.0]], "allreduce", [1.0, 0.5], ""),
        ([[3.0, 3.0], [4.0, 4.0]], "local-sgd(2)", [1.0, 0.5], "each rank's own"),
    ):
        _said.clear()
        rates = follow(metrics, exchange)
        assert rates == wanted, (rates, metrics)
        assert len(_said) == (bool(words) and world().rank == 0), _said
        assert all(words in each for each in _said), _said


def main() -> None:
    assert world().size == 2
    logging.getLogger("dlio").addHandler(_Kept())
    check_plateaus()
    for loss, counts, is_told in (
        (one_loss, (22, 19), True),
        (one_loss, (19, 24), True),  # The last batch of one of them is whole.
        (joined, (22, 19), True),
        (one_loss, (22, 22), False),
        (one_after_another, (22, 19), False),
    ):
        _said.clear()
        gap = float(train(loss, counts).abs().max())
        notices = [each for each in _said if "weighed by another one" in each]
        case = f"{loss.__name__} {counts}: {gap:.1e}, {_said}"
        assert len(notices) == (is_told and world().rank == 0), case
        assert all("joined_batches_checks.py:" in each for each in notices), case
        assert (gap > 1e-5) == is_told, case


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

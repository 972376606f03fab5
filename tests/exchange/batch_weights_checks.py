"""Loops of one's own over a `dlio.DataLoader`, without `weigh`, against one process of torch's.

`batch_weights_checks.py`, as ranks of mpirun; each rank raises an error where one is wrong.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dlio
from dlio.comm import world

BATCH = 4


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randn(count, 1, generator=generator))


def model(normalised: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(6, track_running_stats=False)] if normalised else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 1))


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def alone(count: int, accumulated: int, normalised: bool) -> torch.Tensor:
    net, (x, y) = model(normalised), data(count).tensors
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = torch.split(torch.arange(count), BATCH * world().size)
    for number, batch in enumerate(batches):
        torch.autograd.backward(nn.functional.mse_loss(net(x[batch]), y[batch]) / accumulated)
        if (number + 1) % accumulated == 0 or number + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return flat(net)


def together(
    count: int,
    accumulated: int,
    normalised: bool,
    exchange: str = "allreduce",
    holds: bool = False,
    ahead: bool = False,
    workers: int = 0,
    tiers: str | None = None,
) -> torch.Tensor:
    """Train; `ahead` takes each batch before the step of the one before it."""
    net = model(normalised)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = dlio.DataLoader(data(count), BATCH, seed=1, num_workers=workers, tiers=tiers)
    with dlio.distribute(net, optimizer, exchange) as ranks:
        iterator: Any = iter(loader)
        steps = len(loader)
        batches = list(iterator) if ahead else iterator
        for number, (x, y) in enumerate(batches):
            last = (number + 1) % accumulated == 0 or number + 1 == steps
            ranks.hold(holds and not last)
            assert len(x), "an empty batch in training"
            torch.autograd.backward(nn.functional.mse_loss(net(x), y) / accumulated)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        # A repeated sample would count in evaluation, so there a batch may be empty.
        evaluated = [number for x, _ in loader for number in x[:, 0].tolist()]
        everything = [number for each in world().allgather(evaluated) for number in each]
        assert sorted(everything) == sorted(data(count).tensors[0][:, 0].tolist())
        ranks.finish()
    loader.close()
    return flat(net)


def assigned(count: int, weighs: bool, in_place: bool, exchange: str = "allreduce") -> torch.Tensor:
    """Train with gradients of two batches each that no backward of a parameter has made."""
    net = model()
    parameters: list[Any] = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    with dlio.distribute(net, optimizer, exchange) as ranks:
        loader = dlio.DataLoader(data(count), BATCH, seed=1)
        for number, (x, y) in enumerate(loader):
            if weighs:
                ranks.weigh(len(x))
            loss = nn.functional.mse_loss(net(x), y) / 2
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                if in_place and p.grad is not None:
                    p.grad += g
                else:
                    p.grad = g if p.grad is None else p.grad + g
            if number % 2 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad(set_to_none=not in_place)
        ranks.finish()
    return flat(net)


def added_to_means(clips: bool) -> None:
    """Gradients that no backward has made are added to those of one, in place."""
    net = model()
    parameters: list[Any] = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    with dlio.distribute(net, optimizer) as ranks:
        for _ in range(3):
            optimizer.zero_grad()
            out = net(torch.ones(1, 4) + world().rank)
            torch.autograd.backward(out.square().mean(), retain_graph=True)
            wanted = [p.grad.clone() for p in parameters]
            more = torch.autograd.grad(out.mean(), parameters)
            for p, mean, g in zip(parameters, wanted, more, strict=True):
                p.grad += g
                everyone = world().allgather(g.tolist())
                mean += (torch.tensor(everyone[0]) + torch.tensor(everyone[1])) / 2
            if clips:
                ranks.take_assigned()
                nn.utils.clip_grad_value_(parameters, 0.1)
                wanted = [each.clamp(-0.1, 0.1) for each in wanted]
            optimizer.step()
            for p, mean in zip(parameters, wanted, strict=True):
                torch.testing.assert_close(p.grad, mean)


def of_boxes(joins: Callable[[list[Any]], Any] | None) -> torch.Tensor:
    """Train on samples of more or fewer boxes each; in one process if `joins` is None."""
    net = model()
    parts = [1, 3, 2, 1, 2, 5, 4]
    samples = list(torch.split(data(sum(parts)).tensors[0], parts))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches: Any = [samples]
    if joins is not None:
        batches = dlio.DataLoader(samples, BATCH, seed=1, collate_fn=joins)
    with nullcontext() if joins is None else dlio.distribute(net, optimizer):
        for batch in batches:
            boxes = batch[0] if isinstance(batch, tuple) else batch
            losses = [net(each).square().mean() for each in boxes]
            torch.autograd.backward(torch.stack(losses).mean())
            optimizer.step()
    return flat(net)


def weighed_by_hand() -> torch.Tensor:
    """A loop that calls `weigh`, as before."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with dlio.distribute(net, optimizer) as ranks:
        for x, y in dlio.DataLoader(data(27), BATCH, seed=1):
            ranks.weigh(len(x))
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
    return flat(net)


def without_samples() -> None:
    """In a step of no samples on any rank, and in one of some on rank 0 alone."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with dlio.distribute(net, optimizer) as ranks:
        for weight in (0, 3 - 3 * world().rank, 0):
            before = flat(net)
            ranks.weigh(weight)
            optimizer.zero_grad()
            torch.autograd.backward(net(torch.ones(1, 4) + world().rank).square().mean())
            optimizer.step()
            everyone = world().allgather([flat(net).tolist(), weight])
            assert everyone[0][0] == everyone[1][0], weight
            assert before.equal(flat(net)) == (everyone[0][1] == 0)


def clipped_with_others() -> None:
    """Parameters that no optimizer has count in the norm: of their mean on all ranks."""
    net = model()
    optimizer = torch.optim.SGD(list(net.children())[-1].parameters(), 0.1)
    with dlio.distribute(net, optimizer) as ranks:
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(net(torch.ones(1, 4) + world().rank).square().mean())
            ranks.take_assigned()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
            optimizer.step()
            everyone = world().allgather([norm, *flat(net).tolist()])
            assert everyone[0] == everyone[1]


def main() -> None:
    assert world().size == 2
    without_samples()
    clipped_with_others()
    added_to_means(False)
    added_to_means(True)
    near = torch.testing.assert_close
    for count in (25, 26, 27, 1):
        for accumulated, options in (
            (1, {}),
            (1, {"exchange": "local-sgd(1)"}),
            (2, {}),
            (2, {"holds": True}),
            (1, {"ahead": True, "workers": 2}),
            (1, {"tiers": "ram:8MiB"}),
        ):
            got = together(count, accumulated, False, **options)
            wanted = alone(count, accumulated, False)
            near(got, wanted, rtol=0, atol=1e-5, msg=f"{count} {accumulated} {options}")
    for count in (25, 27, 31):
        for weighs, in_place, exchange in (
            *((False, False, "allreduce"), (False, True, "allreduce"), (True, False, "allreduce")),
            *((True, True, "allreduce"), (False, False, "local-sgd(1)")),
        ):
            wanted = alone(count, 2, False)
            got = assigned(count, weighs, in_place, exchange)
            near(got, wanted, rtol=0, atol=1e-5, msg=f"{count} {weighs} {in_place} {exchange}")
    # Two samples, and three, are on one rank: its statistics are one process's.
    for count in (10, 11):
        net, (x, y) = model(True), data(count).tensors
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loader = dlio.DataLoader(data(count), BATCH, seed=1)
        loader.skip_first_batches(1)
        with dlio.distribute(net, optimizer):
            for inputs, targets in loader:
                torch.autograd.backward(nn.functional.mse_loss(net(inputs), targets))
        reference = model(True)
        torch.autograd.backward(nn.functional.mse_loss(reference(x[8:]), y[8:]))
        for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            near(mine.grad, theirs.grad, rtol=0, atol=1e-5)
    for joins in (list, lambda each: (each, list(range(len(each)))), lambda each: (each, each)):
        near(of_boxes(joins), of_boxes(None), rtol=0, atol=1e-5)
    near(weighed_by_hand(), alone(27, 1, False), rtol=0, atol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Checks of batch normalisation over ranks, on any number of them."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dlio.comm import world
from dlio.exchange.buckets import averaged_state, broadcast_state
from dlio.features.batch_norm.batch_norm_feature import BatchNormOptions
from dlio.features.batch_norm.sync_batch_norm import LocalHooks, SyncHooks, statistics_of
from dlio.plan.order import share
from dlio.train.rank_layout import RankLayout
from tests.exchange.training import identical, started, train_step

SIDE = 6


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(4 * (SIDE - 2) ** 2, 10),
        nn.BatchNorm1d(10, track_running_stats=False),
        nn.Linear(10, 5),
    )


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    # Channels of other means: what ranks normalise by matters.
    inputs = torch.randn(count, 3, SIDE, SIDE, generator=generator) + torch.arange(count).view(
        -1, 1, 1, 1
    )
    return inputs, torch.randint(0, 5, (count,), generator=generator)


def check_synchronised() -> None:
    """Training on shares of batches, also uneven and empty ones, equals training on the batches."""
    comm = world()
    net, whole = make_net(), make_net()
    broadcast_state(net, comm)
    names = set(net.state_dict())
    run: Any = SimpleNamespace(model=net, layout=RankLayout(comm))
    norms = SyncHooks(BatchNormOptions("sync"), run)
    assert norms.together == (comm.size > 1)
    assert set(net.state_dict()) == names
    exchange = started("allreduce", net, comm)
    mine_sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    its_sgd = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for step, planned in enumerate([8, 8, 7, 2, 8, 5, 8]):
        inputs, labels = samples(step, planned)
        part = share(planned, comm.size, comm.rank)
        if len(part) or not norms.together:
            train_step(net, exchange, mine_sgd, inputs[part], labels[part], planned, comm.size)
        else:
            exchange.before_backward(0, planned)
            mine_sgd.zero_grad(set_to_none=True)
            none = nn.functional.cross_entropy(net(inputs[:0]), labels[:0], reduction="sum")
            none.div(planned / comm.size).backward()  # type: ignore[no-untyped-call]
            exchange.before_step()
            mine_sgd.step()
            exchange.after_step()
        its_sgd.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]
        its_sgd.step()
        for name, value in whole.state_dict().items():
            away = float((net.state_dict()[name].double() - value.double()).abs().max())
            assert away < 1e-5, f"step {step}: {name} differs by {away}"
    assert identical(net, comm)
    exchange.close()
    inputs, _ = samples(99, 4)
    assert torch.allclose(net.eval()(inputs), whole.eval()(inputs), atol=1e-4)
    twin = copy.deepcopy(net)
    assert torch.equal(twin.eval()(inputs), net(inputs))
    norms.close()


def check_modes() -> None:
    """Running statistics are the mean over ranks, or rank 0's."""
    comm = world()
    net = make_net()
    run: Any = SimpleNamespace(model=net, layout=RankLayout(comm))
    net(torch.randn(4, 3, SIDE, SIDE) + comm.rank)
    own = {name: net.state_dict()[name].clone() for name in statistics_of(net)}
    everyone = comm.allgather({name: value.tolist() for name, value in own.items()})
    for mode in ("average", "local"):
        state = averaged_state(net, comm)
        if mode == "local":
            LocalHooks(BatchNormOptions("local"), run).averaged(net, state, comm)
        for name in own:
            values = torch.tensor([each[name] for each in everyone], dtype=torch.float64)
            wanted = values[0] if mode == "local" else values.mean(0)
            assert torch.allclose(state[name].double(), wanted, atol=1e-6), (mode, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_synchronised()
    check_modes()
    print("kept", flush=True)

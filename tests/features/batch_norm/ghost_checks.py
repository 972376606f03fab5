"""Checks of `--batch-norm ghost`, on any number of ranks."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dlio.comm import world
from dlio.exchange.buckets import broadcast_state
from dlio.features.batch_norm.batch_norm_feature import BatchNormOptions
from dlio.features.batch_norm.ghost_batches import GhostHooks
from dlio.plan.order import share
from dlio.train.config import train_config
from dlio.train.rank_layout import RankLayout
from tests.features.batch_norm.batch_norm_checks import samples

GROUP = 4
GLOBAL_BATCH = 24


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, affine=False, momentum=None), nn.Flatten()),
        *(nn.Linear(64, 10), nn.BatchNorm1d(10), nn.Linear(10, 5)),
    )


def trained(planned: list[int]) -> nn.Module:
    """Train on this rank's parts of global batches of so many samples."""
    comm = world()
    net = make_net()
    broadcast_state(net, comm)
    unused = nn.Parameter(torch.ones(3))
    net.register_parameter("unused", unused)
    config = train_config("data", batch_size=GLOBAL_BATCH // comm.size, seed=5)
    layout = RankLayout(comm)
    run: Any = SimpleNamespace(model=net, layout=layout, config=config, is_found=True)
    ghosts = GhostHooks(BatchNormOptions(f"ghost({GROUP})"), run)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for step, count in enumerate(planned):
        inputs, labels = samples(step, count)
        place = share(count, comm.size, comm.rank)
        inputs, labels = inputs[place.start : place.stop], labels[place.start : place.stop]
        run.epoch_number, run.position = 0, 100 * step
        for part in ghosts.groups(len(place), count):
            ghosts.begin_group(run, part, count)
            loss = nn.functional.cross_entropy(net(inputs[part]), labels[part], reduction="sum")
            torch.autograd.backward(loss / count)
            ghosts.end_group(part.stop - part.start)
        ghosts.before_step(count)
        assert unused.grad is None
        sgd.step()
        sgd.zero_grad()
    assert torch.equal(unused.detach(), torch.ones(3))
    ghosts.close()
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Full batches, and smaller ones that the groups do not divide.
    state = trained([24, 24, 17, 9, 24, 3, 24]).state_dict()
    flat = torch.cat([value.double().reshape(-1) for value in state.values()])
    everyone = world().allgather(flat.numpy().tobytes().hex())
    assert len(set(everyone)) == 1
    if world().rank == 0:
        print(everyone[0], flush=True)

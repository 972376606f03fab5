"""Gossip between nodes of several ranks, and merging weights before they are used."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from dlio.exchange.buckets import trainable
from dlio.exchange.gossip import join_before_use

MpiRun = Callable[..., subprocess.CompletedProcess[str]]
BODY = Path(__file__).with_name("node_gossip_checks.py")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "nodes", "checks"),
    [
        (4, 2, ("oracle", "flat", "late", "unfinished", "again")),
        (5, 3, ("oracle", "nodes")),
        # In all variants: those of three nodes are four.
        (4, 2, ("nodes",)),
    ],
)
@pytest.mark.daily("4-2-checks0")
def test_nodes_of_several_ranks_gossip_as_one(
    mpirun: MpiRun, ranks: int, nodes: int, checks: tuple[str, ...]
) -> None:
    done = mpirun(ranks, "-W", "error", str(BODY), str(nodes), *checks)
    assert done.returncode == 0, done.stderr
    for check in checks:
        assert done.stdout.splitlines().count(f"kept {check}") == ranks


def test_weights_are_merged_before_they_are_read() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 1))
    groups = [[each] for each in trainable(model)]
    joined: list[int] = []

    def join(numbers: Sequence[int]) -> None:
        joined.extend(numbers)

    hooks = join_before_use(model.modules(), groups, join)
    x = torch.ones(1, 8)
    attention = model[1]
    assert isinstance(attention, nn.MultiheadAttention)
    hidden = model[0](x)
    assert joined == [0, 1]
    # Also the output layer, whose weights attention reads without calling it.
    attention(hidden, hidden, hidden)
    assert joined == [0, 1, 2, 3, 4, 5]
    model[2](hidden)
    assert joined == list(range(8))
    for hook in hooks:
        hook.remove()
    model[0](x)
    assert len(joined) == 8

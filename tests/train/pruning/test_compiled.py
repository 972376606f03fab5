"""Pruning of models that torch.compile has compiled, and of those in torch's wrappers."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import dlio
from dlio.errors import UsageError
from tests.train.pruning.apoptosis_checks import SCHEDULE, digest, make_net, probe, samples, train

EXAMPLE = samples(0, 2)[0]


class Counting(nn.Module):
    """Counts the calls that are not of a compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x


def pruned(net: nn.Module, called: nn.Module) -> dlio.Apoptosis:
    """Train and prune `net` by calling `called`; return the Apoptosis, which is closed."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with dlio.Apoptosis(
        called, optimizer, example=EXAMPLE, probe=probe, steps=60, schedule=SCHEDULE
    ) as apoptosis:
        train(called, optimizer, apoptosis, range(60), 0)
    return apoptosis


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest keeps the records of this log, which refer to the parameters.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Of dynamo itself.
@pytest.mark.parametrize("kind", ["whole", "part"])
def test_a_compiled_model_is_pruned_as_a_plain_one(kind: str) -> None:
    plain = make_net()
    expected = pruned(plain, plain)
    counting = Counting()
    net: Any = nn.Sequential(counting, *make_net().children())
    called = net
    if kind == "whole":
        called = torch.compile(net, backend="aot_eager")
    else:
        net[3] = torch.compile(net[3], backend="aot_eager")
    apoptosis = pruned(net, called)
    assert digest(net) == digest(plain)
    assert [e.parameters for e in apoptosis.rounds] == [e.parameters for e in expected.rounds]
    cuts = sum(bool(each.removed) for each in apoptosis.rounds)
    assert cuts > 1
    assert counters["frames"]["ok"] >= cuts
    if kind == "whole":
        assert counting.calls == apoptosis.overhead()["steps"] < 60  # Sampled steps alone.


def test_torchs_wrappers_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(make_net())
        several: list[Any] = [net, torch.compile(net, backend="eager"), nn.Sequential(net)]
        for wrapped in several:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with pytest.raises(UsageError, match=r"DistributedDataParallel: .*dlio\.distribute"):
                dlio.Apoptosis(wrapped, optimizer, example=EXAMPLE)
    finally:
        dist.destroy_process_group()

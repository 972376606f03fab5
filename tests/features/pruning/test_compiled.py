"""Pruning of models that torch.compile has compiled, and of those in torch's wrappers."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import dlio
from dlio.errors import DlioError, UsageError
from tests.features.pruning.apoptosis_checks import (
    SCHEDULE,
    digest,
    make_net,
    probe,
    samples,
    shapes,
    train,
)

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
@pytest.mark.nightly  # By day, the test below compiles and prunes in DDP.
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


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_in_torchs_ddp_is_pruned_as_a_plain_one() -> None:
    plain, net = make_net(), make_net()
    expected = pruned(plain, plain)
    called: Any = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    apoptosis = pruned(net, called)
    assert digest(net) == digest(plain)
    assert [e.parameters for e in apoptosis.rounds] == [e.parameters for e in expected.rounds]
    assert shapes(net) != shapes(make_net())


@pytest.mark.usefixtures("_group")
def test_a_saved_layout_is_applied_within_torchs_ddp() -> None:
    net = make_net()
    apoptosis = pruned(net, DistributedDataParallel(net))
    again = make_net()
    ddp = DistributedDataParallel(again)
    optimizer = torch.optim.Adam(again.parameters(), lr=1e-2)
    with dlio.Apoptosis(ddp, optimizer, example=EXAMPLE) as resumed:
        resumed.take_layout(apoptosis.layout)
        again.load_state_dict(net.state_dict())
        resumed.load_state_dict(apoptosis.state_dict())
        train(ddp, optimizer, None, range(1), 0)
    assert shapes(again) == shapes(net) != shapes(make_net())
    assert all(parameter.grad is not None for parameter in again.parameters())


@pytest.mark.usefixtures("_group")
def test_what_ddp_cannot_take_along_is_refused() -> None:
    def refused(said: str, wrapped: nn.Module, **more: Any) -> None:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=said):
            dlio.Apoptosis(wrapped, optimizer, example=EXAMPLE, **more)

    ddp = DistributedDataParallel(make_net())
    inner: Any = nn.Sequential(ddp)
    refused("a part of a model in torch's DistributedDataParallel", inner)
    with dlio.distribute(make_net(), torch.optim.SGD(make_net().parameters())) as exchange:
        refused("would sum the gradients", ddp, exchange=exchange)
    other = DistributedDataParallel(make_net(), process_group=dist.new_group([0]))
    refused("without process_group", other)
    low = _MixedPrecision(param_dtype=torch.bfloat16)
    refused("mixed_precision", DistributedDataParallel(make_net(), mixed_precision=low))
    ddp.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    refused("powerSGD_hook", ddp)
    built_in = DistributedDataParallel(make_net())
    register: Any = built_in._register_builtin_comm_hook
    register(_c10d.BuiltinCommHookType.FP16_COMPRESS)
    refused("communication hook", built_in)


@pytest.mark.usefixtures("_group")
def test_ddp_trains_on_after_a_cut_that_failed() -> None:
    net = make_net()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with dlio.Apoptosis(
        ddp, optimizer, example=EXAMPLE, probe=probe, steps=60, schedule=SCHEDULE
    ) as apoptosis:
        train(ddp, optimizer, apoptosis, range(7), 0)
        for state in optimizer.state.values():
            state["rows"] = [torch.zeros(3)]
        with pytest.raises(DlioError, match="cannot be cut with it"):
            train(ddp, optimizer, apoptosis, range(7, 60), 0)
        train(ddp, optimizer, None, range(2), 0)
    assert shapes(net) == shapes(make_net())

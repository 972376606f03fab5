"""Sums in a device's memory: ranks with CPU tensors by gloo, and stand-ins for streams."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from dlio.comm.single import SingleCommunicator
from dlio.errors import CommTimeout
from dlio.exchange import ExchangeContext, buffer_placement, nccl, parse_exchange
from dlio.exchange.buckets import Bucket
from dlio.exchange.buffer_placement import BufferPlacement, find_path
from dlio.exchange.nccl import DeviceGroup, NcclSum
from dlio.exchange.sums import AllreduceSum, PinnedSum
from dlio.exchange.synchronous_sgd import SynchronousSgd
from dlio.util.settings import DEVICE_EXCHANGE
from tests.conftest import TorchRun

BODY = Path(__file__).with_name("nccl_checks.py")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "checks"),
    [(2, ("sums", "mixed", "others", "reshaped")), (3, ("sums",)), (4, ("sums",))],
)
@pytest.mark.daily("2-checks0")
def test_sums_of_a_device_train_as_those_of_the_host(
    torchrun: TorchRun, ranks: int, checks: tuple[str, ...]
) -> None:
    for said in torchrun(ranks, str(BODY), *checks):
        assert said.splitlines() == [f"kept {check}" for check in checks]


def test_a_lost_rank_is_an_error_long_before_the_deadline(
    torchrun: TorchRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TIMEOUT", "60")
    assert torchrun(2, str(BODY), "lost") == ["kept lost\n", ""]


@pytest.fixture
def alone() -> Iterator[DeviceGroup]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = DeviceGroup(SingleCommunicator(), CPU)
    yield group
    group.close()
    dist.destroy_process_group()


class _Stuck:
    def is_completed(self) -> bool:
        return False


def test_a_sum_that_does_not_end_is_an_error_of_the_next_launch(alone: DeviceGroup) -> None:
    alone.sum(torch.ones(3), "a sum").wait()
    stuck: Any = _Stuck()
    alone._launched.append((time.monotonic(), "the sum of a bucket", stuck))
    alone.sum(torch.ones(3), "a sum").wait()
    early = time.monotonic() - timedelta(hours=1).total_seconds()
    alone._launched[0] = (early, "the sum of a bucket", stuck)
    with pytest.raises(CommTimeout, match="the sum of a bucket failed by gloo: another rank is st"):
        alone.sum(torch.ones(3), "a sum")


def test_a_sum_of_one_rank_is_its_values(alone: DeviceGroup) -> None:
    total = NcclSum(alone)
    for seed in range(3):
        values = torch.randn(36000, generator=torch.Generator().manual_seed(seed))
        region = values.clone()
        total.start(region)
        total.begin()
        total.wait()
        assert torch.equal(region, values)
    assert total.state() == {}
    total.close()


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log


class _Event:
    """An event of a device that carries out its work when the test says so."""

    now_ms = 0.0
    reached_ms = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_ms = 0.0

    def record(self, stream: _Stream) -> None:
        self.at_ms = self.now_ms

    def query(self) -> bool:
        return self.at_ms <= _Event.reached_ms

    def elapsed_time(self, other: "_Event") -> float:
        return other.at_ms - self.at_ms


class _Cuda:
    """Stand-in for the stream calls of `torch.cuda`."""

    Event = _Event

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream("training", [])


class _Launched:
    def wait(self) -> None:
        pass


def test_waits_of_the_device_are_counted_once_it_has_come_to_their_end(
    monkeypatch: pytest.MonkeyPatch, alone: DeviceGroup
) -> None:
    monkeypatch.setattr(nccl, "_cuda", _Cuda())
    monkeypatch.setattr(alone, "device", torch.device("cuda", 0))
    monkeypatch.setattr(_Event, "reached_ms", 0.0)
    for began, ended in ((1000.0, 1500.0), (2000.0, 4000.0)):
        monkeypatch.setattr(_Event, "now_ms", began)
        launched: Any = _Launched()
        monkeypatch.setattr(
            launched, "wait", lambda ended=ended: monkeypatch.setattr(_Event, "now_ms", ended)
        )
        alone.wait(launched, "a sum")
    assert alone.waited_s == 0.0
    monkeypatch.setattr(_Event, "reached_ms", 1999.0)
    assert alone.waited_s == 0.5
    monkeypatch.setattr(_Event, "reached_ms", 4000.0)
    assert alone.waited_s == 2.5


class _Two(SingleCommunicator):
    """Rank 0 of two, the other of which has a path of its own."""

    size = 2

    def __init__(self, other: str | None = None) -> None:
        self._other = other

    def allgather(self, value: Any) -> list[Any]:
        return [value, value if self._other is None else self._other]


def test_a_group_of_other_ranks_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, alone: DeviceGroup
) -> None:
    monkeypatch.setenv(DEVICE_EXCHANGE, "1")
    assert find_path([CPU], parse_exchange("allreduce"), _Two()) == "host"


@pytest.mark.parametrize(
    ("exchange", "group", "other", "survives", "path", "why"),
    [
        ("allreduce", "nccl", None, False, "nccl", ""),
        (
            "allreduce",
            "nccl",
            None,
            True,
            "pinned",
            ", because NCCL does not go on without lost ranks",
        ),
        ("allreduce", "", None, False, "pinned", ", because torch.distributed has no NCCL group"),
        ("asgd", "nccl", None, False, "pinned", ", because only allreduce without a compressor g"),
        ("gossip", "nccl", None, False, "pinned", ", because only allreduce without a compressor"),
        ("allreduce+int8", "nccl", None, False, "pinned", ", because only allreduce without a co"),
        (
            "allreduce",
            "nccl",
            "host",
            False,
            "pinned",
            ", because the ranks have different ones: h",
        ),
    ],
)
def test_the_log_names_the_path_of_a_gpu_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exchange: str,
    group: str,
    other: str | None,
    survives: bool,
    path: str,
    why: str,
) -> None:
    monkeypatch.setattr(buffer_placement, "_backend", lambda devices, comm: group)
    gpu = [torch.device("cuda", 0)]
    with caplog.at_level("INFO", "dlio"):
        assert find_path(gpu, parse_exchange(exchange), _Two(other), survives) == path
    (line,) = caplog.messages
    assert line.startswith(f"exchange {exchange}: path {path}{why}")
    assert bool(why) or line.endswith(path)


def test_whoever_asks_for_nccl_is_warned_of_an_exchange_that_passes_through_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DLIO_NCCL", "1")
    monkeypatch.setattr(buffer_placement, "_backend", lambda devices, comm: "nccl")
    gpu = [torch.device("cuda", 0)]
    for exchange in ("allreduce", "gossip"):
        find_path(gpu, parse_exchange(exchange), _Two())
    assert caplog.messages == [
        "exchange gossip: path pinned, because only allreduce without a compressor goes by NCCL"
    ]


def test_ranks_that_share_a_gpu_do_not_use_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(buffer_placement, "_backend", lambda devices, comm: "nccl")
    monkeypatch.setattr(buffer_placement, "_gpu", lambda devices: "GPU-7")
    with caplog.at_level("INFO", "dlio"):
        path = find_path([torch.device("cuda", 0)], parse_exchange("allreduce"), _Two())
    assert path == "pinned"
    assert caplog.messages == ["exchange allreduce: path pinned, because ranks share a GPU"]


class _Slow:
    """Copies and sums that take fake seconds: 5 until this rank's device is done, then 2."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        host.copy_(device)

    def arrived(self) -> bool:
        return False

    def await_host(self) -> None:
        self.now_s += 5.0

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.now_s += 2.0
        device.copy_(host)


def test_the_work_of_the_own_device_is_not_a_wait_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise `--balance` takes a GPU, which computes while the host waits, for free of cost."""
    slow = _Slow()

    def make_sum(_: BufferPlacement, bucket: Bucket, extra: int, tag: int) -> PinnedSum:
        return PinnedSum(AllreduceSum(_Two()), slow, torch.zeros_like(bucket.flat))

    monkeypatch.setattr(BufferPlacement, "make_sum", make_sum)
    monkeypatch.setattr(time, "perf_counter", lambda: slow.now_s)
    model = nn.Linear(2, 2)
    exchange = SynchronousSgd(
        list(model.named_parameters()),
        ExchangeContext(parse_exchange("allreduce"), _Two(), np.zeros(2, np.int32)),
    )
    model(torch.ones(1, 2)).sum().backward()
    exchange.before_step()
    assert slow.now_s == 107.0
    assert exchange.statistics()["wait_s"] == 2.0
    exchange.close()

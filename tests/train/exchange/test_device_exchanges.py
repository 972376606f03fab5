"""Exchanges in a device's memory: ranks with CPU tensors by gloo, and stand-ins for streams."""

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
from dlio.exchange import ExchangeContext, buffer_placement, parse_exchange
from dlio.exchange.buckets import Bucket
from dlio.exchange.buffer_placement import BufferPlacement, find_path
from dlio.exchange.nccl import side_stream as side_module
from dlio.exchange.nccl.device_group import DeviceGroup, Flight
from dlio.exchange.nccl.group_paths import GroupMemory, group_path
from dlio.exchange.nccl.side_stream import SideStream, StreamWaits
from dlio.exchange.paths import PinnedPath
from dlio.exchange.sums import AllreduceSum
from dlio.exchange.synchronous_sgd import SynchronousSgd
from dlio.util.settings import DEVICE_EXCHANGE
from tests.conftest import TorchRun

BODY = Path(__file__).with_name("device_checks.py")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ("few", "distances", "mixed", "infinite")),
        (2, ("exact", "routes", "signs", "resumed", "reshaped")),
        (3, ("exact", "routes", "signs", "infinite")),
        (4, ("exact", "routes", "distances", "resumed")),
    ],
)
@pytest.mark.daily("2-checks0")
def test_exchanges_of_a_device_train_as_those_of_the_host(
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


def test_a_transfer_that_does_not_end_is_an_error_of_the_next_launch(alone: DeviceGroup) -> None:
    alone.sum(torch.ones(3), "a sum").wait()
    stuck: Any = _Stuck()
    flight = Flight(alone, [stuck], "weights of rank 7")
    alone._flights.append(flight)
    alone.sum(torch.ones(3), "a sum").wait()
    flight.launched -= timedelta(hours=1).total_seconds()
    with pytest.raises(CommTimeout, match="weights of rank 7 failed by gloo: another rank is stop"):
        alone.sum(torch.ones(3), "a sum")


@pytest.mark.parametrize("name", ["allreduce", "tree", "allreduce+int8", "allreduce+threshold"])
def test_a_sum_of_one_rank_and_its_residual_are_its_values(alone: DeviceGroup, name: str) -> None:
    weight = nn.Parameter(torch.zeros(40, 900))
    bucket = Bucket([("weight", weight)], 0, CPU)
    setting = ExchangeContext(parse_exchange(name), SingleCommunicator(), np.zeros(1, np.int32))
    path = group_path(bucket, setting, GroupMemory.of(alone))
    owed = torch.zeros(bucket.flat.numel())
    for seed in range(3):
        values = torch.randn(bucket.flat.shape, generator=torch.Generator().manual_seed(seed))
        bucket.flat.copy_(values)
        path.start()
        path.begin()
        path.wait()
        left = path.state().get("owed", torch.zeros_like(owed))
        assert torch.equal((bucket.flat + left), values + owed)
        owed = left.clone()
    assert ("+" in name) == bool(owed.any())
    path.close()


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "_Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"


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

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> _Stream:  # noqa: N802
        return _Stream("side", self.log)

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream("training", self.log)

    def stream(self, stream: _Stream) -> Any:
        log = self.log

        class _Entered:
            def __enter__(self) -> None:
                log.append(f"enter {stream.name}")

            def __exit__(self, *_: object) -> None:
                log.append("leave")

        return _Entered()


def test_the_side_stream_runs_between_what_the_training_wrote_and_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = _Cuda()
    monkeypatch.setattr(side_module, "_cuda", cuda)
    side = SideStream(torch.device("cuda", 0))
    with side.after_current():
        cuda.log.append("work")
    side.join(side.mark())
    assert cuda.log == [
        *("side waits for training", "enter side", "work", "leave", "side records"),
        "training waits for event of side",
    ]


def test_waits_of_the_device_are_counted_once_it_has_come_to_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_module, "_cuda", _Cuda())
    waits = StreamWaits(torch.device("cuda", 0))
    monkeypatch.setattr(_Event, "reached_ms", 0.0)
    for began, ended in ((1000.0, 1500.0), (2000.0, 4000.0)):
        monkeypatch.setattr(_Event, "now_ms", began)
        with waits.timed():
            monkeypatch.setattr(_Event, "now_ms", ended)
    assert waits.seconds == 0.0
    monkeypatch.setattr(_Event, "reached_ms", 1999.0)
    assert waits.seconds == 0.5
    monkeypatch.setattr(_Event, "reached_ms", 4000.0)
    assert waits.seconds == 2.5


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
    assert find_path([CPU], parse_exchange("gossip"), _Two()) == "host"


@pytest.mark.parametrize(
    ("exchange", "group", "other", "survives", "path", "why"),
    [
        ("gossip", "nccl", None, False, "nccl", ""),
        (
            "gossip",
            "nccl",
            None,
            True,
            "pinned",
            ", because NCCL does not go on without lost ranks",
        ),
        ("gossip", "", None, False, "pinned", ", because torch.distributed has no NCCL group"),
        ("asgd", "nccl", None, False, "pinned", ", because asgd sends without the receiver's know"),
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

    def path_of(_: BufferPlacement, bucket: Bucket, extra: int, tag: int) -> PinnedPath:
        return PinnedPath(bucket, AllreduceSum(_Two()), slow, torch.zeros_like(bucket.flat))

    monkeypatch.setattr(BufferPlacement, "path_of", path_of)
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

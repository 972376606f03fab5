"""Paths of gradients from their device to the sum and back, with fakes of a GPU's streams."""

from typing import Any, TypeVar

import numpy.typing as npt
import pytest
import torch
from torch import nn

from dlio.comm import Op, Request
from dlio.comm.devices import supports_device_buffers
from dlio.comm.single import SingleCommunicator
from dlio.exchange import backward_end, parse_exchange, synchronous_sgd
from dlio.exchange.backward_end import after_backward
from dlio.exchange.buckets import Bucket
from dlio.exchange.buffer_placement import agreed, choose, find_path
from dlio.exchange.sums import PinnedSum, Sum
from tests.exchange.training import started

_T = TypeVar("_T")
CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("devices", "exchange", "group", "mpi", "path"),
    [
        ([CPU, CPU], "allreduce", "", True, "host"),
        ([CPU, CPU], "allreduce", "gloo", True, "gloo"),
        ([CPU, CPU], "gossip", "gloo", True, "host"),
        ([GPU, CPU], "allreduce", "nccl", True, "host"),
        ([GPU, OTHER], "allreduce", "nccl", True, "host"),
        ([], "allreduce", "nccl", True, "host"),
        ([GPU, GPU], "allreduce", "nccl", True, "nccl"),
        ([GPU], "allreduce+onebit", "nccl", True, "pinned"),
        ([GPU], "diloco(4,fragments=2)+int8", "nccl", False, "pinned"),
        ([GPU], "tree", "nccl", False, "pinned"),
        ([GPU], "gossip", "nccl", False, "pinned"),
        ([GPU], "asgd", "nccl", True, "pinned"),
        ([GPU], "allreduce", "", True, "mpi"),
        ([GPU], "allreduce", "", False, "pinned"),
        ([GPU], "allreduce+int8", "", True, "pinned"),
        ([GPU], "local-sgd(2)", "", True, "pinned"),
        ([CPU], "asgd", "gloo", True, "host"),
    ],
)
def test_the_path_follows_from_the_parameters_device_the_exchange_and_the_library(
    devices: list[torch.device], exchange: str, group: str, mpi: bool, path: str
) -> None:
    assert choose(devices, parse_exchange(exchange), group, mpi) == path


def test_ranks_with_different_paths_sum_on_the_host() -> None:
    assert agreed(["nccl", "nccl"]) is None
    assert agreed(["nccl", "host"]) == "pinned"
    assert agreed(["mpi", "pinned"]) == "pinned"
    assert find_path([CPU], parse_exchange("allreduce"), SingleCommunicator()) == "host"


@pytest.mark.parametrize(
    ("override", "library", "kinds", "asked", "takes"),
    [
        (None, "Open MPI v5.0.11", "", True, False),
        (None, "Open MPI v6.0", "mpi,system,cuda", True, False),
        (True, "Open MPI v5.0.11", "", False, True),
        (False, "MPICH Version: 4.3", "cuda", True, False),
        (None, "MPICH Version: 4.3", "mpi,system,cuda:device", False, True),
        (None, "MVAPICH 4", "", True, True),
        (None, "MPICH Version: 4.1", "mpi,system", False, False),
    ],
)
def test_mpi_reads_gpu_memory_only_where_it_can_sum_it(
    override: bool | None, library: str, kinds: str, asked: bool, takes: bool
) -> None:
    assert supports_device_buffers(override, library, kinds, lambda: asked) is takes


class _Copies:
    """Copies that complete when the test says so."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.there = False
        self._pair = (torch.empty(0), torch.empty(0))

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.log.append("to host")
        self.there = False
        self._pair = (host, device)

    def arrived(self) -> bool:
        if self.there:
            self._pair[0].copy_(self._pair[1])
        return self.there

    def await_host(self) -> None:
        self.log.append("awaited")
        self.there = True
        self.arrived()

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.log.append("to device")
        device.copy_(host)


class _Doubles(Sum):
    """A sum with a rank that has the same values."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def start(self, region: torch.Tensor) -> None:
        self.log.append(f"sent {region.tolist()}")
        self._region = region

    def advance(self) -> bool:
        self.log.append("advanced")
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        self.log.append("summed")
        self._region *= 2

    def close(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize("arrives_early", [True, False])
def test_pinned_memory_is_sent_after_its_copy_and_copied_back_after_the_sum(
    arrives_early: bool,
) -> None:
    log: list[str] = []
    copies = _Copies(log)
    bucket = Bucket([("a", nn.Parameter(torch.zeros(2)))], extra=1)
    path = PinnedSum(_Doubles(log), copies, torch.zeros(3))
    for turn in (1.0, 2.0):
        log.clear()
        bucket.flat.fill_(turn)
        path.start(bucket.flat)
        path.advance()
        assert not path.begun
        assert log == ["to host"]
        if arrives_early:
            copies.there = True
            path.advance()
            assert path.begun
            assert path.advance()
        path.begin()
        path.begin()
        path.wait()
        sent = f"sent {[turn] * 3}"
        between = [sent, "advanced"] if arrives_early else ["awaited", sent]
        assert log == ["to host", *between, "summed", "to device"]
        assert bucket.flat.tolist() == [2 * turn] * 3
    path.close()
    assert log[-1] == "closed"


class _Twin(SingleCommunicator):
    """Two ranks that have the same values."""

    size = 2

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def allgather(self, value: _T) -> list[_T]:
        return [value, value]

    def dup(self) -> "_Twin":
        return self

    def iallreduce(self, array: npt.NDArray[Any], op: Op = "sum") -> Request:
        self.log.append("sent")
        array *= 2
        return super().iallreduce(array)


def test_a_thread_that_may_not_send_leaves_sending_to_the_one_that_waits_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    in_autograd = True
    monkeypatch.setattr(synchronous_sgd, "sends_after_backward", lambda _: True)
    monkeypatch.setattr(synchronous_sgd, "is_foreign_thread", lambda: in_autograd)
    model = nn.Linear(2, 1)
    before = torch.autograd.backward
    exchange = started("allreduce", model, _Twin(log), seed=0)

    def returned() -> None:
        nonlocal in_autograd
        assert log == []
        in_autograd = False

    end = after_backward(returned)
    # Tasks run in the order of their submission: this one before that of the exchange.
    backward_end._listeners.reverse()
    exchange.weigh(1.0)
    model(torch.ones(1, 2)).sum().backward()
    assert log == ["sent"]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    end()
    exchange.close()
    assert torch.autograd.backward is before

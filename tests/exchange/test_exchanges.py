"""Exchanges: the checks of `exchange_checks` on real ranks, and tests in one process."""

import runpy
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from dlio.comm import Communicator, Op, Request
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.exchange import NAMES, ExchangeContext, parse_exchange
from dlio.exchange.asgd import Asgd, _IncomingMessage
from dlio.exchange.buckets import BUCKET_BYTES, trainable
from dlio.testing import run_ranks
from tests.conftest import TorchRun
from tests.exchange.training import started
from tests.exchange.type_checks import CHECKS as TYPE_CHECKS

MpiRun = Callable[..., subprocess.CompletedProcess[str]]
_T = TypeVar("_T")
BODY = Path(__file__).with_name("exchange_checks.py")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, tuple("allreduce shares skipped mean half gossip assigned reached".split())),
        (3, ("allreduce", "shares", "mean", "gossip", "gossip_trains")),
        (4, ("gossip",)),
        (
            2,
            tuple(
                "sums compressed_pairs gossips noloco distribute later parting parts types".split()
            ),
        ),
        (3, ("sums", "compressed", "noloco", "asgd", "distribute", "later", "assigned", "reached")),
        (4, ("sums", "gossips", "noloco", "noloco_trains", "asgd")),
        (4, ("noloco_of_differences", "differences_resume")),
        (3, ("noloco_of_differences",)),
        (2, ("compressed",)),
        (2, tuple(TYPE_CHECKS)),
        (3, tuple(TYPE_CHECKS)),
    ],
)
@pytest.mark.daily("2-checks0", "3-checks1", "2-checks3", "2-checks9")
def test_ranks_keep_the_promises(mpirun: MpiRun, ranks: int, checks: tuple[str, ...]) -> None:
    done = mpirun(ranks, "-W", "error", str(BODY), *checks)
    assert done.returncode == 0, done.stderr
    for check in checks:
        assert done.stdout.splitlines().count(f"kept {check}") == ranks


def test_ranks_of_torch_distributed_keep_the_promises_without_mpi(torchrun: TorchRun) -> None:
    checks = ("allreduce", "distribute", "parts", "presets")
    for said in torchrun(2, str(BODY), *checks):
        assert said.splitlines() == [f"kept {check}" for check in checks]


@pytest.mark.parametrize("check", ["allreduce", "mean", "half", "types"])
def test_one_process_keeps_the_promises(check: str) -> None:
    runpy.run_path(str(BODY))["CHECKS"][check](SingleCommunicator())


@pytest.mark.parametrize("name", NAMES)
def test_one_process_neither_copies_nor_communicates(name: str) -> None:
    model = nn.Linear(3, 2)
    exchange = started(name, model, SingleCommunicator(), seed=0)
    exchange.before_backward(1, 1)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = gradient.data_ptr(), gradient.clone()
    exchange.before_step()
    exchange.after_step()
    exchange.finish()
    assert model.weight.grad is gradient
    assert gradient.data_ptr() == before[0]
    assert torch.equal(gradient, before[1])
    counts = exchange.statistics()
    assert (counts["wait_s"], counts["messages"], counts["bytes"]) == (0, 0, 0)
    exchange.close()


def test_an_unknown_exchange_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="allreduce, hierarchical"):
        started("telepathy", nn.Linear(1, 1), SingleCommunicator(), seed=0)


class _Counting(SingleCommunicator):
    """Two ranks; all values of the other one are zero."""

    size = 2

    def __init__(self) -> None:
        self.started: list[int] = []

    def allgather(self, value: _T) -> list[_T]:
        return [value, value]

    def dup(self) -> "_Counting":
        return self

    def iallreduce(self, array: npt.NDArray[Any], op: Op = "sum") -> Request:
        self.started.append(len(array))
        return super().iallreduce(array)


def _two_buckets() -> nn.Sequential:
    side = int((BUCKET_BYTES / 4) ** 0.5)
    return nn.Sequential(nn.Linear(4, side), nn.Linear(side, side), nn.Linear(side, 1))


def test_reductions_start_during_backward() -> None:
    model, comm = _two_buckets(), _Counting()
    exchange = started("allreduce", model, comm, 0)
    started_at_first_layer: list[int] = []
    next(model.parameters()).register_hook(  # type: ignore[no-untyped-call]
        lambda _: started_at_first_layer.append(len(comm.started))
    )
    exchange.before_backward(1, 2)
    model(torch.ones(1, 4)).sum().backward()
    assert started_at_first_layer == [1]
    assert len(comm.started) == 2
    exchange.before_step()
    assert len(comm.started) == 2
    exchange.close()


def test_reductions_start_in_the_same_order_with_and_without_samples() -> None:
    orders = []
    for samples in (0, 1):
        model, comm = _two_buckets(), _Counting()
        exchange = started("allreduce", model, comm, 0)
        exchange.before_backward(samples, 1)
        if samples:
            model(torch.ones(1, 4)).sum().backward()
        exchange.before_step()
        # The other rank has none: a rank without samples gets the gradients of others alone.
        assert all((each.grad is not None) == bool(samples) for each in model.parameters())
        orders.append(comm.started)
        exchange.close()
    assert orders[0] == orders[1]


def _layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def test_fragments_are_exchanged_at_different_steps_of_a_period() -> None:
    model, comm = _layers(6), _Counting()
    exchange = started("local-sgd(6,fragments=3)", model, comm, 0)
    sent = []
    for _ in range(12):
        exchange.after_step()
        sent.append(sum(comm.started))
        comm.started.clear()
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert [step for step, count in enumerate(sent, 1) if count] == [2, 4, 6, 8, 10, 12]
    assert sum(sent[:6]) == sum(sent[6:]) == weights
    assert max(sent) < weights
    # Two of three fragments have changed since their last exchange.
    exchange.finish()
    assert sum(comm.started) == weights - sent[5]
    comm.started.clear()
    exchange.finish()
    assert comm.started == []
    exchange.close()


def test_fragments_of_a_checkpoint_go_on_where_they_were() -> None:
    comm = _Counting()
    exchange = started("diloco(6,fragments=3)", _layers(6), comm, 0)
    for _ in range(3):
        exchange.after_step()
    again = _Counting()
    resumed = started("diloco(6,fragments=3)", _layers(6), again, 0)
    resumed.load_state(exchange.state())
    comm.started.clear()
    for each in (exchange, resumed):
        each.after_step()
        each.finish()
        each.close()
    # The second fragment is due; of the first and the third, steps are left.
    assert again.started == comm.started
    assert sum(again.started) == sum(p.numel() for p in _layers(6).parameters())


def test_closing_removes_the_hooks() -> None:
    model, comm = _two_buckets(), _Counting()
    started("allreduce", model, comm, 0).close()
    model(torch.ones(1, 4)).sum().backward()
    assert comm.started == []


@pytest.mark.parametrize("samples", [1.0, 64.0])
@pytest.mark.parametrize("gradient", [3e38, 1e-30])
def test_sums_bear_the_gradients_that_one_process_bears(samples: float, gradient: float) -> None:
    """A gradient scaler skips a step where gradients overflow: not sooner on ranks."""
    means: dict[int, list[float]] = {}

    def step(comm: Communicator) -> None:
        net = nn.Linear(2, 1, bias=False)
        exchange = started("allreduce", net, comm, 0)
        exchange.weigh(samples)
        net(torch.tensor([[gradient, 1.0]])).sum().backward()
        exchange.before_step()
        assert net.weight.grad is not None
        means[comm.rank] = net.weight.grad[0].tolist()
        exchange.close()

    run_ranks(3, step)
    for each in means.values():
        assert each == pytest.approx([gradient, 1.0], rel=1e-6, abs=0)


class _Alone(SingleCommunicator):
    """One of two ranks, whose peer sends nothing."""

    size = 2

    def irecv(self, into: object, source: int, tag: int) -> Request:
        return _Never()

    def isend(self, data: object, dest: int, tag: int) -> Request:
        return _Never()


class _Gone:
    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


class _Never:
    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        return True


class _Deaf(_Alone):
    """One of four ranks, of which the first other one takes no message."""

    size = 4

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(range(1, 4), 0)

    def isend(self, data: object, dest: int, tag: int) -> Request:
        self.sent[dest] += tag == 2
        return _Never() if dest == 1 else _Gone()


def _setting() -> ExchangeContext:
    return ExchangeContext(parse_exchange("asgd"), _Alone(), np.zeros(2, np.int32))


def _message(weights: Sequence[float], sent_ns: int) -> _IncomingMessage:
    memory = np.array(weights, np.float32).view(np.uint8)
    carried = np.zeros(0, np.int64)
    return _IncomingMessage(_Never(), 1, 0, 0, memory, len(memory), sent_ns, carried)


@torch.no_grad()
def _move(exchange: Asgd, weight: torch.Tensor, to: Sequence[float], time_ns: int) -> None:
    weight.copy_(torch.tensor([to]))
    exchange._now.read()
    exchange._trail.note(time_ns, exchange._now.flat)


@torch.no_grad()
def test_asgd_refuses_weights_that_lie_far_behind() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.zero_()
    exchange = Asgd(trainable(model), _setting())
    exchange.before_step()
    now = time.time_ns() + 1
    _move(exchange, model.weight, [1.0, 0.0], now)
    ahead, behind = _message([3.0, 0.1], now), _message([-1.5, 0.0], now)
    assert exchange._merge([behind]) == [False]
    assert model.weight.tolist() == [[1.0, 0.0]]
    assert exchange._merge([ahead, behind]) == [True, False]
    assert model.weight[0].tolist() == pytest.approx([2.0, 0.05])
    counts = exchange.statistics()
    assert (counts["accepted"], counts["refused"]) == (1, 2)
    # A rank that has the same noise in another direction is accepted, and takes noise away.
    _move(exchange, model.weight, [2.0, 3.05], now + 1)
    assert exchange._merge([_message([5.0, 0.05], now + 1)]) == [True]
    assert model.weight[0].tolist() == pytest.approx([3.5, 1.55])


@torch.no_grad()
def test_asgd_takes_no_way_back_for_old_messages() -> None:
    """All ranks go the same way: weights of an earlier time are merged as if sent now."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.zero_()
    exchange = Asgd(trainable(model), _setting())
    exchange.before_step()
    began = time.time_ns()
    for step in range(1, 7):
        _move(exchange, model.weight, [float(step), 0.0], began + 10 * step)
    # Sent when this rank was at 4; the other had gone as far, and one to the side.
    assert exchange._merge([_message([4.0, 1.0], began + 45)]) == [True]
    assert model.weight[0].tolist() == pytest.approx([6.0, 0.5])
    # Older than this rank remembers: compared with the oldest weights that it knows, at 3.
    assert exchange._merge([_message([3.0, 2.0], began)]) == [True]
    # What the first merge corrected is not corrected again.
    assert model.weight[0].tolist() == pytest.approx([6.0, 1.25])


def test_asgd_sends_less_often_when_its_queue_is_full() -> None:
    model = nn.Linear(2, 1)
    exchange = Asgd(trainable(model), _setting())
    for _ in range(300):
        exchange.before_step()
        exchange.after_step()
    counts = exchange.statistics()
    assert counts["messages"] == 2  # A notice and weights to the only other rank, not complete.
    assert counts["interval"] == 64


def test_asgd_sends_on_next_to_a_rank_that_takes_nothing() -> None:
    model = nn.Linear(2, 1)
    comm = _Deaf()
    exchange = Asgd(
        trainable(model), ExchangeContext(parse_exchange("asgd"), comm, np.zeros(4, np.int32))
    )
    for _ in range(300):
        exchange.before_step()
        exchange.after_step()
    assert comm.sent[1] == 1
    assert comm.sent[2] + comm.sent[3] == 299
    assert exchange.statistics()["interval"] == 1

"""Shares by the measured speed of ranks (`--balance`)."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.features.balance.balance_feature import BalanceOptions
from dlio.features.balance.rank_balance import BalanceHooks
from dlio.plan.rank_shares import RankShares
from dlio.train.compute_device import Precision
from dlio.train.config import train_config
from dlio.train.step_clock import StepClock
from tests.train.test_command import SAMPLES, _consumed


class _Ranks(SingleCommunicator):
    """Rank 0 of two; the other one is simulated and takes three times as long."""

    size = 2

    def allgather(self, value: Any) -> list[Any]:
        return [value, [3 * part for part in value]]


class _Loader:
    shares: Sequence[int] | None = None


class _Task:
    """Notes the numbers of samples that are asked for; its losses draw."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.objective = SimpleNamespace(losses=self._losses)

    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(samples)
        return torch.randn(samples, 3, generator=generator), torch.zeros(samples, 1)

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean(1) * torch.rand(len(targets))


def _run() -> Any:
    cpu = torch.device("cpu")
    return SimpleNamespace(
        comm=_Ranks(),
        model=nn.Linear(3, 1),
        task=_Task(),
        device=cpu,
        precision=Precision("fp32", cpu),
        clock=StepClock(lambda: 0.0),
        loader=_Loader(),
        held_out=_Loader(),
        global_batch=64,
        shares=RankShares.even(32, 2),
    )


def test_calibrating_shares_by_speed_and_draws_nothing() -> None:
    run = _run()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    hooks = BalanceHooks(BalanceOptions(balance=True), run)
    hooks.begin(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(run.task.asked) == {16, 32}
    assert all(parameter.grad is None for parameter in run.model.parameters())
    shares = run.loader.shares
    assert sum(shares) == 64
    assert shares[0] > 40
    assert run.held_out.shares == shares


def test_measurements_of_all_ranks_set_the_shares_of_the_next_epoch() -> None:
    run = _run()
    hooks = BalanceHooks(BalanceOptions(balance=True), run)
    hooks.begin(run)
    run.clock.steps = [(32, 1.0)]
    fixed, per_sample = hooks.measure() or (0.0, 0.0)
    assert fixed + 32 * per_sample > 0.1
    # The other one has become the faster one.
    costs = [[0.0, 0.003], [0.0, 0.001]]
    everyone: Any = [{"features": {"balance": cost}} for cost in costs]
    hooks.compared(run, everyone, None)
    assert run.loader.shares == run.held_out.shares == [16, 48]


def test_one_rank_takes_all() -> None:
    run = _run()
    run.comm = SingleCommunicator()
    hooks = BalanceHooks(BalanceOptions(balance=True), run)
    hooks.begin(run)
    assert hooks.measure() is None
    hooks.compared(run, [], None)
    assert not run.task.asked
    assert run.loader.shares is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": "ring"}, "choose mode batch or global"),
        ({"replay": "t.jsonl"}, "--balance does not go with --replay"),
        ({"spares": 1, "fault_tolerance": "shrink"}, "--balance does not go with --spares"),
    ],
)
def test_options_that_balancing_does_not_go_with_are_refused(
    options: dict[str, Any], said: str
) -> None:
    train_config("pictures", shuffle="global", balance=True)
    with pytest.raises(UsageError, match=said):
        train_config("pictures", balance=True, **options)


@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["allreduce", "gossip"])
@pytest.mark.daily("allreduce")
def test_balanced_ranks_train_on_every_sample_once(
    dlio: Callable[..., subprocess.CompletedProcess[str]],
    pictures: Path,
    here: Path,
    exchange: str,
) -> None:
    files = ("--report", "r.json", "--trace", "t.jsonl")
    shape = ("--epochs", "2", "--batch-size", "10", "--image-size", "32", "--pretend-nodes", "2")
    options = ("--balance", "--exchange", exchange, "--tiers", "ram:100MiB", "--model", "nets:mlp")
    done = dlio("train", str(pictures), "-n", "2", *options, *files, *shape)
    assert done.returncode == 0, done.stderr
    for number, epoch in enumerate(json.loads((here / "r.json").read_text())["epochs"]):
        assert epoch["samples"] == SAMPLES
        assert sum(epoch["shares"]) == 20
        assert min(epoch["shares"]) >= 1
        assert len(epoch["rank_samples_per_s"]) == 2
        assert _consumed(here / "t.jsonl", number) == Counter(range(SAMPLES))

"""Losses whose weights follow from a rank's own numbers: plans, and messages that are not sent."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from dlio.exchange.loss_terms import GraphStates, LossTerms, find_terms
from dlio.integrations.script.loss_plan import OWN, LossPlan, TermUse

SCRIPT = Path(__file__).parent / "losses" / "messages.py"
_net = nn.Linear(6, 4)


def _parts(samples: int, masked: int = 0, divisor: float = 0.0, more: bool = False) -> LossTerms:
    targets = torch.arange(samples) % 4
    targets[:masked] = -100
    out = _net(torch.randn(samples, 6))
    loss = functional.cross_entropy(out, targets, reduction="sum" if divisor else "mean")
    if divisor:
        loss = loss / divisor
    if more:
        loss = loss + out.square().mean()
    return find_terms([loss], GraphStates(samples))


def _settled(parts: LossTerms, *uses: TermUse, knows_batch: bool = True) -> LossPlan:
    plan = LossPlan()
    for _ in range(3):
        assert not plan.is_settled
        plan.learn(parts, uses, knows_batch)
    return plan


def test_a_single_mean_is_weighed_by_its_own_count() -> None:
    plan = _settled(_parts(6), TermUse(OWN, 1.0, is_even=False))
    assert plan.is_settled
    step = plan.step(_parts(6, masked=2), 6, 12, divides=True)
    assert (step.weight, list(step.factors), step.of_loss) == (4.0, [1.0], 1.0)
    assert not step.is_odd


def test_a_sum_is_over_the_batch_and_means_beside_it_count_samples() -> None:
    parts = _parts(6, divisor=12, more=True)
    of_sum = {"cross_entropy": TermUse(None), "mean": TermUse(OWN, 4.0)}
    plan = _settled(parts, *(of_sum[term.name] for term in parts.terms))
    step = plan.step(_parts(5, divisor=12, more=True), 5, 12, divides=True)
    by_name = dict(zip((term.name for term in parts.terms), step.factors, strict=True))
    assert step.weight == 5
    assert by_name == {"cross_entropy": 12 / 5, "mean": 1.0}
    assert step.of_loss is None


def test_a_rank_whose_numbers_have_changed_says_so() -> None:
    two = _settled(_parts(6, more=True), TermUse(OWN, 1.0), TermUse(OWN, 4.0))
    names = [term.name for term in _parts(6, more=True).terms]
    uses = [TermUse(OWN, 1.0 if name == "cross_entropy" else 4.0) for name in names]
    two = _settled(_parts(6, more=True), *uses)
    assert not two.step(_parts(5, more=True), 5, 12, divides=True).is_odd
    assert two.step(_parts(6, masked=1, more=True), 6, 12, divides=True).is_wrong
    by_batch = _settled(_parts(6, divisor=6), TermUse(0, 1.0))
    assert not by_batch.step(_parts(5, divisor=5), 5, 12, divides=True).is_odd
    assert by_batch.step(_parts(6, divisor=100), 6, 12, divides=True).is_wrong
    constant = _settled(_parts(6, divisor=4), TermUse(None))
    assert not constant.step(_parts(4, divisor=4), 4, 12, divides=True).is_odd
    assert constant.step(_parts(5, divisor=5), 5, 12, divides=True).is_wrong


def test_what_a_rank_cannot_know_is_never_settled() -> None:
    parts = _parts(6, more=True)
    assert not _settled(
        parts, TermUse(OWN, 1.0, is_even=False), TermUse(OWN, 4.0, is_even=False)
    ).is_settled
    assert not _settled(_parts(6, divisor=12), TermUse(None), knows_batch=False).is_settled
    plan = _settled(_parts(6), TermUse(OWN, 1.0))
    plan.doubt(is_wrong=True)
    for _ in range(4):
        plan.learn(_parts(6), [TermUse(OWN, 1.0)], knows_batch=True)
    assert not plan.is_settled


@pytest.mark.mpi
def test_known_losses_send_nothing_before_backward_and_stay_exact(tmp_path: Path) -> None:
    """The script counts sums of ranks in each step: one of gradients, and in the first three of a
    loss one of its counts. Weights are one process's also where the counts change later."""
    outputs, errors, weights = [], [], []
    for launcher in ((), ("-m", "dlio.cli", "run", "-n", "2")):
        out = str(tmp_path / f"{len(launcher)}.pt")
        done = subprocess.run(
            [sys.executable, *launcher, str(SCRIPT), out],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        outputs.append(dict(re.findall(r"(.+): sums (.+)", done.stdout)))
        errors.append(done.stderr)
        weights.append(torch.load(out))
    sums = outputs[1]
    learnt = "2 2 2 1 1 1 1 1"
    assert sums["mean"] == sums["masked"] == sums["sum"] == sums["smoothed"] == learnt
    assert sums["empty"] == learnt
    assert sums["two"] == "2 2 2 2 2 2 2 2"
    assert sums["changes"] == "2 2 2 1 2 2 2 2"
    assert re.search(r"messages\.py:\d+: terms of the loss count other numbers", errors[1])
    alone, ranks = weights
    for name, expected in alone.items():
        bound = 0.05 if name == "changes" else 1e-6  # One step of it is said to be not exact.
        assert float((ranks[name] - expected).abs().max()) <= bound, name

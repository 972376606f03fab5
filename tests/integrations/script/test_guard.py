"""Ranks of a script that do different things are stopped, with the lines and the reason."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.exchange.batch_share import tensors_of
from dlio.integrations.script.batch_tensors import sizes_of
from dlio.integrations.script.guard import ScriptGuard
from dlio.integrations.script.script_losses import losses_of
from tests.conftest import examples

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
way = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 1)
if way in ("middle", "last"):
    x[{"middle": 41, "last": 62}[way]] = float("nan")
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if way == "by hand":
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), model)
    scale = model[0].weight
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16):
        loss = torch.nn.functional.mse_loss(model(a), b)
        if not torch.isfinite(loss):
            continue
        if way == "save" and loss.item() < 1e6 * (a[0, 0] > 0):
            torch.save(model.state_dict(), "best.pt")
        if way == "rates":
            optimizer.param_groups[0]["lr"] = 0.1 * float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if way == "by hand":
            with torch.no_grad():
                scale -= 0.1 * scale.grad
                scale.grad = None
        if way == "weights":
            with torch.no_grad():
                model.weight *= 1 + a.abs().mean()
"""
EXPECTED = {
    "middle": r"rank 0 goes on with backward at train\.py:\d+, rank 1 with the next batch "
    r"\(loss is nan\) at train\.py:16",
    "last": r"rank 0 goes on with backward at train\.py:\d+, rank 1 with the end of a pass over a "
    r"loader at train\.py:16",
    "save": r"rank \d .*torch\.save at train\.py:21",
    "weights": r"after step 4 the weights of parameter Linear\.weight of shape \(1, 6\) "
    r"differ between rank 0 and rank 1 by 0\.\d+ of their size",
    "by hand": r"after step \d the weights of parameter 2 \(LayerNorm\.weight of shape \(6,\)\), "
    r"which no optimizer has, differ between the ranks",
    "rates": r"rank 0 goes on with optimizer\.step with learning rate [\d.e-]+ at train\.py:\d+, "
    r"rank 1 with optimizer\.step with learning rate [\d.e-]+ at train\.py",
}


@pytest.mark.mpi
@pytest.mark.parametrize("way", EXPECTED)
@pytest.mark.daily("middle", "last", "by hand")
def test_ranks_that_decide_otherwise_end_with_the_lines_of_the_script(
    way: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "run", "-n", "2", "train.py", way],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert re.search(EXPECTED[way], done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "waited" not in done.stderr  # Not by a deadline.


@dataclass
class _Ranks(SingleCommunicator):
    size: int = 1


def _guard(ranks: int, calls: list[str]) -> ScriptGuard:
    guard = ScriptGuard(_Ranks(ranks))
    for call in calls:
        guard.note(call)
    return guard


@given(
    st.sampled_from([2, 3, 7, 64, 1000, 10_000]),
    st.lists(st.sampled_from(["the next batch", "backward", "torch.save"]), max_size=6),
    st.integers(0, 9999),
)
@settings(max_examples=examples(60), deadline=None)
def test_sums_in_float32_tell_whether_all_digests_are_the_same(
    ranks: int, calls: list[str], odd: int
) -> None:
    guard = _guard(ranks, calls)
    mine = torch.zeros(guard.count)
    guard.depart(mine, 1.0)
    guard.arrive(mine * ranks, 1.0)
    guard.check()
    other = torch.zeros(guard.count)
    seen = 0
    for more in range(8):  # A difference that one step leaves unseen shows in a later one.
        _guard(ranks, [*calls, f"something else {odd} {more}"]).depart(other, 1.0)
        guard.arrive(mine * (ranks - 1) + other, 1.0)
        try:
            guard.check()
        except UsageError:
            seen += 1
    assert seen >= 6


def test_equal_digests_pass_and_a_different_one_ends_the_script() -> None:
    calls = ["the next batch", "backward", "optimizer.step with learning rate 0.1"]
    guard = _guard(2, calls)
    sums = torch.zeros(guard.count)
    guard.depart(sums, 1.0)
    guard.arrive(2 * sums, 1.0)
    guard.check()
    guard.arrive(torch.tensor([*[0.0] * 4, 2.0, *[0.0] * 2, 3.0, 5.0, 3.0, 5.0, *[0.0] * 7]), 1.0)
    latest = (
        r"now rank 0 is at \S+ with optimizer.step with learning rate 0.1, call 3 of the script"
    )
    with pytest.raises(UsageError, match=f"different things.*{latest}"):
        guard.check()


def test_doubts_that_all_ranks_have_are_no_equal_digests_that_pass_unseen() -> None:
    guard = _guard(2, ["backward"])
    asked: list[bool] = []
    guard.doubted = asked.append
    for doubts in ((0, 0), (1, 0), (1, 1)):
        guard.doubts = doubts
        sums = torch.zeros(guard.count)
        guard.depart(sums, 1.0)
        guard.arrive(2 * sums, 1.0)
        guard.check()
    assert asked == [False, True]


def _sizes(batch: object, samples: int) -> int:
    return sizes_of(batch, list(tensors_of(batch)), samples)


def test_parts_of_a_batch_with_other_sizes_are_told_unless_one_counts_nothing() -> None:
    calls = ["the next batch"]
    batch = [torch.zeros(4, 9), {"time first": torch.zeros(7, 4, 3), "label": torch.zeros(4)}]
    size = _sizes(batch, 4)
    assert size == _sizes([torch.zeros(3, 9), {"time first": torch.zeros(7, 3, 3)}], 3)
    assert _sizes([torch.zeros(3, 5), torch.zeros(3, 5), torch.zeros(3, 6)], 3) == 0
    other = _sizes([torch.zeros(3, 8), {"time first": torch.zeros(7, 3, 3)}], 3)
    for theirs, is_told in ((size, False), (0, False), (other, True)):
        guards = _guard(2, calls), _guard(2, calls)
        sums = [torch.zeros(guard.count) for guard in guards]
        for guard, each, sizes in zip(guards, sums, (size, theirs), strict=True):
            guard.sizes = sizes
            guard.depart(each, 1.0)
        guards[0].arrive(sums[0] + sums[1], 1.0)
        guards[0].check()
        assert any("padded to its own" in note for note in guards[0].notes) == is_told


def test_calls_of_other_threads_are_not_compared() -> None:
    guard, alone = _guard(2, ["backward"]), _guard(2, ["backward"])
    thread = threading.Thread(target=guard.took_batch)
    thread.start()
    thread.join()
    sums, other = torch.zeros(guard.count), torch.zeros(guard.count)
    guard.depart(sums, 1.0)
    alone.depart(other, 1.0)
    assert torch.equal(sums, other)


def _deeper(guard: ScriptGuard, calls: int) -> str:
    if calls:
        return _deeper(guard, calls - 1)
    guard.note("backward")
    return guard.line


def test_the_place_of_a_call_is_the_line_that_makes_it_whichever_came_before() -> None:
    guard = _guard(2, [])
    lines = []
    for number in range(12):
        if number % 3 == 0:
            guard.note("backward")
            lines.append(guard.line)
        elif number % 3 == 1:
            guard.note("backward", " (once more)")
            lines.append(guard.line)
        else:
            lines.append(_deeper(guard, number % 4))
    first = _deeper.__code__.co_firstlineno
    here = sys._getframe().f_code.co_firstlineno
    name = os.path.basename(__file__)
    places = [f"{name}:{each}" for each in (here + 5, here + 8, first + 3)]
    assert lines == places * 4


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_losses_of_all_types_become_means(kind: torch.dtype) -> None:
    guard = _guard(2, [])
    weight = torch.tensor(2.0, requires_grad=True, dtype=kind)
    loss = weight * 3
    with guard.backward(loss, False):
        mine, theirs = torch.zeros(guard.count), torch.zeros(guard.count)
        guard.depart(mine, 1.0)
        theirs[0] = 12.0
        guard.arrive(mine + theirs, 1 / 2)
        guard.arrive(mine + theirs, torch.tensor(1 / 2))  # As of a device.
    assert loss.item() == 9.0
    guard.arrive(mine + theirs, 1.0)  # Of an average that no backward has made.
    assert loss.item() == 9.0


def _frame() -> FrameType:
    return sys._getframe(1)


def test_losses_are_the_scalars_that_lead_to_the_one_of_the_backward() -> None:
    weight = torch.ones(3, requires_grad=True)
    first, second = weight.sum(), weight.square().mean()
    elsewhere, many, number = weight.prod(), weight * 2, 3.0
    whole = (first + 0.1 * second) / 4
    losses = losses_of(whole, [_frame()], 4)
    assert losses[0] is whole
    assert {id(each) for each in losses[1:]} == {id(first), id(second)}
    assert losses_of([whole], [_frame()], 2)[0] is whole
    assert len(losses_of(whole, [_frame()], 2)) == 2
    assert losses_of(many, [_frame()], 4) == []
    assert losses_of([whole, elsewhere], [_frame()], 4) == []
    assert number == 3.0


@pytest.mark.parametrize("view", [lambda weight: weight[0], lambda weight: weight[:1].squeeze()])
def test_a_view_of_a_parameter_is_no_loss_and_keeps_its_value(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    learned = view(weight)
    whole = learned.neg().exp() * 3
    assert losses_of(whole, [_frame()], 4) == [whole]
    assert losses_of(learned, [_frame()], 4) == []


def test_a_rank_that_waits_reports_its_latest_calls_if_all_are_too_long() -> None:
    guard = _guard(2, [])
    for step in range(60):
        guard.stepped([step + 1 / each for each in range(1, 90)])
    sent: list[str] = []
    waiting: Any = guard
    waiting._comm = SimpleNamespace(rank=1, size=2)
    waiting._talk, waiting._receives = guard, {0: (SimpleNamespace(done=lambda: False), None)}
    waiting._tell = lambda _, text: sent.append(text)
    waiting._look(60.0)
    (report,) = map(json.loads, sent)
    assert len(sent[0]) <= 16 << 10
    assert len(report) > 5
    assert report[-1][0] == 59


def test_a_loss_becomes_the_mean_unless_its_graph_is_kept() -> None:
    guard = _guard(2, [])
    for keeps in (False, True):
        weight = torch.tensor(2.0, requires_grad=True)
        loss = weight * 3
        with guard.backward(loss, keeps):
            sums = torch.zeros(guard.count)
            guard.depart(sums, 5.0)  # Of 5 samples, like those of another rank.
            guard.arrive(sums + sums, 1 / 20)
        assert loss.item() == (6.0 if keeps else 3.0)


def test_summands_follow_a_loss_that_is_a_sum_once_whoever_else_changes_them() -> None:
    guard = _guard(2, [])
    weight = torch.tensor(2.0, requires_grad=True)
    part = weight * 3
    whole = part * 4
    with guard.backward(whole, False):
        sums = torch.zeros(guard.count)
        guard.depart(sums, 1.0)
        guard.arrive(sums + sums, 1 / 2)
        whole.data.fill_(48.0)  # The sum of both ranks', in place of the mean.
        part.data.fill_(12.0)
    assert (whole.item(), part.item()) == (48.0, 12.0)

"""Losses of ranks with other options of `dlio train`: each sample once, in one run and over two."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dlio.comm.single import SingleCommunicator
from dlio.plan.order import Order
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from tests.train.loss.conftest import SAMPLES, Ran, Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]

nightly = pytest.mark.nightly
_CHECKPOINTS = ("--checkpoint", "c", "--checkpoint-every", "2", "--keep", "99")
_NODES = ("--pretend-nodes", "2")


def _before(ran: Ran, step: int) -> Counter[int]:
    """Samples of the first epoch's steps before `step`."""
    trained: Counter[int] = Counter()
    for line in ran.trace:
        if line["epoch"] == 0 and line["step"] < step:
            trained.update(line["samples"])
    return trained


@pytest.mark.needs("skipping", "balance")
def test_checkpoints_skipping_and_balance_go_on_without_the_first_rank(
    run: Run, tmp_path: Path
) -> None:
    """Rank 0 publishes checkpoints, and chooses which samples are skipped."""
    skipping = ("--skip-samples", "--skip-share", "0.4", "--epochs", "3", "--balance")
    ran = run(3, {0: ["kill", 5, 1]}, *_CHECKPOINTS, *skipping)
    assert ran.code == 0, ran.errors
    assert list(map(len, ran.weights)) == [1] * 3
    # One that a loss interrupts, that of step 4, is complete or not there.
    folder = tmp_path / "c"
    names = {path.name for path in folder.iterdir()}
    assert names >= {".lock", "step-00000002", "step-00000006", "step-00000008"}
    assert not [name for name in names if name.startswith(".unfinished")]
    # The next run would train on the rest of the epoch, with what the lost rank had left.
    about = json.loads((folder / "step-00000006" / "about.json").read_text())
    state = about["loader"]
    assert about["ranks"] == 2
    assert state["again"]
    rest = Order(SAMPLES, state["seed"]).samples(np.arange(state["position"], SAMPLES))
    left = Counter([*rest.tolist(), *state["again"]])
    assert _before(ran, 6) + left == Counter(range(SAMPLES))
    with Checkpoints(str(folder), SingleCommunicator()) as checkpoints:
        for path in checkpoints.paths()[1:]:
            newest = checkpoints.newest()
            assert newest is not None
            assert newest.path > path
            shutil.rmtree(newest.path)
        assert checkpoints.newest() is not None
    everything = Counter(range(SAMPLES))
    assert ran.samples[0] == ran.samples[2] == everything
    assert set(ran.samples[1].values()) == {1}
    kept = 1 - ran.epochs[1]["skip_share"]
    assert len(ran.samples[1]) == ran.epochs[1]["samples"] == round(kept * SAMPLES) < 80
    assert [sum(epoch["shares"]) for epoch in ran.epochs] == [12] * 3
    assert [len(epoch["shares"]) for epoch in ran.epochs] == [2] * 3


@nightly
@pytest.mark.parametrize("exchange", ["allreduce", "hierarchical+int8", "gossip", "asgd"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_is_resumed_from_a_checkpoint_after_a_loss(
    run: Run, tmp_path: Path, ranks: int, exchange: str
) -> None:
    options = (*_CHECKPOINTS, "--exchange", exchange)
    ends: dict[int, list[object]] = {0: ["kill", 5, 1], 2: ["kill", 14, -1]}
    ran = run(3, ends, *options)
    check_exact(ran, alike=False)
    before = _before(ran, 6)
    shutil.copytree(tmp_path / "c" / "step-00000006", tmp_path / "d" / "step-00000006")
    resumed = run(ranks, {}, "--checkpoint", "d", "--resume", "--exchange", exchange)
    assert resumed.code == 0, resumed.errors
    assert "resumed from" in resumed.output
    assert before + resumed.samples[0] == Counter(range(SAMPLES))
    assert resumed.samples[1] == Counter(range(SAMPLES))


@nightly
def test_a_run_that_is_resumed_loses_ranks_too(run: Run, tmp_path: Path) -> None:
    ran = run(3, {1: ["kill", 4, 1]}, *_CHECKPOINTS)
    check_exact(ran)
    before = _before(ran, 6)
    shutil.copytree(tmp_path / "c" / "step-00000006", tmp_path / "d" / "step-00000006")
    resumed = run(3, {0: ["kill", 2, 3]}, "--checkpoint", "d", "--resume")
    assert resumed.code == 0, resumed.errors
    assert before + resumed.samples[0] == Counter(range(SAMPLES))
    assert resumed.samples[1] == Counter(range(SAMPLES))
    assert min(line["step"] for line in resumed.trace if line["epoch"] == 0) == 6


@nightly
@pytest.mark.parametrize("mode", ["local", "partial(0.3)", "ring"])
@pytest.mark.parametrize(
    ("ends", "more"),
    [
        ({1: ["kill", 3, 1]}, ()),
        ({3: ["kill", 4, -1], 2: ["kill", 6, 2]}, ()),  # A whole node.
        ({0: ["kill", 13, 5], 3: ["kill", 14, 0]}, ("--on-loss", "shrink")),
    ],
    ids=["one", "node", "last step"],
)
def test_inexact_modes_go_on(
    run: Run, mode: str, ends: dict[int, list[object]], more: tuple[str, ...]
) -> None:
    check_exact(run(4, ends, "--shuffle", mode, *_NODES, *more))


@nightly
def test_an_inexact_epoch_is_resumed_on_as_many_ranks(run: Run, tmp_path: Path) -> None:
    options = ("--shuffle", "local", *_NODES)
    ran = run(3, {1: ["kill", 4, 1]}, *_CHECKPOINTS, *options)
    check_exact(ran)
    before = _before(ran, 6)
    shutil.copytree(tmp_path / "c" / "step-00000006", tmp_path / "d" / "step-00000006")
    refused = run(2, {}, "--checkpoint", "d", "--resume", *options)
    assert refused.code == 2
    assert "on 3 ranks: continue on as many" in refused.errors
    resumed = run(3, {}, "--checkpoint", "d", "--resume", *options)
    assert resumed.code == 0, resumed.errors
    assert before + resumed.samples[0] == Counter(range(SAMPLES))


@nightly
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_streamed_blocks_are_not_held_back_by_a_lost_rank(run: Run, nodes: str) -> None:
    more = ("--source-order", "block(2)", "--tiers", "none", "--pretend-nodes", nodes)
    ran = run(3, {0: ["kill", 4, 1], 2: ["kill", 14, -1]}, *more)
    check_exact(ran)


@nightly
def test_the_global_batch_and_the_learning_rate_may_follow_the_ranks(run: Run) -> None:
    ran = run(4, {1: ["kill", 3, 0], 3: ["kill", 3, 5]}, "--on-loss", "shrink")
    check_exact(ran)
    assert max(len(line["samples"]) for line in ran.trace) == 4
    # As the usual rate has it: in proportion to the root of the global batch.
    first, second = (epoch["peak_lr"] for epoch in ran.epochs)
    assert first == second
    kept = run(4, {1: ["kill", 3, 0], 3: ["kill", 3, 5]})
    assert np.isclose(kept.epochs[0]["peak_lr"] / first, 2**0.5)
    assert max(len(line["samples"]) for line in kept.trace) == 8

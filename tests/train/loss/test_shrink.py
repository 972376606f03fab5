"""`dlio train --fault-tolerance shrink`: ranks are lost, and no sample is."""

import math
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlio.errors import UsageError
from dlio.integrations.script.run_options import RunOptions
from dlio.train.config import train_config
from tests.conftest import MpiRun
from tests.train.loss.conftest import EPOCHS, SAMPLES, Run, check_exact

# The stand-in ends a little later than the program that a signal is sent to: at night, without it.
pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]


TWO = {1: ["kill", 3, 0], 3: ["kill", 3, 5]}
ALL_BUT_ONE = {0: ["kill", 2, -1], 1: ["kill", 4, 3], 2: ["kill", 8, 1]}


def _nightly(*values: object, name: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly, id=name)


@pytest.mark.parametrize(
    ("backend", "ranks", "ends"),
    [
        _nightly("mpi", 3, {1: ["kill", 3, -1]}, name="forward"),
        pytest.param("mpi", 3, {0: ["kill", 3, 2]}, id="rank 0"),
        _nightly("mpi", 4, TWO, name="two at once"),
        pytest.param("mpi", 4, ALL_BUT_ONE, id="all but one"),
        pytest.param("mpi", 2, {1: ["kill", 13, 5]}, id="the last step"),  # Of the first epoch.
        _nightly("torch", 3, {1: ["kill", 3, -1]}, name="forward, torch"),
        pytest.param("torch", 3, {0: ["kill", 3, 2]}, id="rank 0, torch"),
        _nightly("torch", 4, TWO, name="two at once, torch"),
        _nightly("torch", 4, ALL_BUT_ONE, name="all but one, torch"),
        _nightly("torch", 2, {1: ["kill", 13, 5]}, name="the last step, torch"),
    ],
)
@pytest.mark.daily("rank 0")
def test_the_others_go_on_and_each_sample_counts_once(
    run: Run, backend: str, ranks: int, ends: dict[int, list[object]]
) -> None:
    ran = run(ranks, ends, "--backend", backend)
    check_exact(ran)
    said = r"^ranks? (.+) lost at step (\d+): (\d) ranks? goe?s? on, "
    lines = re.findall(said, ran.output, re.MULTILINE)
    ranks_of = [[int(each) for each in re.findall(r"(\d+) \(node ", who)] for who, _, _ in lines]
    assert sorted(rank for each in ranks_of for rank in each) == sorted(ends)
    assert [tuple(each["ranks"]) for each in ran.losses] == list(map(tuple, ranks_of))
    assert [each["left"] for each in ran.losses] == [int(left) for *_, left in lines]
    assert [each["step"] for each in ran.losses] == [int(step) for _, step, _ in lines]
    for number, loss in enumerate(ran.losses, 1):
        assert loss["generation"] == number
        assert len(loss["nodes"]) == len(loss["ranks"])
        assert 0 < loss["renew_s"] + loss["settle_s"] <= loss["seconds"]
    assert ran.errors == ""


@pytest.mark.nightly
def test_a_loss_is_in_report_and_tensorboard_if_rank_0_is_lost(run: Run, tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # Lost before its gradients are there: nobody can have the sums of its third step.
    ran = run(3, {0: ["kill", 3, -1]}, "--tensorboard", "tb")
    check_exact(ran)
    (loss,) = ran.losses
    assert loss.items() >= {"ranks": [0], "epoch": 0, "step": 2, "left": 2}.items()
    assert loss["samples_again"] == 4
    assert loss["nodes"] == [socket.gethostname()]
    assert "1 rank lost (0); 2 went on" in ran.output
    scalars: dict[str, list[tuple[int, float]]] = {}
    for path in (tmp_path / "tb").iterdir():
        events = reading.EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
    assert sorted(scalars["ranks/number"]) == [(0, 3.0), (2, 2.0)]
    ((step, seconds),) = scalars["ranks/recovery_s"]
    assert step == 2
    assert math.isclose(seconds, loss["seconds"], rel_tol=1e-6)
    assert len(scalars["epoch/loss"]) == EPOCHS


@pytest.mark.nightly
def test_held_out_data_and_accumulated_batches_are_shared_anew(run: Run, pictures: Path) -> None:
    more = ("--accumulate", "2", "--val", str(pictures / "val"), "--pretend-nodes", "2")
    ran = run(4, {2: ["kill", 3, 1], 3: ["kill", 9, -1]}, *more)
    check_exact(ran)
    assert all(epoch["val_accuracy"] is not None for epoch in ran.epochs)


@pytest.mark.parametrize("backend", ["mpi", pytest.param("torch", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", ["stop", "segv"])
@pytest.mark.nightly  # By day, ranks are killed, stop in C, and have bugs.
def test_a_rank_that_is_stopped_or_crashes_is_lost(run: Run, backend: str, how: str) -> None:
    check_exact(run(3, {2: [how, 4, 1]}, "--backend", backend))


@pytest.mark.nightly
def test_a_rank_that_exits_is_lost_without_mpi(run: Run) -> None:
    """MPI tells nobody of an exit code; the launcher does."""
    check_exact(run(3, {2: ["exit", 4, 1]}, "--backend", "torch"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "nodes"),
    [
        ("tree", 1),
        ("allreduce+int8", 1),
        ("hierarchical+onebit", 2),
        ("local-sgd(3)", 1),
        ("gossip", 1),
        ("gossip+int8", 2),
        ("asgd", 1),
    ],
)
def test_every_exchange_goes_on_without_mpi(run: Run, exchange: str, nodes: int) -> None:
    ends: dict[int, list[object]] = {1: ["kill", 3, 2], 2: ["kill", 6, -1]}
    more = ("--exchange", exchange, "--pretend-nodes", str(nodes), "--backend", "torch")
    check_exact(run(4, ends, *more), alike=exchange.split("+")[0] not in ("gossip", "asgd"))


@pytest.mark.parametrize(
    ("backend", "rank"),
    [("mpi", 0), ("mpi", 1), pytest.param("torch", 0, marks=pytest.mark.nightly)],
)
@pytest.mark.daily("mpi-1")
def test_a_rank_with_a_bug_tells_it_and_is_lost(run: Run, backend: str, rank: int) -> None:
    # In the second epoch: rank 0 has written the trace of the first one.
    ran = run(3, {rank: ["raise", 12, -1]}, "--backend", backend)
    assert ran.code == 0
    assert "RuntimeError: a bug of this rank alone" in ran.errors
    assert "closes its loader" not in ran.errors
    assert ran.samples == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.mark.parametrize("backend", ["mpi", pytest.param("torch", marks=pytest.mark.nightly)])
def test_too_few_ranks_end_the_run_in_one_line(run: Run, backend: str) -> None:
    ran = run(3, {1: ["kill", 4, -1]}, "--min-ranks", "3", "--backend", backend)
    assert ran.code == 2
    assert ran.errors == "dlio: error: 2 ranks left, and --min-ranks is 3: this job ends\n"
    assert ran.samples == {}


@pytest.mark.parametrize("backend", ["mpi", pytest.param("torch", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_run_of_which_no_rank_is_left_has_failed(run: Run, backend: str) -> None:
    ran = run(2, {0: ["kill", 4, 1], 1: ["kill", 4, 1]}, "--backend", backend)
    assert ran.code != 0
    assert ran.samples == {}


@pytest.mark.nightly
def test_more_ranks_to_go_on_than_there_are_is_refused(run: Run) -> None:
    ran = run(2, {}, "--min-ranks", "3")
    assert ran.code == 2
    assert "dlio: error: --min-ranks 3 with 2 ranks" in ran.errors


def test_options_of_losses_without_fault_tolerance_are_refused() -> None:
    with pytest.raises(UsageError, match="--on-loss needs --fault-tolerance shrink"):
        train_config(source="data", on_loss="shrink")
    with pytest.raises(UsageError, match="--min-ranks needs --fault-tolerance shrink"):
        train_config(source="data", min_ranks=2).check_run()
    with pytest.raises(UsageError, match="--min-ranks needs --fault-tolerance shrink"):
        RunOptions(min_ranks=2)


def test_ranks_that_cannot_go_on_are_refused(mpirun: MpiRun, pictures: Path) -> None:
    """The option, or the variable, without ranks that MPI started for it."""
    argv = ("-m", "dlio.cli", "train", str(pictures / "train"), "--image-size", "32")
    done = mpirun(2, *argv, "--fault-tolerance", "shrink")
    assert done.returncode == 2
    assert "these ranks end with any of them" in done.stderr
    done = mpirun(2, *argv, env={"DLIO_MIN_RANKS": "1"})
    assert done.returncode == 2
    assert "mpirun --with-ft ulfm" in done.stderr

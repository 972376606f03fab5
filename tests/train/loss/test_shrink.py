"""`dlio train --fault-tolerance shrink`: ranks are lost, and no sample is."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.train.loss.conftest import EPOCHS, SAMPLES, Run, check_exact

# The stand-in would end a little later than the program that a signal is sent to.
pytestmark = [pytest.mark.mpi, pytest.mark.cold]


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        (3, {1: ["kill", 3, -1]}),
        (3, {0: ["kill", 3, 2]}),
        (4, {1: ["kill", 3, 0], 3: ["kill", 3, 5]}),
        (4, {0: ["kill", 2, -1], 1: ["kill", 4, 3], 2: ["kill", 8, 1]}),
        (2, {1: ["kill", 13, 5]}),  # The last step of the first epoch.
    ],
    ids=["forward", "rank 0", "two at once", "all but one", "the last step"],
)
def test_the_others_go_on_and_each_sample_counts_once(
    run: Run, ranks: int, ends: dict[int, list[object]]
) -> None:
    ran = run(ranks, ends)
    check_exact(ran)
    lines = re.findall(r"^ranks? ([\d, ]+) lost at step \d+: \d go on", ran.output, re.MULTILINE)
    assert sorted(int(rank) for each in lines for rank in each.split(", ")) == sorted(ends)
    assert ran.errors == ""


def test_held_out_data_and_accumulated_batches_are_shared_anew(run: Run, pictures: Path) -> None:
    more = ("--accumulate", "2", "--val", str(pictures / "val"), "--pretend-nodes", "2")
    ran = run(4, {2: ["kill", 3, 1], 3: ["kill", 9, -1]}, *more)
    check_exact(ran)
    assert all(epoch["val_accuracy"] is not None for epoch in ran.epochs)


@pytest.mark.parametrize("how", ["stop", "segv"])
def test_a_rank_that_is_stopped_or_crashes_is_lost(run: Run, how: str) -> None:
    check_exact(run(3, {2: [how, 4, 1]}))


def test_a_rank_with_a_bug_tells_it_and_is_lost(run: Run) -> None:
    ran = run(3, {1: ["raise", 4, -1]})
    assert ran.code == 0
    assert "RuntimeError: a bug of this rank alone" in ran.errors
    assert ran.samples == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


def test_too_few_ranks_end_the_run_in_one_line(run: Run) -> None:
    ran = run(3, {1: ["kill", 4, -1]}, "--min-ranks", "3")
    assert ran.code == 2
    assert ran.errors == "dlio: error: 2 ranks are left, and --min-ranks is 3: this job ends\n"
    assert ran.samples == {}


def test_a_run_of_which_no_rank_is_left_has_failed(run: Run) -> None:
    ran = run(2, {0: ["kill", 4, 1], 1: ["kill", 4, 1]})
    assert ran.code != 0
    assert ran.samples == {}


@pytest.mark.parametrize(
    "more",
    [
        ("--shuffle", "local"),
        ("--source-order", "block(2)"),
        ("--checkpoint", "c"),
        ("--balance",),
        ("--prune", "apoptosis"),
        ("--skip-samples", "--epochs", "3"),
    ],
)
def test_what_does_not_go_with_it_is_refused(run: Run, more: tuple[str, ...]) -> None:
    ran = run(2, {}, *more)
    assert ran.code == 2
    assert f"{more[0]}" in ran.errors
    assert "does not go with --fault-tolerance shrink yet" in ran.errors


def test_ranks_that_cannot_go_on_are_refused(mpirun: MpiRun, pictures: Path) -> None:
    """The option, or the variable, without ranks that MPI started for it."""
    argv = ("-m", "dlio.cli", "train", str(pictures / "train"), "--image-size", "32")
    done = mpirun(2, *argv, "--fault-tolerance", "shrink")
    assert done.returncode == 2
    assert "these ranks end with any of them" in done.stderr
    done = mpirun(2, *argv, env={"DLIO_MIN_RANKS": "1"})
    assert done.returncode == 2
    assert "mpirun --with-ft ulfm" in done.stderr

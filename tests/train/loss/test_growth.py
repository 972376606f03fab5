"""Spares take the place of lost ranks; ranks join and leave a job that runs."""

import pytest

from dlio.errors import UsageError
from dlio.train.config import train_config
from dlio.util.signals import RESUME_CODE
from tests.train.loss.conftest import Ran, Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]
ALIKE = ["allreduce", "tree", "parameter-server", "allreduce+int8", "allreduce+onebit"]
OTHERS = ["gossip", "noloco(4)", "asgd", "local-sgd(4)", "diloco(4)"]


def _ranks_of(ran: Ran, kind: str) -> list[int]:
    return [rank for each in ran.changes if each["kind"] == kind for rank in each["ranks"]]


def test_a_spare_takes_the_place_of_a_lost_rank(run: Run) -> None:
    ran = run(2, {0: ["kill", 3, 2]}, "--spares", "1")
    check_exact(ran)
    assert [each["ranks"] for each in ran.losses] == [[0]]
    assert _ranks_of(ran, "joined") == [2]
    assert ran.changes[0]["left"] == 2
    # In the place of the lost one: with as many samples of each batch as the others.
    assert max(step for _, rank in ran.steps for step in ran.steps[0, rank]) <= 13
    assert "job " in ran.output
    assert "rank 2 (node " in ran.output


def test_a_rank_that_is_told_to_ends_after_its_batch_and_nothing_comes_again(run: Run) -> None:
    ran = run(3, {1: ["term", 4, 1]})
    check_exact(ran)
    assert not ran.losses, ran.errors
    assert _ranks_of(ran, "left") == [1]
    assert 3 in ran.steps[0, 1]
    assert max(ran.steps[0, 1]) <= 4


@pytest.mark.nightly
@pytest.mark.parametrize("exchange", [*ALIKE, *OTHERS, "hierarchical"])
def test_spares_follow_spares_under_each_exchange(run: Run, exchange: str) -> None:
    ends: dict[int, list[object]] = {1: ["kill", 3, 2], 2: ["kill", 3, -1]}
    if exchange != "asgd":  # Its ranks do not wait: rank 0 might end together with rank 2.
        ends[0] = ["kill", 11, 4]
    more = ["--pretend-nodes", "2"] if exchange == "hierarchical" else []
    ran = run(2, ends, "--spares", "3", "--exchange", exchange, *more)
    check_exact(ran, alike=exchange not in OTHERS)
    assert _ranks_of(ran, "joined") == [2, 3, 4][: len(ends)]


@pytest.mark.nightly
def test_ranks_join_and_leave_as_they_are_asked_to(run: Run) -> None:
    ran = run(2, {}, "--spares", "2", resize={4: 2, 16: -2})
    check_exact(ran)
    assert not ran.losses
    assert sorted(_ranks_of(ran, "joined")) == [2, 3]
    assert sorted(_ranks_of(ran, "left")) == [2, 3]


@pytest.mark.nightly
def test_all_ranks_that_are_told_to_leave_end_the_job(run: Run) -> None:
    ran = run(2, {rank: ["term", 4, 1] for rank in range(2)})
    assert ran.code == RESUME_CODE
    assert "told to end at epoch 1, step 4: no checkpoint" in ran.output


def test_what_needs_ranks_that_survive_is_refused_without_it() -> None:
    for options in ({"spares": 1}, {"leave_at": "23:50"}):
        with pytest.raises(UsageError, match="needs --fault-tolerance shrink"):
            train_config(source="data", **options)
    with pytest.raises(UsageError, match="--leave-at ten: give a time of day, such as 23:50"):
        train_config(source="data", fault_tolerance="shrink", leave_at="ten")

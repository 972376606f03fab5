"""Simulated schedules of losses: exactly once and alike, through the code that decides."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from dlio.cli import main
from dlio.comm.survival.recovery import Recovery
from dlio.exchange.peer_steps import PeerSteps
from dlio.exchange.round_commit import RoundCommit
from dlio.loader.assignment.epoch_schedule import EpochSchedule
from dlio.loader.assignment.rank_groups import BatchReport, RankGroups
from dlio_bench.chaos.simulated_jobs.memory_network import MemoryCommunicator
from dlio_bench.chaos.simulated_jobs.outcome_check import ScheduleOutcome, run_schedule
from dlio_bench.chaos.simulated_jobs.schedule_draws import COHORTS, draw_schedule
from dlio_bench.chaos.simulated_jobs.turns import Deadlock, Turns


@pytest.fixture
def turns() -> Iterator[Turns]:
    with Turns(COHORTS) as running:
        yield running


def _total(turns: Turns, seed: int, count: int, ranks: int | None = None) -> ScheduleOutcome:
    total = ScheduleOutcome()
    for number in range(count):
        outcome = run_schedule(draw_schedule(seed, number, ranks), turns)
        outcome.disagreements = [f"schedule {number}: {each}" for each in outcome.disagreements]
        total.add(outcome)
    return total


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 100), pytest.param(1, 100_000, marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(3600)
def test_each_sample_counts_once_and_ranks_agree(seed: int, count: int, turns: Turns) -> None:
    total = _total(turns, seed, count)
    assert total.disagreements == []
    assert (total.samples_lost, total.samples_doubled) == (0, 0)
    # Losses within recoveries, and sums that some ranks had and others lacked.
    assert total.losses > total.recoveries > count
    assert total.interrupted > count // 20
    assert total.given > count // 4


@pytest.mark.parametrize(
    ("ranks", "count"), [(2, 3), (10_000, 1), pytest.param(10_000, 3, marks=pytest.mark.nightly)]
)
def test_the_least_and_the_most_ranks(ranks: int, count: int, turns: Turns) -> None:
    assert not _total(turns, 2, count, ranks).wrong


def test_a_schedule_has_the_same_outcome_again(turns: Turns) -> None:
    first, again = (
        [run_schedule(draw_schedule(3, number), turns) for number in range(20)] for _ in range(2)
    )
    assert first == again
    assert draw_schedule(3, 0) != draw_schedule(4, 0)


def _least_reconciles(self: Any, reports: Any) -> None:
    """Let ranks that are left share what some of them have taken already."""
    turned = [BatchReport(-each.taken, each.steps) for each in reports]
    reconcile(self, turned)
    self._changes[-1] = self._changes[-1]._replace(taken=-self._changes[-1].taken)


reconcile = RankGroups.reconcile


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (RankGroups, "reconcile", _least_reconciles),
        (MemoryCommunicator, "bcast", lambda self, array, root=0: self.barrier()),
        (EpochSchedule, "has_contributed", lambda self, member, batch, survivors: True),
        (EpochSchedule, "has_contributed", lambda self, member, batch, survivors: False),
        (PeerSteps, "reconcile", lambda self, reports: None),
        (RoundCommit, "take", lambda self: None),
        (Recovery, "uniform", lambda self, act: act()),
    ],
    ids=["too early", "not given", "counted", "uncounted", "unheard", "not taken", "no agreement"],
)
def test_a_wrong_rule_is_found(
    owner: type, name: str, wrong: Any, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    drawn = (draw_schedule(5, number, 4) for number in range(100))
    assert any(run_schedule(schedule, turns).wrong for schedule in drawn)


def test_ranks_that_wait_for_each_other_are_told(turns: Turns) -> None:
    def never() -> None:
        turns.wait(lambda: False)

    with pytest.raises(Deadlock):
        turns.run([never, never], random.Random(0))
    done: list[int] = []
    turns.run([lambda: done.append(0), lambda: done.append(1)], random.Random(0))
    assert sorted(done) == [0, 1]


def test_the_error_of_a_rank_ends_the_others(turns: Turns) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        turns.run([fail, lambda: turns.wait(lambda: False)], random.Random(0))


def test_the_command_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "chaos", "--case", "schedules", "--schedules", "5", "--first-schedule", "7"]
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--seed", "3"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    rows = dict(line.strip().rsplit(maxsplit=1) for line in output.splitlines() if line.split()[1:])
    rows = {words.strip(): value for words, value in rows.items()}
    assert rows["schedules"] == "5"
    assert rows["samples lost"] == rows["samples doubled"] == "0"
    assert rows["disagreements and hangs"] == "0"
    assert int(rows["ranks lost"]) >= 5

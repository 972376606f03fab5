"""The schedule of an epoch, as a function of events: no loader, no ranks, no messages."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from dlio.loader.assignment.epoch_schedule import EpochSchedule, EpochState, SurvivorState
from dlio.loader.assignment.history import AssignmentSpan, IssuedBatch
from dlio.loader.passes import PlannedPass

SAMPLES, BATCH = 83, 12


def _pass(schedule: EpochSchedule, members: tuple[int, ...]) -> AssignmentSpan:
    """A pass over the rest of the epoch, each batch shared by taking turns."""
    order = [*range(SAMPLES), *schedule.requeued]
    begin = schedule.position

    def part(batch: int, rank: int) -> list[int]:
        first = begin + batch * BATCH
        return order[first : first + BATCH][rank :: len(members)]

    planned: Any = SimpleNamespace(
        cursor=SimpleNamespace(position=begin),
        samples=len(order),
        whole=SAMPLES,
        again=(),
        requeued=(),
        global_batch=BATCH,
        formula=SimpleNamespace(exact=True, drop_last=False),
        part=part,
    )
    batches: PlannedPass = planned
    schedule.begin_pass(batches, members, 0)
    return AssignmentSpan(batches, None, members)


@pytest.mark.parametrize("seed", range(50))
def test_each_sample_contributes_once_whoever_is_lost_and_when(seed: int) -> None:
    draw = random.Random(seed)
    members = tuple(range(draw.randint(1, 5)))
    schedule = EpochSchedule(BATCH, keeps_steps=False)
    schedule.begin_epoch(0)
    trained: list[int] = []
    exchange = 0
    while not (schedule.has_begun and schedule.is_over()):
        span = _pass(schedule, members)
        for number in range(schedule.left()):
            schedule.issue()
            schedule.open.append(IssuedBatch(span, number, schedule.step, 0))
            schedule.step += 1
            exchange += 1
            lost = draw.choice(members) if len(members) > 1 and draw.random() < 0.2 else None
            members = tuple(each for each in members if each != lost)
            schedule.commit(exchange, frozenset(members))
            for member in members:
                trained += span.samples(number, member)
            if lost is not None:
                break
        schedule.requeue(schedule.missing(SurvivorState(members, {})))
        assert schedule.missing(SurvivorState(members, {})) == {}
    assert sorted(trained) == list(range(SAMPLES))


def test_a_rank_that_joins_has_the_same_schedule() -> None:
    schedule = EpochSchedule(BATCH, keeps_steps=True)
    schedule.begin_epoch(3)
    _pass(schedule, (0, 1, 2))
    schedule.issue()
    schedule.requeue({(0, 2): [5, 7]})
    schedule.final = {2: 4}
    joined = EpochState(BATCH)
    joined.load_json(schedule.to_json())
    assert joined.to_json() == schedule.to_json()

"""The pace of pruning: when rounds are and how much they remove, given former rounds."""

import json

import pytest

from dlio.errors import DlioError, UsageError
from dlio.features.pruning.pruning_pace import PruningPace, Schedule
from dlio.features.pruning.removal_plan import Limits

SCHEDULE = Schedule(every=4, looks=2, begin=0.1, end=0.5, share=0.1, most=0.4, patience=4)


def _rounds(pace: PruningPace, until: int, goes: str) -> list[int]:
    """Return the steps of the rounds when all rounds have the same outcome."""
    steps = []
    for step in range(1, until + 1):
        if pace.due(step):
            steps.append(step)
            if goes == "well":
                pace.succeeded(step, ["a"], easily=True)
            elif goes == "badly":
                pace.hurt(["a"])
                pace.nothing(step, hurt=True)
            else:
                pace.nothing(step, hurt=False)
    return steps


def test_rounds_are_a_window_apart_while_they_succeed_and_none_is_in_the_last_part() -> None:
    assert _rounds(PruningPace(SCHEDULE, 120), 120, "well") == [12, 20, 28, 36, 44, 52, 60]
    assert not PruningPace(SCHEDULE, 120).over(59)
    assert PruningPace(SCHEDULE, 120).over(60)


def test_rounds_that_remove_nothing_become_rare() -> None:
    assert _rounds(PruningPace(SCHEDULE, 400), 400, "nothing") == [40, 56, 88, 120, 152, 184]


def test_success_raises_boldness_and_harm_lowers_it() -> None:
    pace = PruningPace(SCHEDULE, None)
    before = pace.limits(Limits(), 0.1)
    assert (before.loss, before.share) == (0.1, 0.1)
    pace.succeeded(8, ["a"], easily=True)
    bolder = pace.limits(Limits(), 0.1)
    assert (bolder.loss, bolder.share) == (0.2, 0.2)
    pace.succeeded(16, ["a"], easily=False)
    assert pace.limits(Limits(), 0.1) == bolder
    pace.succeeded(16, ["a"], easily=True, gently=True)
    assert pace.limits(Limits(), 0.1) == before
    pace.succeeded(16, ["a"], easily=True)
    for step in (24, 32, 40):
        pace.succeeded(step, ["a"], easily=True)
    assert pace.limits(Limits(), 0.1).share == 0.4
    for step in (48, 56, 64, 72, 80):
        pace.nothing(step, hurt=True)
    assert pace.limits(Limits(), 0.1).loss == pytest.approx(0.1 * 16 / 4**5)
    # Without a probe boldness has no effect, since its harm cannot be measured.
    assert PruningPace(SCHEDULE, None, boldness=8.0).limits(Limits(loss=0.3), None).loss == 0.3


def test_a_group_that_hurts_is_left_alone_for_longer_each_time() -> None:
    pace = PruningPace(SCHEDULE, None)
    alone = []
    for round_number in range(16):
        frozen = "a" in pace.limits(Limits(frozen=frozenset({"z"})), 0.1).frozen
        alone.append(frozen)
        if not frozen:
            pace.hurt(["a"])
        pace.succeeded(8 * (round_number + 1), ["b"], easily=False)
    tried = [number for number, frozen in enumerate(alone) if not frozen]
    assert tried == [0, 2, 5, 10]
    assert "z" in pace.limits(Limits(frozen=frozenset({"z"})), 0.1).frozen
    pace.succeeded(999, ["a"], easily=False)
    assert "a" not in pace.fails


def test_rounds_together_may_raise_the_loss_by_the_tolerance_of_the_first_one() -> None:
    pace = PruningPace(Schedule(tolerance=0.5, allowed=2.0, part=0.4), None)
    assert pace.allowed(3.0) == pytest.approx(0.012)
    pace.succeeded(8, ["a"], easily=False, rise=0.011)
    pace.succeeded(16, ["a"], easily=True, rise=-0.5)
    assert pace.allowed(1.0) == pytest.approx(0.012)
    pace.succeeded(24, ["a"], easily=False, rise=0.012)
    assert pace.allowed(1.0) == pytest.approx(0.007)
    pace.succeeded(32, ["a"], easily=False, rise=0.012)
    assert pace.allowed(1.0) == 0
    assert PruningPace(Schedule(tolerance=0.0), None).allowed(3.0) == 0


def test_held_out_accuracy_that_falls_slows_pruning_and_then_ends_it() -> None:
    pace = PruningPace(SCHEDULE, None)
    pace.held_out(0.50, 8)
    pace.held_out(0.496, 16)
    assert (pace.fell, pace.boldness, pace.stopped) == (0, 1.0, "")
    pace.held_out(0.48, 24)
    assert (pace.fell, pace.boldness, pace.next_step) == (1, 0.25, 24 + 4 * 8)
    pace.held_out(0.51, 60)
    assert pace.fell == 0
    pace.held_out(0.40, 70)
    pace.held_out(0.41, 80)
    assert pace.stopped
    assert not pace.due(10_000)
    assert pace.over(0)


def test_a_network_that_overfits_has_neurons_to_spare() -> None:
    pace = PruningPace(Schedule(keep=0.4), None)
    pace.held_out(0.50, 8, training=0.504)
    pace.held_out(0.52, 16)
    assert pace.keep == 0.4
    pace.succeeded(20, ["a"], easily=True, rise=0.1)
    pace.held_out(0.53, 24, training=0.6)
    assert (pace.keep, pace.spent) == (0.2, 0.0)


def test_a_pace_is_restored_from_json() -> None:
    pace = PruningPace(SCHEDULE, 400)
    _rounds(pace, 60, "badly")
    again = PruningPace.from_json(SCHEDULE, 400, json.loads(json.dumps(pace.to_json())))
    assert again == pace
    assert _rounds(again, 200, "well") == _rounds(pace, 200, "well")
    with pytest.raises(DlioError, match="not the state"):
        PruningPace.from_json(SCHEDULE, 400, {"speed": 3})


@pytest.mark.parametrize(
    "wrong",
    [{"tolerance": -1}, {"every": 0}, {"begin": 0.7, "end": 0.3}, {"share": 0}, {"most": 2}],
)
def test_invalid_schedules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}="):
        Schedule(**wrong)  # type: ignore[arg-type]

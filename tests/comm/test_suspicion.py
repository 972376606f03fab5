"""Decisions about ranks that hang or are slow, from boards, states of processes and a clock."""

import math
from dataclasses import replace

import pytest

from dlio.comm.board import WINDOW, RankPhase, RankRow
from dlio.comm.survival.suspicion import RankView, SlowRanks, hung_ranks

NOW = 1000.0


def _row(phase: RankPhase, for_s: float, seconds: float = 0.1, silent_s: float = 0.1) -> RankRow:
    """A row of a rank that has done the same for some time."""
    times = (seconds,) * WINDOW
    return RankRow(100, phase, NOW - for_s, NOW - silent_s, 1, times, times)


def _hung(
    *rows: RankRow | None,
    states: str = "SSSS",
    hang_after_s: float | None = None,
    watching_since: float = 0.0,
) -> list[int]:
    seen = {member: RankView(states[member], row) for member, row in enumerate(rows)}
    return [each.member for each in hung_ranks(seen, NOW, watching_since, hang_after_s)]


WAITS = _row(RankPhase.BLOCKED, 40)
STUCK = _row(RankPhase.COMPUTING, 41)


def test_the_one_rank_that_all_others_wait_for_hangs() -> None:
    assert _hung(WAITS, STUCK, WAITS) == [1]
    assert _hung(WAITS, STUCK) == [1]
    assert _hung(STUCK) == []


def test_nobody_is_suspected_before_the_others_have_waited_long_enough() -> None:
    for row in (_row(RankPhase.BLOCKED, 29), _row(RankPhase.COMPUTING, 29)):
        assert _hung(WAITS, STUCK, replace(WAITS, since=row.since)) == []
    assert _hung(WAITS, _row(RankPhase.COMPUTING, 29), WAITS) == []


@pytest.mark.parametrize("phase", [RankPhase.COMPUTING, RankPhase.UNWATCHED])
def test_nobody_is_suspected_while_another_rank_does_not_wait(phase: RankPhase) -> None:
    assert _hung(WAITS, STUCK, replace(WAITS, phase=phase)) == []


@pytest.mark.parametrize("phase", [RankPhase.BLOCKED, RankPhase.UNWATCHED])
@pytest.mark.parametrize("state", "SDR")
@pytest.mark.parametrize("silent_s", [0.1, 3600])
def test_a_rank_that_waits_for_a_source_or_for_others_is_never_suspected(
    phase: RankPhase, state: str, silent_s: float
) -> None:
    row = _row(phase, 3600, silent_s=silent_s)
    assert _hung(WAITS, row, WAITS, states=f"S{state}S") == []


def test_long_steps_take_long() -> None:
    long = _row(RankPhase.COMPUTING, 199, seconds=10)
    waits = _row(RankPhase.BLOCKED, 300)
    assert _hung(waits, long, waits) == []
    assert _hung(waits, replace(long, since=NOW - 201), waits) == [1]


def test_the_first_steps_may_take_any_time() -> None:
    assert _hung(WAITS, replace(STUCK, step=5), WAITS) == []
    assert _hung(WAITS, replace(STUCK, step=6), WAITS) == [1]


def test_a_time_of_the_users_counts_as_it_is() -> None:
    slow = replace(STUCK, seconds=(10.0,) * WINDOW)
    assert _hung(WAITS, slow, WAITS, hang_after_s=39) == [1]
    assert _hung(WAITS, slow, WAITS, hang_after_s=41) == []
    assert _hung(WAITS, STUCK, WAITS, hang_after_s=math.inf) == []


def test_pythons_lock_may_be_held_longer() -> None:
    def held(silent_s: float) -> RankRow:
        return _row(RankPhase.COMPUTING, silent_s, silent_s=silent_s)

    assert _hung(WAITS, held(34), WAITS) == []
    assert _hung(WAITS, held(36), WAITS) == [1]
    assert _hung(WAITS, held(1.5), WAITS, hang_after_s=1) == []
    # It has computed for long, and is silent since a moment ago.
    assert _hung(WAITS, replace(held(10), since=NOW - 100), WAITS) == []


def test_a_pause_of_the_whole_machine_counts_for_nobody() -> None:
    assert _hung(WAITS, STUCK, WAITS, watching_since=NOW - 10) == []
    held = _row(RankPhase.COMPUTING, 50, silent_s=50)
    assert _hung(WAITS, held, WAITS, watching_since=NOW - 34) == []


def test_dead_and_stopped_ranks_are_not_waited_for() -> None:
    busy = _row(RankPhase.COMPUTING, 1)
    for state in "ZXT":
        assert _hung(WAITS, STUCK, busy, states=f"SS{state}") == [1]
        assert _hung(WAITS, STUCK, None, states=f"SS{state}") == [1]
        assert _hung(WAITS, STUCK, WAITS, states=f"S{state}S") == []


def test_without_the_row_of_a_living_rank_nobody_is_suspected() -> None:
    assert _hung(WAITS, STUCK, None) == []


def test_the_reason_tells_what_the_rank_does() -> None:
    held = _row(RankPhase.COMPUTING, 50, silent_s=50)
    for row, state, word in ((STUCK, "S", "runs"), (STUCK, "D", "device"), (held, "S", "lock")):
        seen = {0: RankView("S", WAITS), 1: RankView(state, row)}
        (suspicion,) = hung_ranks(seen, NOW, 0.0, None)
        assert word in suspicion.why
        assert suspicion.why.startswith("all others of its node have waited 4")


def _rows(step: int, *busy: float) -> dict[int, RankRow]:
    row = replace(STUCK, step=step)
    return {member: replace(row, busy=(each,) * WINDOW) for member, each in enumerate(busy)}


def test_a_slow_rank_is_named_once_and_only_if_it_stays_slow() -> None:
    slow = SlowRanks()
    assert slow.look(_rows(20, 0.1, 0.1, 0.6)) == []
    assert slow.look(_rows(39, 0.1, 0.1, 0.6)) == []
    ((member, times),) = slow.look(_rows(40, 0.1, 0.1, 0.6))
    assert (member, round(times)) == (2, 6)
    assert slow.look(_rows(80, 0.1, 0.1, 0.6)) == []


def test_a_rank_that_was_slow_for_a_while_is_not_named() -> None:
    slow = SlowRanks()
    assert slow.look(_rows(20, 0.1, 0.6)) == []
    assert slow.look(_rows(30, 0.1, 0.1)) == []
    assert slow.look(_rows(41, 0.1, 0.6)) == []
    assert slow.look(_rows(60, 0.1, 0.6)) == []
    assert [member for member, _ in slow.look(_rows(61, 0.1, 0.6))] == [1]


def test_single_pauses_and_short_steps_make_nobody_slow() -> None:
    slow = SlowRanks()
    pauses = _rows(20, 0.1, 0.1)
    pauses[1] = replace(pauses[1], busy=(0.1,) * 11 + (6.0,) * 9)
    short = _rows(20, 0.001, 0.019)
    few = {member: replace(row, busy=row.busy[1:]) for member, row in _rows(20, 0.1, 0.9).items()}
    for rows in (pauses, short, few, _rows(20, 0.1, 0.5), _rows(20, 9.0)):
        for step in (20, 60):
            later = {member: replace(row, step=step) for member, row in rows.items()}
            assert slow.look(later) == []

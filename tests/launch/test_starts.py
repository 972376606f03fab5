"""Which ranks are started where, and whether again."""

import json
from dataclasses import asdict

import pytest

from dlio.launch.node.job_starts import Incident, JobStart, Patience, living, spread, start_of
from dlio.util.settings import START


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        (4, "ab", {"a": (0, 1), "b": (2, 3)}),
        (5, "ab", {"a": (0, 1, 2), "b": (3, 4)}),
        (3, "abc", {"a": (0,), "b": (1,), "c": (2,)}),
        (7, "abc", {"a": (0, 1, 2), "b": (3, 4), "c": (5, 6)}),
    ],
)
def test_ranks_are_spread_evenly(
    ranks: int, nodes: str, expected: dict[str, tuple[int, ...]]
) -> None:
    assert spread(ranks, list(nodes)) == expected


def test_every_rank_has_a_node() -> None:
    for ranks in range(1, 40):
        for nodes in (1, 2, 3, 7):
            placed = spread(ranks, [str(number) for number in range(nodes)])
            assert [rank for each in placed.values() for rank in each] == list(range(ranks))
            sizes = [len(each) for each in placed.values()]
            assert max(sizes) - min(sizes) <= 1


def test_ranks_of_lost_nodes_are_gone() -> None:
    placed = spread(6, ["a", "b", "c"])
    assert living(placed, []) == (0, 1, 2, 3, 4, 5)
    assert living(placed, ["b"]) == (0, 1, 4, 5)
    assert living(placed, ["a", "b", "c"]) == ()


def test_a_job_ends_after_three_starts_without_progress() -> None:
    patience = Patience()
    assert [patience.allows(turn) for turn in (4, 4, 4, 6, 6, 6, 6)] == [
        *(True, True, True),
        *(True, True, True, False),
    ]


def test_a_job_that_never_makes_a_step_ends() -> None:
    patience = Patience()
    assert [patience.allows(-1) for _ in range(3)] == [True, True, False]


def test_ranks_get_what_the_launcher_knows() -> None:
    incident = Incident((2, 3), ("b", "b"), 12.5, "left")
    start = JobStart(1, "token", 4, (0, 1), (incident,))
    assert start_of({START: json.dumps(asdict(start))}) == start
    assert start_of({}) is None

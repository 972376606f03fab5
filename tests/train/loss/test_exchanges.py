"""`dlio train --fault-tolerance shrink` with every exchange: ranks are lost, and no sample is."""

from typing import Any

import pytest

from tests.train.loss.conftest import Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]


def _nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("exchange", "ranks", "ends", "more"),
    [
        _nightly("allreduce+int8", 3, {0: ["kill", 3, 2]}, ()),
        _nightly("allreduce+adaptive", 4, {1: ["kill", 3, 0], 3: ["kill", 5, 5]}, ()),
        _nightly("allreduce+onebit", 3, {0: ["kill", 2, 5], 2: ["kill", 9, 3]}, ()),
        ("tree", 4, {0: ["kill", 3, 2], 2: ["kill", 6, -1]}, ()),
        _nightly("parameter-server+threshold", 3, {0: ["kill", 4, 3]}, ()),
        ("hierarchical+bf16", 4, {0: ["kill", 3, 3], 1: ["kill", 6, 1]}, ("--pretend-nodes", "2")),
        _nightly("hierarchical", 4, {2: ["kill", 3, 5]}, ("--pretend-nodes", "2")),
    ],
)
@pytest.mark.nightly
def test_gradients_are_summed_along_the_ways_that_are_left(
    run: Run, exchange: str, ranks: int, ends: dict[int, list[object]], more: tuple[str, ...]
) -> None:
    ran = run(ranks, ends, "--exchange", exchange, *more)
    check_exact(ran)
    assert ran.errors == ""


def test_steps_of_a_lost_rank_count_up_to_the_last_round(run: Run) -> None:
    ran = run(3, {1: ["kill", 5, 2]}, "--exchange", "local-sgd(3)")
    check_exact(ran)
    assert ran.steps[0, 1] == {0, 1, 2}  # The fourth was made, and is in no round.


@pytest.mark.parametrize(
    ("exchange", "ranks", "ends", "more"),
    [
        _nightly("diloco(2)+int8", 4, {0: ["kill", 4, -1], 3: ["kill", 9, 0]}, ()),
        _nightly("local-sgd(4)+adaptive", 3, {2: ["kill", 9, 5]}, ("--accumulate", "2")),
    ],
)
def test_rounds_go_on_without_the_lost_ones(
    run: Run, exchange: str, ranks: int, ends: dict[int, list[object]], more: tuple[str, ...]
) -> None:
    check_exact(run(ranks, ends, "--exchange", exchange, *more))


@pytest.mark.parametrize(
    ("exchange", "ranks", "ends", "nodes"),
    [
        _nightly("gossip", 3, {1: ["kill", 5, 2]}, 1),
        _nightly("gossip(gradient)", 4, {0: ["kill", 3, -1], 2: ["kill", 6, 4]}, 1),
        _nightly("gossip+adaptive", 4, {3: ["kill", 4, 0], 1: ["kill", 5, -1]}, 1),
        _nightly("gossip", 4, {0: ["kill", 4, 2]}, 2),
        ("gossip+int8", 4, {1: ["kill", 4, 5], 2: ["kill", 6, -1]}, 2),
        _nightly("gossip(gradient)", 3, {0: ["kill", 5, 0]}, 2),
        _nightly("noloco(2)", 4, {1: ["kill", 5, 2], 3: ["kill", 6, -1]}, 1),
        _nightly("noloco(2)+bf16", 4, {0: ["kill", 4, 2]}, 2),
        _nightly("noloco(1)+adaptive", 4, {1: ["kill", 5, 2], 3: ["kill", 6, -1]}, 1),
        ("asgd", 3, {2: ["kill", 5, 3]}, 1),
        _nightly("asgd+bf16", 4, {0: ["kill", 4, -1], 1: ["kill", 6, 0]}, 1),
    ],
)
@pytest.mark.daily("gossip+int8-4-ends4-2")
def test_steps_of_a_lost_rank_count_up_to_the_last_one_that_others_took_in(
    run: Run, exchange: str, ranks: int, ends: dict[int, list[object]], nodes: int
) -> None:
    ran = run(ranks, ends, "--exchange", exchange, "--pretend-nodes", str(nodes))
    check_exact(ran, alike=False)
    # All end in the first seven batches, of which every rank has samples: a pass each.
    for rank, (_, step, _) in ends.items():
        steps = ran.steps.get((0, rank), set())
        assert steps == set(range(len(steps)))
        assert len(steps) < int(str(step))

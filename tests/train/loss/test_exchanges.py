"""`dlio train --fault-tolerance shrink` with every exchange: ranks are lost, and no sample is."""

import pytest

from tests.train.loss.conftest import Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold]


@pytest.mark.parametrize(
    ("exchange", "ranks", "ends", "more"),
    [
        ("allreduce+int8", 3, {0: ["kill", 3, 2]}, ()),
        ("allreduce+adaptive", 4, {1: ["kill", 3, 0], 3: ["kill", 5, 5]}, ()),
        ("allreduce+onebit", 3, {0: ["kill", 2, 5], 2: ["kill", 9, 3]}, ()),
        ("tree", 4, {0: ["kill", 3, 2], 2: ["kill", 6, -1]}, ()),
        ("parameter-server+threshold", 3, {0: ["kill", 4, 3]}, ()),
        ("hierarchical+bf16", 4, {0: ["kill", 3, 3], 1: ["kill", 6, 1]}, ("--pretend-nodes", "2")),
        ("hierarchical", 4, {2: ["kill", 3, 5]}, ("--pretend-nodes", "2")),
    ],
)
def test_gradients_are_summed_along_the_ways_that_are_left(
    run: Run, exchange: str, ranks: int, ends: dict[int, list[object]], more: tuple[str, ...]
) -> None:
    ran = run(ranks, ends, "--exchange", exchange, *more)
    check_exact(ran)
    assert ran.errors == ""

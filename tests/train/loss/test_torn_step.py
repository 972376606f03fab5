"""A rank ends at each place of a step: the others have the same weights, and no sample is lost."""

from pathlib import Path

import pytest

from tests.train.loss.conftest import Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold, pytest.mark.nightly]
RANKS = 4
PLACES = (-1, 0, 2, 5, "begun", "first", "closed", "taken")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_step_that_a_rank_tears_is_repaired(rank: int, place: int | str, run: Run) -> None:
    """Another one ends elsewhere in a later step, which three share."""
    other = PLACES[(PLACES.index(place) + 3 + rank) % len(PLACES)]
    ran = run(RANKS, {rank: ["kill", 3, place], (rank + 1) % RANKS: ["kill", 6, other]})
    check_exact(ran)
    assert len(ran.losses) == 2
    # A rank whose sums were not closed anywhere does not count; one that had taken them does.
    steps = ran.steps[0, rank]
    assert steps >= {0, 1}
    assert steps <= {0, 1, 2}
    if place in (-1, 0, 2, 5):
        assert 2 not in steps
    if place == "taken":
        assert 2 in steps


@pytest.mark.parametrize("rank", [1, 3])
def test_ranks_that_lack_sums_get_them_from_those_that_have_them(
    rank: int, run: Run, tmp_path: Path
) -> None:
    """One of two ranks that have all sums ends, and a third sees it before it has them."""
    ends = {rank: ["kill", 3, "closed"], 2: ["", 3, "late"]}
    ran = run(RANKS, ends, "--exchange", "parameter-server")
    check_exact(ran)
    assert [loss["ranks"] for loss in ran.losses] == [[rank]]
    assert 2 in ran.steps[0, rank]  # It counted: the sums with its gradients were given.
    assert len(list(tmp_path.glob("given-*"))) == RANKS - 1

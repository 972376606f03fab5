"""Early ends of trials: decisions depend on results and numbers, not on time."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dlio.features.search.successive_halving import SuccessiveHalving, TrialCourse


def ended(halving: SuccessiveHalving, values: list[list[float]], order: list[int]) -> list[int]:
    """Return the epochs that each trial trains; `order` says who trains an epoch next."""
    done = [0] * len(values)
    stopped: set[int] = set()

    def courses() -> dict[int, TrialCourse]:
        return {
            k: TrialCourse(values[k][: done[k]], k in stopped or done[k] == halving.epochs)
            for k in range(len(values))
        }

    while any(not course.has_ended for course in courses().values()):
        for k in order:
            if courses()[k].has_ended:
                continue
            goes_on = halving.goes_on(k, done[k], courses()) if done[k] else True
            if goes_on:
                done[k] += 1
            elif goes_on is False:
                stopped.add(k)
    return done


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=9, max_size=9), min_size=1, max_size=7),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2]),
)
def test_decisions_do_not_depend_on_the_order_in_which_trials_run(
    values: list[list[float]], random: Random, brackets: int
) -> None:
    halving = SuccessiveHalving(9, 1, 3, brackets)
    order = list(range(len(values)))
    first = ended(halving, values, order)
    shuffled = random.sample(order, len(order))
    assert ended(halving, values, shuffled) == first


def test_a_trial_goes_on_if_it_is_among_the_best_third() -> None:
    halving = SuccessiveHalving(9, 1, 3)
    courses = {k: TrialCourse([value], True) for k, value in enumerate([5.0, 1, 4, 3, 2, 6, 4.5])}
    decisions = [halving.goes_on(k, 1, courses) for k in courses]
    # The best of up to five; the two best of six and more.
    assert decisions == [True, False, False, False, False, True, False]
    assert halving.goes_on(1, 2, {1: TrialCourse([1, 1], False)})
    assert halving.looks(0) == [1, 3]


def test_a_value_that_is_not_a_number_never_goes_on() -> None:
    assert not SuccessiveHalving(9).goes_on(0, 1, {0: TrialCourse([-math.inf], False)})


def test_a_trial_waits_for_lower_numbers_of_its_bracket_alone() -> None:
    halving = SuccessiveHalving.hyperband(9, 1, 3)
    assert (halving.brackets, halving.looks(0), halving.looks(1)) == (2, [1, 3], [3])
    running, mine = TrialCourse([], False), TrialCourse([1.0], False)
    assert halving.goes_on(2, 1, {0: running, 1: running, 2: mine}) is None
    assert halving.goes_on(2, 1, {0: TrialCourse([], True), 1: running, 2: mine})
    assert halving.goes_on(0, 1, {0: mine, 1: running})

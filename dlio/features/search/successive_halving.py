"""Early ends of trials by successive halving, as a pure function of results.

ASHA (Li et al., arXiv 1810.05934) lets a trial go on at a look if it is among the best 1/reduction
of the trials that have come to it. Here these are the trials with lower numbers, whenever they come
to it: decisions depend neither on the number of ranks nor on their speed, and a search that was
killed repeats them. A trial that comes early waits. Hyperband (arXiv 1603.06560) gives trials in
turn a first look that is 1, reduction, reduction**2, ... times as late.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrialCourse:
    """The course of a trial so far."""

    goodness: Sequence[float]
    """Greater for a better value of the objective, after each epoch; -inf for NaN."""
    has_ended: bool
    """True if no more epochs follow."""


@dataclass(frozen=True, slots=True)
class SuccessiveHalving:
    """Rules of a search."""

    epochs: int
    """Epochs of a trial that is not stopped."""
    first_look: int = 1
    """Epochs before the first look."""
    reduction: int = 3
    brackets: int = 1
    """Groups of trials with different first looks; 1 for ASHA."""

    @classmethod
    def hyperband(cls, epochs: int, first_look: int, reduction: int) -> "SuccessiveHalving":
        """Return rules with as many brackets as there are looks."""
        looks = len(cls(epochs, first_look, reduction).looks(0))
        return cls(epochs, first_look, reduction, max(1, looks))

    def looks(self, number: int) -> list[int]:
        """Return the numbers of epochs after which a trial may be stopped."""
        look, looks = self.first_look * self.reduction ** (number % self.brackets), []
        while look < self.epochs:
            looks.append(look)
            look *= self.reduction
        return looks

    def goes_on(self, number: int, epochs: int, courses: Mapping[int, TrialCourse]) -> bool | None:
        """Decide on a trial after a number of epochs, by the courses of all trials.

        Returns None if a trial with a lower number has to come to this look first.
        """
        if epochs not in self.looks(number):
            return True
        mine = courses[number].goodness[epochs - 1]
        others = []
        for other in range(number % self.brackets, number, self.brackets):
            course = courses[other]
            if len(course.goodness) >= epochs:
                others.append(course.goodness[epochs - 1])
            elif not course.has_ended:
                return None
        if mine == -math.inf:
            return False
        ranked = sorted([*others, mine], reverse=True)
        return mine >= ranked[max(1, len(ranked) // self.reduction) - 1]

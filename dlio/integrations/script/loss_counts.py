"""The numbers that terms of a loss count, by which `loss_weights` weighs them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.exchange.loss_terms import NEARLY_NONE, LossTerm, LossTerms, is_round
from dlio.integrations.script.loss_plan import OWN, LossPlans
from dlio.integrations.script.script_assigner import ScriptBatch
from dlio.integrations.script.script_lines import script_line
from dlio.integrations.script.share import ScriptContext

TERMS: Final = 24
"""Most terms of a loss with weights of their own."""
DIVISORS: Final = 3
ROW: Final = 5 + 4 * DIVISORS
_READ: Final = 2.0**-20
"""Added to the 1 of a divisor that counts where the script has read it from a tensor."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all ranks, of one backward: of samples, their squares, and losses."""

    samples: float
    squared: float
    loss_by_samples: float
    loss_by_count: float
    loss: float
    alike: bool
    """True if all ranks have the same terms."""
    terms: npt.NDArray[np.float64]
    """Sums of `row_of`, one row for each term."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number that a mean divides by, and its sums over the ranks."""

    own: float
    whole: float
    squared: float
    by_samples: float
    """Sum of products with the ranks' samples."""
    place: int = OWN
    """Which divisor of a sum it is."""
    is_of_data: bool = False
    """True for a number of the script's that follows from the samples' values."""

    def is_even(self, totals: Totals) -> bool:
        """True if the ranks' counts are in proportion to their samples."""
        product = self.squared * totals.squared
        return abs(self.by_samples**2 - product) <= 1e-9 * product


def row_of(
    term: LossTerm, batch: ScriptBatch, is_dummy: bool, numbers_read: Collection[float]
) -> list[float]:
    """Return the numbers that ranks add up for a term.

    They are its count, the square, the product with the samples, 1, 1 if it may count padding; and
    for each divisor its value, the square, the product, and 1 if it is a number of samples, or one
    that the script has read from a tensor of the batch.
    """
    row = [0.0] * ROW
    if not batch.weight or is_dummy:
        return row
    row[:5] = [term.count, term.count**2, term.count * batch.weight, 1.0, float(term.pads)]
    for number, divisor in enumerate(term.divisors[:DIVISORS]):
        value = term.divided_by(number)
        counts = float(term.counts(divisor.value, int(batch.weight)))
        is_kept = divisor.value == 1 and 0 in numbers_read  # As by max(1, count.item()).
        if (divisor.value in numbers_read or is_kept) and not divisor.is_factor:
            counts = 1 + _READ
            value = NEARLY_NONE if divisor.value == 1 and term.selects_nothing else value
        row[5 + 4 * number : 9 + 4 * number] = [
            value,
            value**2,
            value * batch.weight,
            counts,
        ]
    return row


def count_of(
    context: ScriptContext,
    term: LossTerm,
    row: npt.NDArray[np.float64],
    whole: int,
    plans: LossPlans,
) -> Count | None:
    """Return the divisor of a mean; None for a sum.

    All ranks decide alike, as they do by totals. `whole` is the size of the batch.
    """
    ranks = row[3]
    if not term.is_sum:
        for number, divisor in enumerate(term.divisors[:DIVISORS]):
            values, squares = row[5 + 4 * number : 7 + 4 * number].tolist()
            if divisor.is_tensor and ranks * squares - values**2 > 1e-9 * values**2:
                context.say(
                    f"{script_line()}: a mean over the batch is divided or multiplied there by "
                    "a number that is another one on each rank: the gradient is not that of "
                    "one process. If it is a mean or sum of weights, divide a sum by a sum"
                )
        return Count(term.count, *row[:3].tolist())
    for number, divisor in enumerate(term.divisors[:DIVISORS]):
        values, squares, products, counts = row[5 + 4 * number : 9 + 4 * number].tolist()
        differs = ranks * squares - values**2 > 1e-9 * values**2
        is_read = counts % 1 > 0
        place = place_of(term, number)
        if divisor.is_tensor:
            if not divisor.is_factor:
                return Count(divisor.value, values, squares, products, number)
        elif (
            divisor.value == whole
            and not (differs or is_read)
            and (context.is_alone or counts < ranks)
        ):
            # The script's batch size: a constant; and not the part of another loader's batch.
            continue
        elif plans.is_constant(place, counts < ranks, differs):
            continue
        elif (counts >= ranks or differs) and divisor.is_factor and is_round(divisor.value):
            context.say(
                f"{script_line()}: a sum over the batch is multiplied by "
                f"{1 / divisor.value:g}, taken for a constant; if that is 1 / len(batch), "
                "divide by len(batch) instead"
            )
        elif counts >= ranks or plans.is_of_data(place):
            is_of_data = is_read or plans.is_of_data(place)
            return Count(divisor.value, values, squares, products, number, is_of_data)
    return None


def likely_count(parts: LossTerms, counts: Callable[[LossTerm, int], bool]) -> float:
    """Return the divisor of the first term, as it seems to this rank.

    `counts` tells whether a divisor that is a number of the script's seems to be one.
    """
    if not parts.terms:
        return 0.0
    term = parts.terms[0]
    by = [
        each.value
        for number, each in enumerate(term.divisors[:DIVISORS])
        if not each.is_factor and (each.is_tensor or counts(term, number))
    ]
    return by[0] if by and term.is_sum else term.count


def place_of(term: LossTerm, number: int) -> str:
    """Return a name of a divisor of a term of the loss in the present line of the script."""
    return f"{script_line()} {term.name} {number}"

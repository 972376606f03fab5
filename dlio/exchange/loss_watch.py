"""Tells of losses that `dlio.distribute` is not made for: its mean over ranks is one process's
gradient of a mean over samples only.

Looks at the graphs of the first losses of each line that calls backward, which a function may do
for several in turn, of the 16th, 32nd, 64th and so on, and of the first ones of batches that the
ranks share unevenly.
"""

import logging
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from dlio.exchange.loss_terms import GraphStates, LossTerm, find_terms, is_count
from dlio.exchange.mixed_samples import mixed_samples
from dlio.exchange.step_watch import line_of_script
from dlio.util.printable import log_line

TensorsOf = torch.Tensor | Sequence[torch.Tensor]
_MOST_NODES: Final = 20_000
"""Nodes of a graph among which a parameter is looked for."""
_OF_UNEVEN: Final = 2
"""Looks at batches of which ranks have unequal parts, besides."""
_FIRST: Final = 8
"""Losses of a line that are looked at, one after the other."""
_EQUAL: Final = 1e-5
"""Largest relative difference of a count from the inverse of its inverse."""
_SURE: Final = 3
"""Looks after which a number that has stayed the same does not count the data's elements."""


@dataclass(slots=True)
class _Line:
    """A line of the script that calls backward."""

    calls: int = 0
    uneven: int = 0
    """Looks at batches of which ranks have unequal parts."""
    was_told: bool = False
    counts: set[float] = field(default_factory=set)
    """Divisors of sums that were the number of samples or elements."""
    constants: dict[str, list[float]] = field(default_factory=dict)
    """By term, other divisors of its sums, one for each look."""


@dataclass(frozen=True, slots=True)
class BatchCount:
    """How a rank's gradients count now."""

    samples: int | None
    """Samples of its batch; None if unknown."""
    weight: float
    is_even: bool
    """True if all ranks count alike."""


class LossWatch:
    """Looks at the losses of one rank.

    Args:
        ranks: number of ranks.
        tells: True on the rank that tells.
        parameters: those that are exchanged.
        weighing: returns how gradients count now.
        counted: called with a line and the counts of its loss's means, which are to be the same on
            all ranks.
    """

    def __init__(
        self,
        ranks: int,
        tells: bool,
        parameters: Collection[torch.Tensor],
        weighing: Callable[[], BatchCount],
        counted: Callable[[str, str], None],
    ) -> None:
        self._ranks, self._tells, self._parameters = ranks, tells, parameters
        self._weighing, self._counted = weighing, counted
        self._lines: dict[str, _Line] = {}

    def look(self, tensors: TensorsOf, gradients: TensorsOf | None) -> None:
        """Look at the tensors on which backward is about to be called."""
        where = line_of_script().strip()
        line = self._lines.setdefault(where, _Line())
        line.calls += 1
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        now = self._weighing()
        is_first_uneven = not now.is_even and line.uneven < _OF_UNEVEN
        is_due = line.calls <= _FIRST or line.calls.bit_count() == 1 or is_first_uneven
        if not (is_due and self._are_ours(roots)):
            return
        line.uneven += not now.is_even
        given = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients or ())
        states = GraphStates(now.samples or sys.maxsize, without_zeros=True)
        parts = find_terms(roots, states, (), given)
        if parts.is_given or not now.weight:
            return
        how = f"the {parts.unknown[0]} of a value of its batch" if parts.unknown else None
        how = how or mixed_samples(roots, now.samples or 0, parts)
        if how:
            self._tell(
                line,
                f"{where}: the loss is not a mean over samples there, but {how}: distribute "
                "averages the gradients of the ranks' losses, each of its own batch, which is not "
                "the gradient of one process with all samples",
            )
        counts = [self._count(term, line, now, where) for term in parts.terms]
        known = [f"{each:.6g}" for each in counts if each is not None]
        self._counted(where, ", ".join(known))

    def _are_ours(self, roots: Sequence[torch.Tensor]) -> bool:
        """True if backward reaches a parameter that is exchanged."""
        left = [each.grad_fn for each in roots if each.grad_fn is not None]
        seen: set[Any] = set(left)
        while left and len(seen) < _MOST_NODES:
            node: Any = left.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and variable in self._parameters:
                return True
            fresh = [each for each, _ in node.next_functions if each and each not in seen]
            seen.update(fresh)
            left += fresh
        return False

    def _count(self, term: LossTerm, line: _Line, now: BatchCount, where: str) -> float | None:
        """Return how many elements a mean counts for each sample, None if it is none."""
        if not term.is_sum:
            return term.count / now.weight
        size = now.samples or 0
        product = math.prod(each.value for each in term.divisors)
        for each in term.divisors:
            counts = is_count(term, each, size) or term.counts(each.value, size)
            if counts or (now.is_even and each.value in line.counts):
                line.counts.add(each.value)
                return each.value / now.weight
        if term.counts(product, size) or (now.is_even and product in line.counts):
            line.counts.add(product)
            return product / now.weight
        if now.is_even and math.isclose(product, 1 / self._ranks):
            return None  # The mean over ranks of as many times the sum.
        by = ""
        if term.divisors:
            seen = line.constants.setdefault(term.key, [])
            seen.append(product)
            if not _is_coefficient(term, product):
                if len(set(seen)) > 1:
                    return product / now.weight
                if now.is_even and len(seen) < _SURE:
                    return None
            by = f" divided by {product:g}, which is not their number,"
        gap = (
            f": they are 1/{self._ranks} of"
            if now.is_even
            else (", by their samples, of which they have unequal parts here: they are not")
        )
        self._tell(
            line,
            f"{where}: the loss is a sum over samples there ({term.name}),{by} and distribute "
            f"averages the gradients{gap} one process's with the samples of all; divide the "
            "sum by the number of its samples",
        )
        return None

    def _tell(self, line: _Line, text: str) -> None:
        if self._tells and not line.was_told:
            log_line(logging.WARNING, "%s", text)
        line.was_told = True


def _is_coefficient(term: LossTerm, product: float) -> bool:
    """True if a sum is multiplied by numbers of the script alone that are the inverse of no count,
    such as one that grows from step to step."""
    are_factors = all(each.is_factor and not each.is_tensor for each in term.divisors)
    return are_factors and not math.isclose(product, max(round(product), 1), rel_tol=_EQUAL)

"""Losses whose weights follow from a rank's own numbers, without a message before backward.

The exchange divides a sum of gradients by the sum of the ranks' weights, which travels with it. A
loss that is one mean over `count` elements needs no more than `count` as the weight; and where all
means count in proportion to samples, a rank's samples will do, and a sum is over the batch. Which
of these a loss is, its first steps tell, in which ranks add up their counts; all ranks draw the
same conclusion from the totals.

Each rank compares its later numbers with the conclusion. One that finds others says so with its
gradients, and all ranks add up counts there again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from dlio.exchange.loss_terms import (
    NEARLY_NONE,
    LossTerm,
    LossTerms,
    chain_to,
    count_along,
)

_STEPS: Final = 3
"""Steps with the same conclusion after which no messages are sent."""
_FEWEST: Final = 1e-6
"""Elements for each sample that tell something: with fewer, masks of all ranks were empty."""
OWN: Final = -1
"""Stands for a mean's own count, where other numbers are places of divisors."""


@dataclass(frozen=True, slots=True)
class TermUse:
    """The conclusion about one term, from totals: the same on all ranks."""

    divisor: int | None
    """Which divisor of a sum counts elements; `OWN` for a mean; None for a sum over the batch."""
    per_sample: float = 0.0
    """Elements counted for each sample, of all ranks; 0 for a sum."""
    is_even: bool = True
    """True if each rank's count is in proportion to its samples."""
    masks: bool = False
    """True if a mask has been seen: other counts do not come from padding."""

    def agrees_with(self, other: "TermUse") -> bool:
        same = self.divisor == other.divisor and self.is_even == other.is_even
        return same and abs(self.per_sample - other.per_sample) <= 1e-9 * self.per_sample


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Weights of one backward."""

    weight: float
    """Of this rank's gradients."""
    factors: Sequence[float] = ()
    """Of the gradient of each term."""
    of_loss: float | None = 1.0
    """Factor of this rank's loss in the mean of all ranks, which is then that of the whole batch;
    None if no mean is."""
    is_odd: bool = False
    """True if this rank's numbers are others than those of the conclusion."""
    is_wrong: bool = False
    """True if the weights are wrong for that reason."""


@dataclass(slots=True)
class LossPlan:
    """Knowledge of all ranks about a loss with the same terms at the same line."""

    terms: str = ""
    """Their names."""
    added: str = field(init=False)
    """The same, as an addition to the call of a backward."""
    uses: tuple[TermUse, ...] = ()
    constants: tuple[frozenset[float], ...] = ()
    """By term, the divisors of sums that are not counts."""
    chain: tuple[type, ...] = ()
    """Types of nodes from a loss that is a single mean to it, if one look tells its count."""
    _agreed: int = 0
    _failed: bool = False
    _is_mean: bool = field(default=False)
    """True for a single mean: its count is the weight."""

    def __post_init__(self) -> None:
        self.added = f" of {self.terms}"

    @property
    def is_settled(self) -> bool:
        """True if no message is needed."""
        return self._agreed >= _STEPS and not self._failed

    @property
    def is_single_mean(self) -> bool:
        """True for one mean over elements that a rank counts alone, and nothing else."""
        return self._is_mean and self.uses[0].divisor == OWN

    def learn(self, parts: LossTerms, uses: Sequence[TermUse], knows_batch: bool) -> None:
        """Conclude from a step in which ranks have added up their counts.

        `knows_batch` is False where ranks do not know the number of the samples of all others.
        """
        partly = bool(parts.unknown or parts.hidden)
        self._is_mean = len(uses) == 1 and uses[0].divisor is not None and not partly
        sums = any(each.divisor is None for each in uses)
        is_even = all(each.is_even for each in uses)
        can = self._is_mean or (is_even and not any(term.varies for term in parts.terms))
        is_empty = any(each.divisor is not None and each.per_sample < _FEWEST for each in uses)
        if not can or is_empty or (sums and not knows_batch):
            self._agreed = 0
            return
        before, self.uses = self.uses, tuple(uses)
        alike = len(before) == len(uses) and (
            self._is_mean
            or all(old.agrees_with(new) for old, new in zip(before, uses, strict=True))
        )
        alike &= [each.divisor for each in before] == [each.divisor for each in uses]
        self._agreed = self._agreed + 1 if alike else 1
        self.constants = tuple(
            frozenset(each.value for each in term.divisors if not each.is_tensor)
            for term in parts.terms[: len(uses)]
        )

    def doubt(self, is_wrong: bool) -> None:
        """Have ranks add up their counts again: from now on, or until they agree once more."""
        self._agreed, self._failed = 0, self._failed or is_wrong

    def step(self, parts: LossTerms, samples: float, whole: float, divides: bool) -> PlannedStep:
        """Return the weights of a backward of this rank, with some of the `whole` samples of a
        step; `divides` if these are a batch of the script."""
        if not samples:
            return PlannedStep(0.0)
        size, ratio = int(samples), whole / samples if divides else 1.0
        odd = wrong = False
        weight, factors = samples, []
        for term, use, constants in zip(parts.terms, self.uses, self.constants, strict=False):
            if use.divisor is None:
                wrong |= _may_count(term, constants, size, whole)
                factors.append(ratio)
                continue
            count = term.count
            if use.divisor != OWN:
                count = term.divided_by(use.divisor)
                wrong |= not _is_count(term, use.divisor, size)
            if count > NEARLY_NONE:
                count /= use.per_sample * samples
            relative = count
            is_usual = abs(relative - 1) <= 1e-9
            if self._is_mean:
                weight, relative = relative * samples, 1.0
                odd |= not is_usual and term.pads and not use.masks
            else:
                wrong |= not is_usual
            factors.append(relative)
        return PlannedStep(weight, factors, self._of_loss(parts, ratio), odd or wrong, wrong)

    def quick_weight(self, root: torch.Tensor, samples: float) -> float | None:
        """Return the weight that `step` does, without a search for the terms of a loss; None if it
        takes one."""
        if not (self.chain and samples and self.is_settled):
            return None
        count, use = count_along(root, self.chain), self.uses[0]
        if count is None or not use.per_sample:
            return None
        weight = count / use.per_sample
        is_usual = abs(weight - samples) <= 1e-9 * samples
        return weight if is_usual or use.masks else None

    def _of_loss(self, parts: LossTerms, ratio: float) -> float | None:
        sums = [use.divisor is None for use in self.uses]
        if not sums or parts.unknown or parts.hidden or len(parts.terms) > len(sums):
            return None
        if not any(sums):
            return 1.0
        return ratio if all(sums) and not parts.has_constants else None


@dataclass(slots=True)
class LossPlans:
    """The plans of the losses of one loader's batches.

    By loader, as one line of the script may serve for several losses.
    """

    _plans: dict[tuple[str, str], LossPlan] = field(default_factory=dict)
    """By line and terms."""
    settled: set[str] = field(default_factory=set)
    """Lines of which a plan has been settled."""
    divergent: set[str] = field(default_factory=set)
    """Lines where ranks have had different terms in one step."""
    loops: dict[str, set[str]] = field(default_factory=dict)
    """By line, the names of terms of the loss that a loop adds up, sample by sample."""
    begun: bool = False
    """True once a batch was dealt to the ranks."""
    dim: int = 0
    """Dimension of the samples in the tensors of batches, once a part shows it."""
    has_pairs: bool = False
    """True once some rank had two samples of a batch."""
    looked: dict[tuple[str, int], bool] = field(default_factory=dict)
    """By the loop, whether the calls on a batch were looked at: see `MixedInputs`."""
    _batches: Counter[tuple[str, int]] = field(default_factory=Counter)
    _constants: set[str] = field(default_factory=set)
    _of_data: set[str] = field(default_factory=set)
    _quick: dict[str, LossPlan] = field(default_factory=dict)

    def awaits_look(self, loop: tuple[str, int]) -> bool:
        """Count a batch; True if the calls on it are to be looked at: on the 1st, 2nd, 4th, 8th and
        so on in a loop, or a later one if that of another loader was looked at then."""
        self._batches[loop] += 1
        if self._batches[loop].bit_count() == 1:
            self.looked[loop] = False
        return not self.looked[loop]

    def plan(self, line: str, terms: str) -> LossPlan:
        """Return the plan of a line's loss with some terms."""
        return self._plans.setdefault((line, terms), LossPlan(terms))

    def quick(self, line: str) -> "LossPlan | None":
        """Return the plan by which a line's loss may be weighed at a glance: its only one."""
        return self._quick.get(line) if line not in self.divergent else None

    def settle(self, line: str, plan: "LossPlan", root: torch.Tensor, parts: LossTerms) -> None:
        """Note that a line's plan is settled, for losses like this one."""
        is_first = line not in self.settled
        self.settled.add(line)
        if is_first and plan.is_single_mean and not parts.has_constants:
            plan.chain = chain_to(root, parts.terms[0])
            self._quick[line] = plan
        elif self._quick.get(line) is not plan:
            self._quick.pop(line, None)

    def is_constant(self, divisor: str, counts_not: bool, differs: bool) -> bool:
        """True if a divisor is known to be a constant, as parts of other sizes had it, too, which
        this step may show: it may be the size of a part by chance.

        `counts_not` if it is not the size of a rank's part; `differs` if ranks have several. With
        both, it is none from now on: it follows from the samples' values.
        """
        if counts_not and differs:
            self._of_data.add(divisor)
        elif counts_not:
            self._constants.add(divisor)
        return divisor in self._constants and divisor not in self._of_data

    def is_of_data(self, divisor: str) -> bool:
        """True if ranks have had several values of a divisor that are not sizes of their parts."""
        return divisor in self._of_data


def _is_count(term: LossTerm, place: int, size: int) -> bool:
    divisor = term.divisors[place]
    return divisor.is_tensor or term.counts(divisor.value, size)


def _may_count(term: LossTerm, constants: frozenset[float], size: int, whole: float) -> bool:
    """True if a divisor that was taken for a constant has become a count of elements."""
    return any(
        not each.is_tensor
        and each.value != whole
        and each.value not in constants
        and term.counts(each.value, size)
        for each in term.divisors
    )

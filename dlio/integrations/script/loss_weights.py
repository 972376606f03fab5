"""Weights of the terms of a script's loss, so that the sum over ranks is one process's gradient.

A rank's gradients are weighed by its samples. That is right for a mean over samples. For each other
term of a loss, the gradient that enters it is multiplied by a factor during backward:

    sum over samples               all samples / own samples
    mean over `count` elements     own count / all counts * all samples / own samples

such as a sum that is divided by the batch size of the script, or a mean over tokens that are not
masked. In the first steps of a line of the script, ranks add up their counts before backward, in
one message of 2.5 KiB; later only where a rank's own numbers do not tell (see `loss_plan`).
"""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.errors import UsageError
from dlio.exchange import Exchange
from dlio.exchange.loss_terms import (
    GraphStates,
    LossTerm,
    LossTerms,
    find_terms,
    is_count,
)
from dlio.exchange.tensor_notes import TensorNotes
from dlio.integrations.script.learned_products import (
    LearnedProduct,
    learned_products,
    multiplied_values,
)
from dlio.integrations.script.loss_counts import (
    ROW,
    TERMS,
    Count,
    Totals,
    count_of,
    likely_count,
    place_of,
    row_of,
)
from dlio.integrations.script.loss_notices import LossNotices
from dlio.integrations.script.loss_plan import LossPlan, PlannedStep, TermUse
from dlio.integrations.script.script_assigner import ScriptBatch
from dlio.integrations.script.script_lines import script_line
from dlio.integrations.script.share import ScriptContext


class ScriptLossWeights:
    """Corrects the weights of a script's losses in backward. Collective, as the exchange is.

    `close` ends its messages.
    """

    def __init__(
        self,
        comm: Communicator,
        context: ScriptContext,
        exchanges: Callable[[], Sequence[Exchange]],
    ) -> None:
        self._recovers = recovery_of(comm) is not None
        self._comm = comm if self._recovers else comm.dup()
        self._context, self._exchanges = context, exchanges
        self.latest: float | None = None
        """Weight of this rank's gradients in the latest backward; None if there was none."""
        self.wait_s = 0.0
        """Seconds that this rank has waited for others so far."""
        self.is_inside = False
        """True within a backward."""
        self._notices = LossNotices(comm, context)
        self._plan = LossPlan()
        """That of the latest backward."""
        context.guard.doubted = self.doubted
        self._unscaled: TensorNotes[torch.Tensor] = TensorNotes()
        """By a loss that a gradient scaler has scaled, the loss itself."""

    def close(self) -> None:
        if not self._recovers:
            self._comm.close()

    def around_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap `torch.autograd.backward`."""

        @wraps(original)
        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            # A backward inside another one is that of a checkpoint.
            if self.is_inside or self._context.aside:
                original(tensors, *args, **options)
                return
            self._context.part = 1.0
            self._context.before_backward()
            self._context.backward()
            lead = self._context.lead
            if lead is None:
                original(tensors, *args, **options)
                return
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self.is_inside = True
            try:
                if self._quick(roots, lead):
                    loss: _WholeLoss | None = self._whole_loss(roots[0], None)
                    original(tensors, *args, **options)
                else:
                    given = args[0] if args else options.get("grad_tensors")
                    gradients = [given] if isinstance(given, torch.Tensor) else list(given or ())
                    with self._weighed(roots, gradients, lead) as loss:
                        original(tensors, *args, **options)
            finally:
                self.is_inside = False
            keeps = any(args[1:3]) or options.get("retain_graph") or options.get("create_graph")
            if loss is not None and not keeps:
                loss.put()

        return backward

    def around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `GradScaler.scale`."""

        @wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(scaled, torch.Tensor) and scaled is not outputs:
                self._unscaled.set([scaled], outputs)
            return scaled

        return scale

    @contextmanager
    def _weighed(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        batch: ScriptBatch,
    ) -> Iterator["_WholeLoss | None"]:
        """Weigh the terms of a loss, and of the gradients that backward is given, inside the `with`
        block. Yields the step that makes it the whole batch's loss after that, or None if that is
        unknown."""
        line = self._context.guard.line
        self._takes_part(batch)
        loops = batch.of.use.plans.loops.setdefault(line, set())
        states = _states(batch)
        parts = find_terms(roots, states, loops, gradients)
        loops.update(term.name for term in parts.terms if term.each)
        self._notices.tell(roots, batch, parts, line)
        products = learned_products(parts, states)
        exchanges = self._exchanges()
        factors: Sequence[float] = []
        loss, is_part = None, False
        if exchanges and all(each.alike for each in exchanges):
            weight = batch.weight
            step = self._planned(parts, batch, line)
            if step is not None:
                weight, factors = step.weight, step.factors
                self._knows_part(step.weight, batch)
                if step.of_loss is not None and len(roots) == 1:
                    self._context.guard.of_loss = step.of_loss
                    loss = self._whole_loss(roots[0], None)
            self._weigh(exchanges, weight)
            if step is None:
                factors, value = self._together(roots, batch, parts, line, products)
                is_part = value is None and bool(parts.terms)
                if value is not None:
                    loss = self._whole_loss(roots[0], value)
                    if factors and max(factors) - min(factors) <= 1e-9 * max(factors):
                        # Its summands are added up as it is, whatever the sizes of the parts.
                        self._context.guard.of_loss = factors[0]
        elif exchanges and batch.weight:
            factors = self._alone(batch, parts)
        joins = len(parts.terms) > 1 or (
            parts.has_constants and any(term.is_sum for term in parts.terms)
        )
        joins |= is_part and not (parts.unknown or parts.hidden)
        if loss is None and exchanges and joins and len(roots) == 1:  # Several stay the rank's.
            self._context.mixed_losses.set(roots, True)
        with _multiplied(parts, factors), multiplied_values(products, factors):
            yield loss

    @contextmanager
    def of_samples(self, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have `torch.autograd.grad` give one process's gradients of samples inside the `with`
        block."""
        batch = self._context.lead
        if batch is None or self._context.batch == "per-rank" or self.is_inside:
            yield
            return
        size, part = int(batch.weight), batch.weight / len(batch.samples)
        parts = find_terms(roots, _states(batch))
        means = [
            not term.is_sum or any(is_count(term, each, size) for each in term.divisors)
            for term in parts.terms
        ]
        pairs = zip(parts.terms, means, strict=True)
        if parts.unknown or parts.hidden or any(m and _is_uneven(t, size) for t, m in pairs):
            self._context.say(
                f"{script_line()}: torch.autograd.grad gives gradients of samples there, of a loss "
                "that is not a plain mean or sum over the samples of each rank's part of a batch: "
                "they are not one process's",
                any_rank=True,
            )
        self.is_inside = True  # A mode of torch's functions calls it again.
        try:
            with _multiplied(parts, [part if is_mean else 1.0 for is_mean in means]):
                yield
        finally:
            self.is_inside = False

    def _takes_part(self, batch: ScriptBatch) -> None:
        whole = len(batch.samples) if self._context.batch == "global" else batch.weight
        self._context.part = batch.weight / whole if whole else 0.0

    def _knows_part(self, weight: float, batch: ScriptBatch) -> None:
        if abs(weight - batch.weight) > 1e-9 * batch.weight:
            self._context.part = None  # The weights of the other ranks are not known yet.

    def _weigh(self, exchanges: Iterable[Exchange], weight: float) -> None:
        self.latest = weight
        for exchange in exchanges:
            exchange.weigh(weight)

    def _quick(self, roots: Sequence[torch.Tensor], batch: ScriptBatch) -> bool:
        """Weigh a loss that is a single mean, as nearly all are, at a glance. Returns False if that
        takes more."""
        guard = self._context.guard
        plan = batch.of.use.plans.quick(guard.line)
        if plan is None or len(roots) != 1 or not (self._context.is_alone and guard.active):
            return False
        exchanges = self._exchanges()
        for each in exchanges:
            if not each.alike:
                return False
        weight = plan.quick_weight(roots[0], batch.weight) if exchanges else None
        if weight is None:
            return False
        self._plan = plan
        guard.add(plan.added)
        self._weigh(exchanges, weight)
        self._takes_part(batch)
        self._knows_part(weight, batch)
        return True

    def _planned(self, parts: LossTerms, batch: ScriptBatch, line: str) -> PlannedStep | None:
        """Return the weights of a backward if they are known without a message."""
        guard, plans = self._context.guard, batch.of.use.plans
        plan = self._plan = plans.plan(line, _structure(parts))
        if line in plans.divergent or not self._context.is_alone:
            return None
        if line in plans.settled:
            # One that is not settled would wait for a message that others do not send.
            guard.add(plan.added)
        if not (plan.is_settled and guard.active):
            return None
        step = plan.step(parts, batch.weight, len(batch.samples), self._context.batch == "global")
        if step.is_odd:
            guard.doubts = (1, int(step.is_wrong))
        return step

    def doubted(self, is_wrong: bool) -> None:
        """Learn that a rank's numbers of the latest backward were not those of the plan."""
        self._plan.doubt(is_wrong)
        if is_wrong:
            self._context.say(
                f"{script_line()}: terms of the loss count other numbers of elements than before, "
                "in proportion to each other: the gradient of this step is not quite that of one "
                "process; from now on ranks add up the counts first"
            )

    def _whole_loss(self, root: torch.Tensor, value: float | None) -> "_WholeLoss":
        unscaled = self._unscaled.get(root)
        scale = None
        if unscaled is not None:
            scale = torch.nan_to_num(root.detach() / unscaled.detach(), nan=1.0)
        return _WholeLoss(self._context, root, value, unscaled, scale)

    def _alone(self, batch: ScriptBatch, parts: LossTerms) -> list[float]:
        """Return factors by which this rank's own gradient is about that of the whole batch."""
        if self._context.batch == "per-rank":
            return []
        ratio, size = len(batch.samples) / batch.weight, int(batch.weight)
        return [
            1.0
            if not term.is_sum or any(is_count(term, each, size) for each in term.divisors)
            else ratio
            for term in parts.terms
        ]

    def _together(
        self,
        roots: Sequence[torch.Tensor],
        batch: ScriptBatch,
        parts: LossTerms,
        line: str,
        products: Sequence[LearnedProduct],
    ) -> tuple[Sequence[float], float | None]:
        """Return the factor of each term, and the loss of the whole batch if it is known.

        Raises UsageError if learned weights would get other gradients than in one process.
        """
        origins = [frozenset[ScriptBatch]()] * len(parts.terms)
        if self._context.has_others:
            origins = [self._context.origins.of(term.reduces) for term in parts.terms]
        rows = [
            row_of(
                term,
                batch,
                bool(of) and not any(each.weight for each in of),
                self._context.numbers_read,
            )
            for term, of in zip(parts.terms[:TERMS], origins, strict=False)
        ]
        loss = 0.0
        if len(roots) == 1 and roots[0].numel() == 1 and batch.weight:
            loss = float(roots[0].detach())
        plans, read = batch.of.use.plans, self._context.numbers_read.copy()

        def counts_data(term: LossTerm, number: int) -> bool:
            value = term.divisors[number].value
            counts = value != len(batch.samples) and term.counts(value, int(batch.weight))
            return counts or value in read or plans.is_of_data(place_of(term, number))

        likely = likely_count(parts, counts_data)
        totals = self._totals(batch.weight, parts, rows, loss, likely, products)
        if not totals.samples:
            return [], None
        if not totals.alike:
            if self._agree_on_dim(roots, batch, parts, line) or self._agree_on_loop(
                roots, batch, parts, line
            ):
                products = learned_products(parts, _states(batch))
                return self._together(roots, batch, parts, line, products)
            batch.of.use.plans.divergent.add(line)
            self._context.say(
                f"{line}: ranks add up different terms of a loss in one step, as by an `if`, a "
                "loop, a comparison of samples or batches of several loaders: the gradient is one "
                "process's only if the loss is a mean over samples, with an equal weight for each"
            )
            return [], None
        counts = [
            count_of(self._context, term, row, len(batch.samples), batch.of.use.plans)
            for term, row in zip(parts.terms, totals.terms, strict=False)
        ]
        if self._context.is_alone:
            self._notices.tell_padding(parts, batch, totals, counts)
            self._learn(roots, parts, batch, totals, counts, line)
        elif self._context.has_others and any(map(_is_unclear, origins)):
            self._context.say(
                f"{line}: a batch has fewer samples than there are ranks, or is whole on each, "
                "next to one of another loader, and a term of the loss joins them: it is not quite "
                "that of one process in this step",
                any_rank=True,
            )
        value = self._value(roots, parts, totals, counts, likely)
        factors = self._factors(batch, rows, counts, origins, totals)
        if any(len(each) > 1 for product in products for each in product.elements):
            self._check_products(products, factors, line)
        return factors, value

    def _factors(
        self,
        batch: ScriptBatch,
        rows: Sequence[Sequence[float]],
        counts: Sequence[Count | None],
        origins: Sequence[frozenset[ScriptBatch]],
        totals: Totals,
    ) -> list[float]:
        """Return the factor of each term, none on a rank without samples."""
        factors: list[float] = []
        if not batch.weight:
            return factors
        ratio = totals.samples / batch.weight
        of_sum = ratio if self._context.batch == "global" else 1.0
        for row, count, of, total in zip(rows, counts, origins, totals.terms, strict=False):
            if not row[3]:
                factors.append(0.0)
            elif count is None:
                is_whole = bool(of) and not any(each.divided for each in of)
                factors.append(of_sum / total[3] if is_whole else of_sum)
            else:
                factors.append(count.own / count.whole * ratio if count.whole else 1.0)
        return factors

    def _check_products(
        self, products: Sequence[LearnedProduct], factors: Sequence[float], line: str
    ) -> None:
        """Raise UsageError if the gradient of a learned weight is not one process's. Collective."""
        mine = all(product.is_clear(factors) for product in products)
        clear: list[bool] = uniform(self._comm, lambda: self._comm.allgather(mine))
        if not all(clear):
            raise UsageError(
                f"{line}: a learned weight multiplies there a sum of terms of the loss that count "
                "other elements, such as means over masks: its gradient is made of that sum's "
                "value, which ranks cannot have from their parts of the batch. Multiply each term "
                "by the weight before they are added up"
            )

    def _agree_on_dim(
        self, roots: Sequence[torch.Tensor], batch: ScriptBatch, parts: LossTerms, line: str
    ) -> bool:
        """Have all ranks take the samples' dimension for the same one, if a rank's part has as many
        samples as another dimension, such as time. Returns True if one of them has erred.
        Collective."""
        plans = batch.of.use.plans
        if line in plans.divergent:
            return False
        before, first = plans.dim, _structure(parts)
        seen: dict[str, LossTerms] = {}
        for plans.dim in (before, 1 - before):
            each = find_terms(roots, _states(batch), plans.loops.get(line, ()))
            seen.setdefault(_structure(each), each)
        mine = list(seen)
        every = uniform(self._comm, lambda: self._comm.allgather([first, *mine]))
        common = next((key for key in every[0][1:] if all(key in each[1:] for each in every)), None)
        plans.dim = before
        if common is None or all(each[0] == common for each in every):
            return False
        plans.dim = before if mine[0] == common else 1 - before
        parts.terms, parts.unknown = seen[common].terms, seen[common].unknown
        parts.hidden, parts.has_constants = seen[common].hidden, seen[common].has_constants
        parts.learned = seen[common].learned
        plans.loops[line] = {term.name for term in parts.terms if term.each}
        self._plan = plans.plan(line, common)
        self._notices.tell(roots, batch, parts, line)
        return True

    def _agree_on_loop(
        self, roots: Sequence[torch.Tensor], batch: ScriptBatch, parts: LossTerms, line: str
    ) -> bool:
        """Tell ranks of a single sample that a loop of the script adds up samples, as others see.
        Returns True if one of them sees it now. Collective."""
        plans = batch.of.use.plans
        if line in plans.divergent:
            return False
        mine = [term.name for term in parts.terms if term.each]
        every: list[list[str]] = uniform(self._comm, lambda: self._comm.allgather(mine))
        loops = plans.loops.setdefault(line, set())
        loops.update(name for names in every for name in names)
        if not loops:
            return False
        parts.terms = find_terms(roots, _states(batch), loops).terms
        self._plan = plans.plan(line, _structure(parts))
        sees = [term.name for term in parts.terms if term.each] != mine
        return any(uniform(self._comm, lambda: self._comm.allgather(sees)))

    def _learn(
        self,
        roots: Sequence[torch.Tensor],
        parts: LossTerms,
        batch: ScriptBatch,
        totals: Totals,
        counts: Sequence[Count | None],
        line: str,
    ) -> None:
        knows = self._context.batch == "per-rank" or (
            totals.samples == len(batch.samples) and not self._recovers
        )
        if any(count is not None and count.is_of_data for count in counts):
            return  # A rank's own number does not tell whether it counts.
        uses = [TermUse(None)] * len(counts)
        for place, count in enumerate(counts):
            if count is not None:
                per_sample, is_even = count.whole / totals.samples, count.is_even(totals)
                masks = self._notices.may_mask(f"{line} {parts.terms[place].name}")
                uses[place] = TermUse(count.place, per_sample, is_even, masks)
        self._plan.learn(parts, uses, knows)
        if self._plan.is_settled:
            batch.of.use.plans.settle(line, self._plan, roots[0], parts)

    def _totals(
        self,
        weight: float,
        parts: LossTerms,
        rows: Sequence[Sequence[float]],
        loss: float,
        likely: float,
        products: Sequence[LearnedProduct],
    ) -> Totals:
        keys = [*(term.key for term in parts.terms), *(product.text for product in products)]
        mark = zlib.crc32("/".join(keys).encode()) & 0xFFFFF
        first = likely if weight else 0.0
        head = [
            1,
            mark,
            mark**2,
            weight,
            weight**2,
            loss * weight,
            loss * first if first else 0.0,
            loss,
        ]
        own = np.zeros(len(head) + TERMS * ROW, np.float64)
        own[: len(head)] = head
        flat = [value for row in rows for value in row]
        own[len(head) : len(head) + len(flat)] = flat

        def add() -> npt.NDArray[np.float64]:
            total = own.copy()
            self._comm.wait([self._comm.iallreduce(total)], "the terms of the loss")
            return total

        began = time.perf_counter()
        total = uniform(self._comm, add)
        self.wait_s += time.perf_counter() - began
        ranks, marks, squares, *sums = total[: len(head)].tolist()
        alike = abs(ranks * squares - marks**2) < 0.5
        table = total[len(head) :].reshape(TERMS, ROW)
        return Totals(sums[0], sums[1], sums[2], sums[3], sums[4], alike, table)

    def _value(
        self,
        roots: Sequence[torch.Tensor],
        parts: LossTerms,
        totals: Totals,
        counts: Sequence[Count | None],
        likely: float,
    ) -> float | None:
        """Return the loss of the whole batch, None if its terms differ too much to tell."""
        if (
            len(roots) != 1
            or roots[0].numel() != 1
            or parts.unknown
            or parts.hidden
            or not parts.terms
        ):
            return None
        if len(parts.terms) > TERMS:
            return None
        if all(count is None for count in counts):
            is_whole = not parts.has_constants and self._context.batch == "global"
            return totals.loss if is_whole else None
        if any(count is None for count in counts):
            return None
        if all(count is not None and count.is_even(totals) for count in counts):
            return totals.loss_by_samples / totals.samples
        count = counts[0]
        if len(counts) > 1 or count is None or count.own != likely or not count.whole:
            return None
        return totals.loss_by_count / count.whole


@dataclass(slots=True)
class _WholeLoss:
    """A loss that the script may print or decide by after backward."""

    context: ScriptContext
    root: torch.Tensor
    value: float | None
    """Of the whole batch; None if the guard has written it."""
    unscaled: torch.Tensor | None
    """The loss before a gradient scaler has multiplied it by `scale`."""
    scale: torch.Tensor | None

    def put(self) -> None:
        """Have the loss be that of the whole batch."""
        if self.value is not None:
            self.root.data.fill_(self.value)
        self.context.whole_losses.set([self.root], True)
        if self.unscaled is not None and self.scale is not None:
            self.unscaled.data.copy_(self.root.detach() / self.scale)
            self.context.whole_losses.set([self.unscaled], True)


def _is_unclear(origins: frozenset[ScriptBatch]) -> bool:
    """True if a term is not of one batch alone, or of one that is not known."""
    return len(origins) != 1


def _states(batch: ScriptBatch) -> GraphStates:
    return GraphStates(max(len(batch.place), 1), batch.of.use.plans.dim)


def _structure(parts: LossTerms) -> str:
    return " + ".join([*(term.key for term in parts.terms), *parts.unknown, *parts.hidden])


@contextmanager
def _multiplied(parts: LossTerms, factors: Sequence[float]) -> Iterator[None]:
    """Multiply the gradients that enter some terms of a loss inside the `with` block."""
    handles = []
    try:
        for term, factor in zip(parts.terms, factors, strict=False):
            for each in (term.each or (term,)) if abs(factor - 1) > 1e-9 else ():
                # Below the division by a count of 0, which makes NaN of a gradient of 0, too.
                node = each.node if factor else each.reduces
                handles.append(node.register_prehook(_times(factor)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_uneven(term: LossTerm, size: int) -> bool:
    """True if a mean does not count the same number of elements of each sample."""
    return not term.is_sum and term.count % max(size, 1) != 0


def _times(
    factor: float,
) -> Callable[[Sequence[torch.Tensor | None]], tuple[torch.Tensor | None, ...]]:
    def scaled(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        # Where a rank's part has no element to count, 0 / 0 has made them NaN or infinite.
        times = torch.mul if factor else (lambda each, _: torch.zeros_like(each))
        return tuple(None if each is None else times(each, factor) for each in gradients)

    return scaled

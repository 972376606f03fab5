"""Notices on losses whose gradient, made of the ranks' parts of a batch, is not one process's."""

import math
from collections.abc import Sequence
from typing import Final

import torch

from dlio.comm import Communicator
from dlio.exchange.loss_terms import LossTerm, LossTerms, has_mask, is_count, is_of_one
from dlio.exchange.mixed_samples import mixed_samples
from dlio.integrations.script.loss_counts import TERMS, Count, Totals
from dlio.integrations.script.script_assigner import ScriptBatch
from dlio.integrations.script.script_lines import script_line
from dlio.integrations.script.share import ScriptContext

_UNEVEN: Final = 3
"""Steps with uneven counts after which the script may pad."""
_LOOKS: Final = 2
"""Times that the whole graph of a loss is searched, for each line of the script and kind."""
_SEVERAL: Final = (
    " of one batch, where batches of several loaders are under way: if it joins them, the gradient "
    "is not quite that of one process"
)


class LossNotices:
    """Tells of a script's losses: each line once, after a look at some of its first steps."""

    def __init__(self, comm: Communicator, context: ScriptContext) -> None:
        self._comm, self._context = comm, context
        self._looks: dict[str, int] = {}
        self._tellers: dict[str, int] = {}
        """By line, the rank that tells of samples compared."""
        self._uneven: dict[str, int] = {}
        """By line and operation, steps in which means without a mask had uneven counts; -1 if a
        mask was seen."""
        self._slices: dict[str, tuple[ScriptBatch, float]] = {}
        """By line, operation and term, the batch of the latest mean, and how many of its samples
        that counts."""

    def tell(
        self, roots: Sequence[torch.Tensor], batch: ScriptBatch, parts: LossTerms, where: str
    ) -> None:
        context, size = self._context, int(batch.weight)
        if parts.unknown:
            context.say(
                f"{where}: the loss is not a mean over samples ({parts.unknown[0]} of a "
                "value of the whole batch): ranks average the gradients of their parts of a "
                "batch, which is not the gradient of one process"
            )
        if parts.hidden:
            context.say(
                f"{where}: the loss comes from {parts.hidden[0]}, which nothing sees into: it is "
                "taken for a mean over the samples of each rank's part"
                + ("" if context.is_alone else _SEVERAL)
            )
        if any(term.may_be_kept for term in parts.terms):
            context.say(
                f"{where}: a sum over a rank's part of a batch is divided by 1 there, which "
                "clamp(min=1) makes of a part without any element that counts, too: if so, the "
                "loss and the gradient of such a step are not those of one process",
                any_rank=True,
            )
        if context.has_unlike and any(map(self._counts_more, parts.terms)):
            context.say(
                f"{where}: a sum is divided there by more than its number of elements: if that is "
                "a count over several batches, and not a sum of weights, the ranks count more than "
                "one process in a step for which a rank has one of them whole, as may be in a "
                "first pass, or a stand-in for none of its samples, as at the end of a pass, and "
                "the gradient is not quite that of one process",
                any_rank=True,
            )
        plain = [
            term
            for term in parts.terms
            if term.is_sum and not any(is_count(term, each, size) for each in term.divisors)
        ]
        if context.undivided and len(parts.terms) > 1 and plain:
            context.say(
                f"{where}: the loss adds up a sum over samples there, and each rank has all "
                "samples of another loader: a sum over those counts as often as there are ranks, "
                "and the gradient is not one process's; a mean counts as in one process"
            )
        if parts.is_given:
            context.say(
                f"{where}: backward is given a gradient of each sample there, which is taken as it "
                "is, as of a sum over samples: if it was divided by the number of samples, that is "
                "the number of those of the rank's part, and it is too large: divide by the size "
                "of the whole batch"
            )
        if len(parts.terms) > TERMS:
            context.say(f"{where}: terms of the loss beyond {TERMS} are taken for means")
        look = "/".join([where, *(term.key for term in parts.terms), *parts.unknown])
        teller = self._tellers.setdefault(where, batch.widest)  # One rank, though parts change.
        if not size or self._looks.get(look, 0) >= _LOOKS:
            return
        self._looks[look] = self._looks.get(look, 0) + 1
        sums = [term.reduces for term in parts.terms if term.is_sum and not term.each]
        dim = batch.of.use.plans.dim
        if size > 1 and any(is_of_one(node, size, dim) for node in sums):
            context.say(
                f"{where}: a sum there is of one row, such as net(torch.zeros(1, 1)), and each "
                "rank adds its own, as if it were of its part of the batch: use a mean, which "
                "counts as in one process"
            )
        ways = (mixed_samples(roots, rows, parts, dim) for rows in (size, *sorted(batch.rows)))
        mixed = next((way for way in ways if way is not None), None)
        # In a part of few samples it may not be seen.
        if mixed is not None and self._comm.rank == teller:
            context.say(
                f"{where}: the loss compares samples of a batch ({mixed}), and each rank sees part "
                "of a batch: it is another loss than that of one process, not a mean over samples. "
                "--batch per-rank gives each rank a whole batch",
                any_rank=True,
            )

    def may_mask(self, key: str) -> bool:
        """True if means of a line and operation were seen to leave elements out, or may."""
        return not 0 <= self._uneven.get(key, 0) < _UNEVEN

    def _counts_more(self, term: LossTerm) -> bool:
        """True if a sum is divided by a number of the data that its batch has not."""
        read = self._context.numbers_read
        numbers = [each.value for each in term.divisors if each.is_tensor or each.value in read]
        elements = sum(math.prod(each.shape) for each in term.each or (term,))
        return term.is_sum and any(each > max(elements, 1) for each in numbers)

    def _is_slice(self, term: LossTerm, batch: ScriptBatch, key: str) -> bool:
        """True if a mean at a line counts another number of samples of a batch than in the backward
        before."""
        before = self._slices.get(key)
        self._slices[key] = (batch, term.count)
        if _has_all(term, batch) or before is None:
            return False
        return before[0] is batch and before[1] != term.count

    def tell_padding(
        self,
        parts: LossTerms,
        batch: ScriptBatch,
        totals: Totals,
        counts: Sequence[Count | None],
    ) -> None:
        terms = zip(parts.terms, totals.terms, counts, strict=False)
        for place, (term, row, count) in enumerate(terms):
            if count is None or term.is_sum:
                continue
            key = f"{script_line()} {term.name}"
            is_slice = self._is_slice(term, batch, f"{key} {place}")
            # Even slices of the first parts say nothing of the last one.
            if count.is_even(totals) and not is_slice and _has_all(term, batch):
                continue
            if not is_slice and not batch.rows.isdisjoint(term.rows):
                continue  # All boxes, or the like, of the part's samples.
            if row[3] * count.squared - count.whole**2 <= 1e-9 * count.whole**2 and not is_slice:
                continue  # As many on each rank, whatever its samples: they are of another input.
            if is_slice or not _has_all(term, batch):
                self._context.say(
                    f"{script_line()}: {term.name} is a mean over some of the samples of each "
                    "rank's part of a batch, as of a slice (split, chunk, x[i:i + n]), and counts "
                    "by them: one process has other slices, and this gradient only where all "
                    "slices are of one size. Take batches of that size from the loader and step "
                    "after some of them, or give each rank whole batches by --batch per-rank",
                    any_rank=is_slice,
                )
                continue
            if row[4] < row[3]:
                self._uneven[key] = -1  # Something is masked.
            elif self._uneven.get(key, 0) >= 0:
                self._uneven[key] = self._uneven.get(key, 0) + 1
            if self._uneven[key] == _UNEVEN:
                self._context.say(
                    f"{script_line()}: {term.name} counts all elements of parts of a batch whose "
                    "samples have other lengths. If the script pads them, one process pads to the "
                    "longest of the batch and counts more: mask padding, as by ignore_index, to "
                    "train as one process does"
                )


def _has_all(term: LossTerm, batch: ScriptBatch) -> bool:
    """True if a mean may be over all samples of a rank's part of a batch, some of whose elements a
    mask may leave out."""
    size = len(batch.place)
    return not size or any(each % size == 0 for each in term.rows) or has_mask(term.node)

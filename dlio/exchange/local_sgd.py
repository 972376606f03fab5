"""Local SGD (arXiv 1805.09767) and DiLoCo (arXiv 2311.08105).

Ranks train independently and periodically average the changes of their weights. `diloco` passes the
mean change to an outer optimizer as its gradient: SGD with Nesterov momentum.

With fragments (Streaming DiLoCo, arXiv 2501.18512) the buckets are dealt out to them in turn, and
the k-th of n fragments is exchanged after k / n of a period: as many bytes, of which only an n-th
is sent at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.exchange.buckets import Named, in_buckets
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.cut import TensorCut, reshape_state
from dlio.exchange.exchange_base import Exchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.quantised_allreduce import TAGS
from dlio.exchange.round_commit import RoundCommit
from dlio.exchange.sums import BucketSums

_FIRST_TAG: Final = 1


class LocalSgd(Exchange):
    """Sets weights to the last common ones plus the mean change, every `spec.period` steps for each
    fragment.

    `finish` does so, too. A compressor's residual is added to the next change.

    A round is the sum of the changes of all ranks. Weights change once all sums of a round are
    there, so that a loss tears no weights.
    """

    def __init__(self, named: Named, context: ExchangeContext) -> None:
        self._context, self._comm, self._spec = context, context.comm, context.spec
        self._named, self._placement = named, BufferPlacement(named, context)
        self._sums = BucketSums()
        self._steps = 0
        """Steps of this round."""
        self._next = 0
        """The fragment that is exchanged next."""
        self._stale: set[int] = set()
        """Fragments whose weights have changed since they were exchanged."""
        self._keeps = context.recovery is not None
        """Keep each round's sums until the next one's are complete, for ranks that lack them."""
        self._summed = range(0)
        """Buckets of the fragment that is exchanged."""
        self._begun: set[int] = set()
        """Buckets whose sum has begun in this round."""
        self._make_buckets()
        self._commit = RoundCommit(context, self)

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """Members whose steps are in the last round; None while a round is not over."""
        return self._commit.contributors if self._steps == 0 else None

    def _make_buckets(self) -> None:
        """Create buckets of the parameters in their current shapes.

        The parameters' current values become the common ones.
        """
        together = self._comm.size > 1 or self._keeps
        groups = in_buckets(self._named, self._spec.fragments) if together else []
        self._buckets = [self._placement.for_weights(group) for group in groups]
        self._fragments = max(1, min(self._spec.fragments, len(self._buckets)))
        self._sums.remake(
            self._placement.make_sum(bucket, 0, _FIRST_TAG + number * TAGS)
            for number, bucket in enumerate(self._buckets)
        )
        self._common = [torch.empty_like(bucket.flat) for bucket in self._buckets]
        self._momentum = [torch.zeros_like(bucket.flat) for bucket in self._buckets]
        for bucket, common in zip(self._buckets, self._common, strict=True):
            bucket.read()
            common.copy_(bucket.flat)

    def before_step(self) -> None:
        if any(bucket.is_narrow for bucket in self._buckets):
            self.reshape(())

    def after_step(self) -> None:
        self._steps += 1
        self._stale.update(range(self._fragments))
        while self._steps * self._fragments >= self._spec.period * (self._next + 1):
            self._agree(self._next)
            self._next += 1
            if self._next == self._fragments:
                self._steps = self._next = 0
        self._report_contributors()

    def finish(self) -> None:
        for fragment in sorted(self._stale):
            self._agree(fragment)
        self._steps = self._next = 0
        self._report_contributors()

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        before, state = self._buckets, self.state()
        self._make_buckets()
        # With equal weights on all ranks these are the common ones: the correction that makes up
        # for removed neurons must not count as a change.
        kept = ("owed", "momentum", "common") if self._stale else ("owed", "momentum")
        self.load_state(reshape_state(state, before, self._buckets, cuts, kept))
        # Parameters are in other buckets now, and these in other fragments.
        self._next = min(self._next, self._fragments - 1)
        self._stale = set(range(self._fragments)) if self._stale else set()

    def state(self) -> dict[str, torch.Tensor]:
        state = {
            "steps": torch.tensor(self._steps),
            "next": torch.tensor(self._next),
            "stale": torch.tensor(sorted(self._stale), dtype=torch.int64),
            **self._sums.state(),
        }
        for number, (common, momentum) in enumerate(zip(self._common, self._momentum, strict=True)):
            state[f"common/{number}"], state[f"momentum/{number}"] = common.cpu(), momentum.cpu()
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._sums.load_state(state)
        self._steps = int(state.get("steps", 0))
        self._next = int(state.get("next", 0))
        everything = torch.arange(self._fragments if self._steps else 0)
        self._stale = set(state.get("stale", everything).tolist())
        for number, bucket in enumerate(self._buckets):
            bucket.read()
            common = state.get(f"common/{number}", bucket.flat)
            self._common[number].copy_(common)
            if f"momentum/{number}" in state:
                self._momentum[number].copy_(state[f"momentum/{number}"])

    @torch.no_grad()
    def join(self) -> None:
        # The giver's own steps of the round are in its change alone: in two, they count twice.
        for bucket, common in zip(self._buckets, self._common, strict=True):
            bucket.flat.copy_(common)
            bucket.write()

    def statistics(self) -> dict[str, float]:
        return self._sums.statistics()

    def close(self) -> None:
        self._commit.remove()
        self._sums.close()
        self._placement.close()
        if self._comm.size > 1:
            self._comm.close()

    def _agree(self, fragment: int) -> None:
        """Average the changes of all ranks, and set a fragment's weights to the new common ones."""
        self._summed = range(fragment, len(self._buckets), self._fragments)
        self._commit.close_turn()
        ranks = len(self._commit.contributors) if self._keeps else self._comm.size
        for number in self._summed:
            self._take(number, ranks)
        self._begun.clear()
        self._commit.take()
        self._stale.discard(fragment)

    @torch.no_grad()
    def sum_all(self) -> None:
        for number in self._summed:
            bucket = self._buckets[number]
            bucket.read()
            bucket.flat -= self._common[number]
            self._begun.add(number)
            self._sums[number].start(bucket.flat)
            # MPI moves the earlier buckets' messages only when asked, and a read takes a while.
            for each in self._summed:
                self._sums[each].advance()
        for number in self._summed:
            self._sums[number].wait()

    def reset(self, undo: bool) -> None:
        self._sums.reset(undo, self._begun)

    def arrays(self, last: bool) -> list[npt.NDArray[np.generic]]:
        return [(each.before if last else each.flat).numpy() for each in self._buckets]

    @torch.no_grad()
    def _take(self, number: int, ranks: int) -> None:
        """Change a bucket's weights by the mean of the changes of some ranks."""
        bucket, sums = self._buckets[number], self._buckets[number].flat
        common, momentum = self._common[number], self._momentum[number]
        if self._keeps:
            # The sums are not divided in place: a rank that lacks them may still have to be given
            # them.
            bucket.swap()
        change = torch.div(sums, ranks, out=bucket.flat)
        if self._spec.merge == "outer":
            momentum.mul_(self._spec.momentum).add_(change)
            change.add_(momentum, alpha=self._spec.momentum)
            common.add_(change, alpha=self._spec.rate)
        else:
            common.add_(change)
        bucket.flat.copy_(common)
        bucket.write()

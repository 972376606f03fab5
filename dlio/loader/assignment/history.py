"""The batches of an epoch that its ranks have taken, and who trained on them.

A rank that joins in the middle of an epoch is told, so that it knows, as the others do, which
samples a rank had been dealt that is lost later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from dlio.loader.dataset import Dataset
from dlio.loader.passes import FormulaOrder, PlannedPass
from dlio.loader.planned_engine.engine import epoch_plan
from dlio.plan.epoch import EpochPlan, WindowPlan, plan_epoch
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import SampleMask
from dlio.plan.schedule import RankNodes

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class AssignmentSpan:
    """A run of batches that is dealt to the same ranks."""

    batches: PlannedPass
    plan: EpochPlan | None
    """None if positions of the order alone decide who gets which sample."""
    members: tuple[int, ...]
    """Number of each of its ranks when the job began."""
    planners: dict[int, WindowPlan] = field(default_factory=dict)
    """By member; filled as they are wanted."""

    def samples(self, batch: int, member: int) -> list[int]:
        """Return a member's samples of one of its batches."""
        rank = self.members.index(member) if self.members else member
        if self.plan is None:
            return self.batches.part(batch, rank)
        if member not in self.planners:
            if self.plan.left is not None:
                begun = self.batches.formula.members
                rank = begun.index(member) if member in begun else -1
            self.planners[member] = plan_epoch(replace(self.plan, rank=rank))
        window = self.planners[member].window(range(batch, batch + 1))
        dealt: list[int] = window.samples.tolist()
        return dealt


@dataclass(frozen=True, slots=True, eq=False)
class IssuedBatch:
    """A batch that was taken."""

    deal: AssignmentSpan
    number: int
    """Within its deal."""
    step: int
    """Within its epoch."""
    update: int
    """Number of the optimizer step that uses it, since the run began."""


CommittedBatch = tuple[IssuedBatch, int, frozenset[int]]
"""A batch, the exchange of gradients or weights that brought it into the model, and the members
that counted in it."""


class _PlannedLoader(Protocol):
    """A loader whose passes are planned."""

    mode: str

    @property
    def data(self) -> Dataset:
        """The data set."""

    @property
    def formula(self) -> FormulaOrder:
        """The order of the next pass."""

    @property
    def mask(self) -> tuple[int, SampleMask] | None:
        """An epoch, and the samples that it uses; None for all."""


def described(closed: Sequence[CommittedBatch]) -> dict[str, Any]:
    """Return the batches of an epoch as JSON types."""
    deals = _numbered(batch.deal for batch, _, _ in closed)
    counted = _numbered(members for *_, members in closed)
    return {
        "deals": [
            {
                "members": deal.members,
                "state": _begun(deal.batches),
                "shares": deal.batches.dealt.counts,
                "batch_size": deal.batches.formula.batch_size,
                "ranks": deal.batches.formula.ranks,
                "left": deal.batches.formula.left,
                "began": deal.batches.formula.members,
                "node_of": None if deal.plan is None else deal.plan.ranks.node_of.tolist(),
            }
            for deal in deals
        ],
        "counted": [sorted(members) for members in counted],
        "batches": [
            [deals[batch.deal], batch.number, batch.step, batch.update, step, counted[members]]
            for batch, step, members in closed
        ],
    }


def recalled(history: dict[str, Any], loader: _PlannedLoader) -> list[CommittedBatch]:
    """Return the batches that another rank has `described`."""
    deals = [_recalled(each, loader) for each in history["deals"]]
    counted = [frozenset(members) for members in history["counted"]]
    return [
        (IssuedBatch(deals[deal], number, step, update), counting, counted[members])
        for deal, number, step, update, counting, members in history["batches"]
    ]


def _recalled(deal: dict[str, Any], loader: _PlannedLoader) -> AssignmentSpan:
    shares = RankShares(tuple(deal["shares"]))
    left = deal["left"]
    formula = replace(
        loader.formula,
        batch_size=deal["batch_size"],
        rank=0,
        ranks=deal["ranks"],
        shares=shares,
        left=None if left is None else tuple(left),
        members=tuple(deal["began"]),
    )
    batches = PlannedPass(deal["state"], formula, loader.mask)
    plan = None
    if deal["node_of"] is not None:
        mounted = loader.data.mounted
        assert mounted is not None
        ranks = RankNodes(np.array(deal["node_of"], np.int32))
        plan = epoch_plan(batches, mounted, loader.mode, ranks)
    return AssignmentSpan(batches, plan, tuple(deal["members"]))


def _begun(batches: PlannedPass) -> dict[str, Any]:
    """Return the state that a pass began with."""
    return batches.state_at(batches.cursor.position, batches.requeued)


def _numbered(values: Iterable[_T]) -> dict[_T, int]:
    """Return the different values, each with its number."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}

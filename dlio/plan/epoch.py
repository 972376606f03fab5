"""An epoch's plan as one rank computes it: the samples that it consumes and sends. Pure.

All modes answer the same question, `window(steps)`, and the answers of all ranks agree, so that no
requests are needed. The modes differ in how much of the epoch a rank computes: the whole global
batch if samples are dealt by where they live (`batch`), its own share and its own sends if
positions alone decide (`global`), its node's part in `local`, `partial(q)` and `ring`.
"""

import re
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.plan.block_order import BlockOrder
from dlio.plan.home_plan import HomePlan
from dlio.plan.layout import Layout
from dlio.plan.listed_order import ListedOrder
from dlio.plan.mixture import MixtureOrder
from dlio.plan.order import Order
from dlio.plan.rank_shares import RankShares
from dlio.plan.schedule import (
    RankNodes,
    RankWindow,
    StepAssignment,
    assign,
    cut_window,
    keepers_of,
    plan_alone,
    plan_window,
    senders_of,
    with_ranks,
)
from dlio.plan.survivor_plan import SurvivorPlan
from dlio.plan.tail_order import TailOrder
from dlio.util.arguments import nearest

_I64 = npt.NDArray[np.int64]
_FEW_NODES: Final = 4
"""Most nodes for which planning whole global batches costs less than planning a node's samples."""
_CHUNK: Final = 1 << 18
_PARTIAL: Final = re.compile(r"partial\(\s*([0-9.eE+-]+)\s*\)")
WINDOW_BYTES: Final = 16 << 20
_WORDS: Final = ("batch", "global", "ring", "local", "partial")
MODES: Final = "batch, global, ring, local or partial(q), with q from 0 to 1"


def is_exact(mode: str) -> bool:
    """True if a step's global batch is a uniformly random draw, the same on any ranks and nodes."""
    return mode in ("batch", "global")


def exchanged(mode: str) -> float:
    """Return the fraction q of `partial(q)`, 0 for `local` and `ring`.

    Raises UsageError for an invalid mode.
    """
    if mode in ("local", "ring"):
        return 0.0
    match = _PARTIAL.fullmatch(mode)
    try:
        fraction = float(match[1]) if match else -1.0
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise UsageError(
            f"shuffle mode {mode!r}: choose {MODES}{'' if match else nearest(mode, _WORDS)}"
        )
    return fraction


def check_mode(mode: object) -> str:
    """Return the mode. Raises UsageError if it is invalid."""
    if not isinstance(mode, str):
        raise UsageError(f"mode={mode!r}: choose {MODES}")
    if not is_exact(mode):
        exchanged(mode)
    return mode


def check_shares(mode: str, asked: bool) -> None:
    """Check that the mode supports shares by rank, if they are asked for. Raises UsageError."""
    if asked and not is_exact(mode):
        raise UsageError(
            f"shares by rank (shares=, --balance) with shuffle mode {mode}, which gives all ranks "
            "as many samples: choose mode batch or global"
        )


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The facts that all ranks agree on for one pass over the data."""

    order: Order
    position: int
    """First position to consume."""
    shares: RankShares
    """Samples per rank of a global batch."""
    steps: int
    mode: str
    ranks: RankNodes
    rank: int
    home: npt.NDArray[np.int32]
    """Home node of each block, -1 for the source; shape (blocks,)."""
    layout: Layout
    window_bytes: int = WINDOW_BYTES
    """Approximate payload bytes of a rank's window."""
    left: tuple[int, ...] | None = None
    """The survivors among `ranks`, if an inexact mode continues an epoch after a loss; `rank`
    is then -1 for a rank that did not begin it."""
    on_devices: bool = False
    """Ranks keep samples on their devices; in `batch` mode each gets those that it keeps."""

    def keeps(self, samples: _I64) -> npt.NDArray[np.bool_]:
        """True for the samples that this rank keeps on its device: all that it consumes, unless
        the mode brings a sample to the same rank in most epochs. Shape (n,)."""
        if not self.on_devices or self.mode != "batch":
            return np.ones(len(samples), np.bool_)
        homes = with_ranks(self.home[self.layout.block_of(samples)], self.ranks)
        kept: npt.NDArray[np.bool_] = keepers_of(samples, homes, self.ranks) == self.rank
        return kept

    def dealt(self, steps: range) -> StepAssignment:
        """Deal the whole global batches of a run of steps; for the exact modes."""
        return assign(
            self.order,
            self.position,
            self.shares,
            steps,
            lambda samples: self.home[self.layout.block_of(samples)],
            self.ranks,
            "batch" if self.mode == "batch" else "global",
            self.on_devices,
        )

    def window(self, steps: range) -> RankWindow:
        """Plan a run of steps by dealing whole global batches, as every other rank does; for the
        exact modes.
        """
        if self.ranks.size == 1:
            return plan_alone(self.order, self.position, self.shares.global_batch, steps)
        return plan_window(self.dealt(steps), self.rank, self.ranks.size)


class WindowPlan(Protocol):
    """The plans of one rank."""

    def window(self, steps: range) -> RankWindow:
        """Plan a run of steps."""


def plan_epoch(plan: EpochPlan) -> WindowPlan:
    """Choose the planner for the mode and the number of nodes.

    Raises UsageError when an inexact mode is to begin in the middle of a global batch.
    """
    if isinstance(plan.order, ListedOrder):
        return plan.order
    one_way = isinstance(plan.order, BlockOrder | TailOrder | MixtureOrder)
    if plan.mode == "global" and plan.ranks.nodes > _FEW_NODES and not one_way:
        return GlobalPlan(plan)
    if is_exact(plan.mode):
        return plan
    if isinstance(plan.order, TailOrder):
        # Only requeued samples remain: on the nodes that hold them, where possible.
        return replace(plan, mode="batch")
    global_batch = plan.shares.global_batch
    first, rest = divmod(plan.position, global_batch)
    if rest and plan.position < plan.order.n:
        raise UsageError(
            f"mode {plan.mode} cannot continue at position {plan.position}, within a global batch "
            f"of {global_batch}: resume on as many ranks, or at the start of an epoch"
        )
    whole = HomePlan(
        plan.order,
        plan.layout,
        plan.home,
        plan.ranks,
        plan.rank,
        plan.shares,
        first + plan.steps,
        exchanged(plan.mode),
        first,
        plan.mode == "ring",
    )
    if plan.left is None:
        return whole
    return SurvivorPlan(whole, plan.ranks, plan.left, plan.rank)


class GlobalPlan:
    """Planner of `global` mode for many nodes.

    A rank consumes positions of its own, and sends the samples of its node that fall on the
    positions of others; it computes nothing else.

    Cost: 0.3 µs for each sample that the node holds, once, and for each that the rank consumes;
    memory, 8 bytes for each that the rank sends.
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._batch = plan.shares.global_batch
        self._end = min(plan.order.n, plan.position + plan.steps * self._batch)
        self._pushed = self._positions_to_push()

    def window(self, steps: range) -> RankWindow:
        plan, batch = self._plan, self._batch
        mine, counts = [], []
        for step in steps:
            first = plan.position + step * batch
            count = min(batch, self._end - first)
            part = plan.shares.part(count, plan.rank)
            mine.append(np.arange(first + part.start, first + part.stop, dtype=np.int64))
            counts.append(len(part))
        samples = plan.order.samples(np.concatenate(mine) if mine else np.empty(0, np.int64))
        homes = with_ranks(plan.home[plan.layout.block_of(samples)], plan.ranks)
        consumer = np.full(len(samples), plan.rank, np.int32)
        low = np.searchsorted(self._pushed, plan.position + steps.start * batch)
        high = np.searchsorted(self._pushed, plan.position + steps.stop * batch)
        pushed = self._pushed[low:high]
        return RankWindow(
            steps,
            samples,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            senders_of(homes, consumer, plan.ranks),
            cut_window(plan.order.samples(pushed), self._consumer(pushed), plan.ranks.size),
        )

    def _consumer(self, positions: _I64) -> npt.NDArray[np.int32]:
        inside = positions - self._plan.position
        step = inside // self._batch
        first = self._plan.position + step * self._batch
        counts = np.minimum(self._batch, self._end - first)
        return self._plan.shares.deal(inside - step * self._batch, counts)

    def _positions_to_push(self) -> _I64:
        """Positions whose samples this rank sends, ascending."""
        plan, layout = self._plan, self._plan.layout
        node = plan.ranks.node_of[plan.rank]
        blocks = np.flatnonzero(plan.home == node)
        counts = layout.starts[blocks + 1] - layout.starts[blocks]
        pushed = [np.empty(0, np.int64)]
        starts = np.concatenate([[0], np.cumsum(counts)])
        for begin in range(0, int(starts[-1]), _CHUNK):
            inner = np.arange(begin, min(begin + _CHUNK, int(starts[-1])), dtype=np.int64)
            block = np.searchsorted(starts, inner, side="right") - 1
            stored = layout.starts[blocks[block]] + inner - starts[block]
            positions = plan.order.positions(layout.order.samples(stored))
            positions = positions[(positions >= plan.position) & (positions < self._end)]
            homes = np.full(len(positions), node, np.int32)
            sender = senders_of(homes, self._consumer(positions), plan.ranks)
            pushed.append(positions[sender == plan.rank])
        return np.sort(np.concatenate(pushed))

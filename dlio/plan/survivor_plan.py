"""The rest of an epoch in `local`, `partial(q)` or `ring` when ranks are lost. Pure.

These modes deal an epoch to the ranks that begin it. When some are lost, the epoch's plan stays as
it is, and the survivors take over what the lost ones would have consumed: those of the
same node, so that a sample is still trained where the plan has it, or all if the node is lost. The
next epoch is planned for the survivors.

Nothing is sent: samples that a rank takes over, or that others would have sent, are read from the
tiers of its node, or from the source.
"""

import numpy as np
import numpy.typing as npt

from dlio.plan.home_plan import HomePlan
from dlio.plan.order import share
from dlio.plan.schedule import RankNodes, RankWindow

_I64 = npt.NDArray[np.int64]


def heirs(ranks: RankNodes, left: tuple[int, ...], lost: int) -> list[int]:
    """Return the survivors that take over the samples of a lost one: those of its node, or all."""
    near = [rank for rank in left if ranks.node_of[rank] == ranks.node_of[lost]]
    return near or list(left)


class SurvivorPlan:
    """A plan of all ranks that began the epoch as one of the survivors, `left`, sees it: the given
    rank; -1 if it did not begin the epoch, which then gives it nothing.
    """

    def __init__(self, plan: HomePlan, ranks: RankNodes, left: tuple[int, ...], rank: int) -> None:
        self._plan = plan
        self._parts = [] if rank < 0 else [(rank, 1, 0)]
        """(rank of the epoch's beginning, number of its heirs, this rank's number among them)."""
        for lost in sorted(set(range(ranks.size)) - set(left)):
            taking = heirs(ranks, left, lost)
            if rank in taking:
                # The first heir of one is not that of the next, for odd samples.
                turned = (taking.index(rank) + lost) % len(taking)
                self._parts.append((lost, len(taking), turned))

    def window(self, steps: range) -> RankWindow:
        """Plan a run of steps; no sample of it is sent."""
        taken = [
            _part(*self._plan.consumed(rank, steps), parts, part)
            for rank, parts, part in self._parts
        ]
        samples = [
            part
            for step in range(len(steps))
            for each, starts in taken
            for part in (each[starts[step] : starts[step + 1]],)
        ]
        counts = sum((np.diff(starts) for _, starts in taken), np.zeros(len(steps), np.int64))
        mine = np.concatenate([np.empty(0, np.int64), *samples])
        return RankWindow(
            steps,
            mine,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.full(len(mine), -1, np.int32),
            {},
        )


def _part(samples: _I64, starts: _I64, parts: int, part: int) -> tuple[_I64, _I64]:
    """Return (samples, starts) of one of several parts of each step."""
    if parts == 1:
        return samples, starts
    ranges = [share(count, parts, part) for count in np.diff(starts).tolist()]
    chosen = [
        samples[start + here.start : start + here.stop]
        for start, here in zip(starts.tolist(), ranges, strict=False)
    ]
    counts = [len(here) for here in ranges]
    return (
        np.concatenate([np.empty(0, np.int64), *chosen]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )

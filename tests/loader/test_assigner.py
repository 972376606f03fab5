"""Batches over losses, where ranks are at different places: each sample exactly once, no MPI."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch

from dlio.loader.assignment import history
from dlio.loader.assignment.assigner import BatchAssigner
from dlio.loader.assignment.rank_groups import BatchReport

SAMPLES: Final = 83
BATCH: Final = 12


@dataclass(frozen=True)
class _Plan:
    """A pass: its samples, the first one's position, and the ranks that share them."""

    order: tuple[int, ...]
    position: int
    ranks: int
    rank: int
    left: None = None

    def samples(self, batch: int) -> list[int]:
        begin = self.position + batch * BATCH
        return list(self.order[begin : begin + BATCH][self.rank :: self.ranks])

    def window(self, steps: range) -> Any:
        return SimpleNamespace(samples=np.array(self.samples(steps[0]), np.int64))


class _Loader:
    """Yields this rank's samples as images."""

    def __init__(self, me: int, ranks: int) -> None:
        self._me, self._ranks, self._rank = me, ranks, me
        self._order, self._position = tuple(range(SAMPLES)), 0
        self.plan: Any = None
        self.planned: Any = None
        self.formula = SimpleNamespace(drop_last=False, exact=True)

    def begin(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.planned = SimpleNamespace(
            cursor=SimpleNamespace(position=self._position),
            samples=len(self._order),
            whole=SAMPLES,
            requeued=(),
            global_batch=BATCH,
            formula=self.formula,
            state_at=lambda position, again: {"position": position, "again": again},
        )
        plan = self.plan = _Plan(self._order, self._position, self._ranks, self._rank)
        batches = range(-(-(len(plan.order) - plan.position) // BATCH))
        return ((torch.tensor(plan.samples(batch)), torch.empty(0)) for batch in batches)

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None:
        self._ranks, self._rank = len(members), members.index(me)

    def resume_at(self, position: int, again: Sequence[int], _: Sequence[int]) -> None:
        self._position, self._order = position, (*range(SAMPLES), *again)

    def stats(self) -> Any:
        return None


class _Rank:
    def __init__(self, me: int, members: tuple[int, ...]) -> None:
        self.membership = SimpleNamespace(members=members, me=me, due=False)
        recovery: Any = SimpleNamespace(
            membership=self.membership,
            elastic=None,
            number=0,
            at_rendezvous=False,
            last_counted={},
            register=lambda _: None,
            rendezvous=lambda _: None,
        )
        recovery.count_requeued = lambda *_: None
        self.recovery = recovery
        loader: Any = _Loader(me, len(members))
        self.assigner = BatchAssigner([loader], recovery, BATCH)
        self.assigner.begin_epoch(0)
        self.samples: list[list[int]] = []
        """Those of each step."""
        self.over = False
        self._batches = self.assigner.batches()

    def step(self) -> None:
        """Take a batch and make an optimizer step; `over` if there is none."""
        batch = next(self._batches, None)
        if batch is None:
            self.over = True
            self._batches = self.assigner.batches()
            return
        self.over = False
        self.samples.append(batch[0].tolist())
        self.assigner.commit_step(self.membership.members)


def _joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("seed", range(200))
def test_each_sample_counts_once_wherever_ranks_are_when_others_are_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "plan_epoch", lambda plan: plan)
    draw = random.Random(seed)
    members = tuple(range(draw.randint(2, 5)))
    ranks = {member: _Rank(member, members) for member in members}
    last: dict[int, int] = {}
    heard: dict[int, list[int]] = {}

    def lose(member: int) -> None:
        """Others may have taken in its last steps, or none."""
        samples = ranks.pop(member).samples
        last[member] = draw.randint(0, len(samples))
        heard[member] = _joined(samples[: last[member]])

    while not all(rank.over for rank in ranks.values()):
        if len(ranks) > 1 and draw.random() < 0.12:
            for member in draw.sample(sorted(ranks), draw.randint(1, len(ranks) - 1)):
                lose(member)
            if draw.random() < 0.3 and len(ranks) > 1:
                # Another loss interrupts the recovery when some have settled the first.
                _reconcile(ranks, last, draw.sample(sorted(ranks), draw.randint(0, len(ranks))))
                lose(draw.choice(sorted(ranks)))
            _reconcile(ranks, last, list(ranks))
            for rank in ranks.values():
                rank.recovery.number += 1
                rank.over = False
        else:
            draw.choice(list(ranks.values())).step()
    of_lost = [sorted(rank.assigner.of_lost()) for rank in ranks.values()]
    assert all(each == of_lost[0] for each in of_lost)
    counted = Counter(_joined(_joined(rank.samples) for rank in ranks.values()))
    for *_, samples in of_lost[0]:
        counted.update(samples)
    assert counted == Counter(range(SAMPLES))
    for member, expected in heard.items():
        traced = [samples for _, _, rank, samples in of_lost[0] if rank == member]
        assert _joined(traced) == expected
    assert (
        len(
            {
                (tuple(rank.assigner._schedule.requeued), len(rank.samples))
                for rank in ranks.values()
            }
        )
        == 1
    )


def _reconcile(ranks: dict[int, _Rank], last: dict[int, int], some: Sequence[int]) -> None:
    """Settle on some of the ranks that are left."""
    reports = [rank.assigner.report() for rank in ranks.values()]
    for rank in (ranks[member] for member in some):
        rank.membership.members = tuple(sorted(ranks))
        rank.recovery.last_counted.update(last)
        rank.assigner.reconcile(reports, SimpleNamespace())


def test_batches_stay_open_until_it_is_settled_who_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "plan_epoch", lambda plan: plan)
    rank = _Rank(0, (0, 1))
    batches = rank.assigner.batches()
    for _ in range(2):
        next(batches)
    rank.membership.members = (0,)
    rank.assigner.reconcile([rank.assigner.report()], SimpleNamespace())
    rank.recovery.number += 1
    rank.assigner.commit_step((0,))
    taken = [sample for images, _ in batches for sample in images.tolist()]
    assert rank.assigner._schedule.requeued == [
        *range(1, BATCH, 2),
        *range(BATCH + 1, 2 * BATCH, 2),
    ]
    assert sorted(taken) == sorted([*range(2 * BATCH, SAMPLES), *rank.assigner._schedule.requeued])


def test_a_state_has_what_ranks_were_dealt_that_are_lost_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before this rank has taken the batch from which on it shares with those that are left."""
    monkeypatch.setattr(history, "plan_epoch", lambda plan: plan)
    rank = _Rank(0, (0, 1, 2))
    rank.step()
    next(rank._batches)
    rank.membership.members = (0, 2)
    # Another rank has taken a batch more.
    rank.assigner.reconcile([rank.assigner.report(), BatchReport(3, 0)], SimpleNamespace())
    rank.recovery.number += 1
    rank.assigner.commit_step((0, 2))
    lost = list(range(BATCH + 1, 2 * BATCH, 3))
    assert rank.assigner.state() == {"position": 2 * BATCH, "again": lost}
    rank.step()
    lost += range(2 * BATCH + 1, 3 * BATCH, 3)
    assert rank.assigner.state() == {"position": 3 * BATCH, "again": lost}
    rank.step()
    assert rank.assigner._schedule.requeued == lost
    assert rank.assigner.state() == {"position": 4 * BATCH, "again": lost}


@pytest.mark.parametrize("lost_at", range(1, 8))
@pytest.mark.parametrize("has_counted", [True, False])
def test_the_number_of_batches_that_come_is_known_once_a_step_is_over(
    lost_at: int, has_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 is lost in a step: it counts, or its samples of the step come again."""
    monkeypatch.setattr(history, "plan_epoch", lambda plan: plan)
    rank = _Rank(0, (0, 1, 2))
    known: list[int] = []
    while not known or known[-1]:
        if len(known) + 1 == lost_at and not has_counted:
            rank.membership.members = (0, 1)
        rank.step()
        if len(known) + 1 == lost_at:
            _reconcile({0: rank, 1: rank}, {}, [0])
            rank.recovery.number += 1
        known.append(rank.assigner.coming())
    rank.step()
    assert rank.over
    planned = -(-SAMPLES // BATCH)
    steps = planned + (not has_counted)  # The last batch has room for one more sample.
    before, after = known[: lost_at - 1], known[lost_at - 1 :]
    assert before == list(range(planned - 1, planned - lost_at, -1))
    assert after == list(range(steps - lost_at, -1, -1))

"""Sums that all ranks take or none of them, over losses, without MPI."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dlio.comm.single import SingleCommunicator
from dlio.errors import PeerLost
from dlio.exchange import parse_exchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.round_commit import RoundCommit, RoundReport


class _Comm(SingleCommunicator):
    """A rank that receives sevens, and notes the rank that gives them."""

    def __init__(self) -> None:
        self.givers: list[int] = []

    def bcast(self, array: npt.NDArray[Any], root: int = 0) -> None:
        self.givers.append(root)
        array[:] = 7


class _Sums:
    """Two sums, of which one is interrupted as often as the test wants."""

    def __init__(self) -> None:
        self.values = {False: np.zeros(3), True: np.zeros(3)}
        self.interruptions = 0
        self.began = 0
        self.undone: list[bool] = []

    def sum_all(self) -> None:
        self.began += 1
        if self.interruptions:
            self.interruptions -= 1
            raise PeerLost("a rank is gone")

    def reset(self, undo: bool) -> None:
        self.undone.append(undo)

    def arrays(self, last: bool) -> list[npt.NDArray[Any]]:
        return [self.values[last]]


class _Turns:
    """One rank's turns, and the reports of the others in each recovery."""

    def __init__(self, *others: RoundReport) -> None:
        self.comm, self.sums = _Comm(), _Sums()
        self.others = list(others)
        recovery: Any = SimpleNamespace(
            membership=SimpleNamespace(members=(0, 1, 2)),
            register=lambda _: None,
            recover=self._run,
        )
        setting = ExchangeContext(
            parse_exchange("allreduce"),
            self.comm,
            np.zeros(3, np.int32),
            recovery=recovery,
            members=(0, 1, 2),
        )
        self.recovery = recovery
        self.commit = RoundCommit(setting, self.sums)

    def _run(self) -> None:
        self.recovery.membership.members = (0, 2)
        self.commit.reconcile([self.commit.report(), self.others.pop(0)], self.comm)


def _report(closed: int, group: int = 0) -> RoundReport:
    return RoundReport(closed, (0, 1, 2), group)


def test_a_turn_that_another_rank_has_closed_is_given() -> None:
    turns = _Turns(_report(1))
    turns.sums.interruptions = 1
    turns.commit.close_turn()
    assert (turns.sums.began, turns.sums.undone, turns.comm.givers) == (1, [False], [1])
    assert turns.sums.values[False].tolist() == [7, 7, 7]
    assert turns.commit.contributors == (0, 1, 2)


@pytest.mark.parametrize("other", [_report(0), _report(1, group=1)], ids=["behind", "elsewhere"])
def test_a_turn_that_nobody_has_closed_is_summed_again(other: RoundReport) -> None:
    turns = _Turns(other)
    turns.sums.interruptions = 1
    turns.commit.close_turn()
    assert (turns.sums.began, turns.sums.undone, turns.comm.givers) == (2, [True], [])
    assert turns.commit.contributors == (0, 2)


@pytest.mark.parametrize("taken", [False, True])
def test_a_rank_that_has_closed_a_turn_gives_its_sums(taken: bool) -> None:
    """Where it has taken them, they are in the buffer of the turn before."""
    turns = _Turns(_report(0))
    turns.commit.close_turn()
    if taken:
        turns.commit.take()
    turns.commit.reconcile([turns.commit.report(), _report(0)], turns.comm)
    assert turns.comm.givers == [0]
    assert turns.sums.values[taken].tolist() == [7, 7, 7]
    assert turns.sums.values[not taken].tolist() == [0, 0, 0]
    # Sums of the next turn may be under way only once this one's are taken.
    assert turns.sums.undone == [taken]

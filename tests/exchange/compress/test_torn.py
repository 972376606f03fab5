"""Residuals over a step that a loss has torn: decoded values and residuals are the gradients."""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dlio.comm.comm_protocol import Array, Buffer
from dlio.comm.single import SingleCommunicator
from dlio.errors import PeerLost
from dlio.exchange import parse_exchange
from dlio.exchange.buffer_placement import make_host_sum
from dlio.exchange.compress import NAMES
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.sums import Sum

LAYOUT: Final = [("w", (90, 100)), ("b", (40,))]
ENTRIES: Final = 90 * 100 + 40
_F32 = npt.NDArray[np.float32]


class _Post:
    """Messages of ranks of one thread, and the ranks that are left."""

    def __init__(self, ranks: int) -> None:
        self.members = tuple(range(ranks))
        self.mail: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)

    def lose(self, member: int) -> None:
        self.members = tuple(each for each in self.members if each != member)
        self.mail.clear()


class _Done:
    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True


class _Receive(_Done):
    def __init__(self, post: _Post, way: tuple[int, int, int], into: Buffer) -> None:
        self._post, self._members = post, post.members
        self._mail, self._into, self._has = post.mail[way], into, False

    def done(self) -> bool:
        if self._members != self._post.members:
            raise PeerLost("a rank is gone")
        if not self._has and self._mail:
            message = np.frombuffer(self._mail.popleft(), np.uint8)
            np.asarray(self._into)[: len(message)] = message
            self._has = True
        return self._has


class _Comm(SingleCommunicator):
    """One of the ranks."""

    def __init__(self, post: _Post, member: int) -> None:
        self._post, self._member = post, member

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._post.members.index(self._member)

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self._post.members)

    def isend(self, data: Buffer, dest: int, tag: int) -> _Done:
        self._post.mail[self.rank, dest, tag].append(bytes(data))
        return _Done()

    def irecv(self, into: Buffer, source: int, tag: int) -> _Done:
        return _Receive(self._post, (source, self.rank, tag), into)

    def bcast(self, array: Array, root: int = 0) -> None:
        raise NotImplementedError


class _Ranks:
    """Sums of three ranks, which are driven in turn."""

    def __init__(self, exchange: str) -> None:
        self.post = _Post(3)
        recovery: Any = SimpleNamespace(membership=self.post)
        self.sums: dict[int, Sum] = {}
        for member in self.post.members:
            comm: Any = _Comm(self.post, member)
            node_of = np.array([0, 0, 1], np.int32)
            setting = ExchangeContext(
                parse_exchange(exchange), comm, node_of, recovery=recovery, members=(0, 1, 2)
            )
            self.sums[member] = make_host_sum(setting, LAYOUT, 1)
        self._random = np.random.default_rng(5)

    def owed(self) -> _F32:
        """The residuals of all ranks that are left, shape (ranks, entries)."""
        each = [self.sums[member].state()["owed"].numpy() for member in self.post.members]
        return np.array(each, np.float32)

    def gradients(self) -> dict[int, _F32]:
        return {
            member: self._random.standard_normal(ENTRIES).astype(np.float32)
            for member in self.post.members
        }

    def start(self, gradients: dict[int, _F32]) -> dict[int, _F32]:
        """Begin the sum of copies of the gradients, and return these."""
        regions = {member: gradients[member].copy() for member in self.post.members}
        for member, region in regions.items():
            self.sums[member].start(torch.from_numpy(region))
        return regions

    def end(self) -> None:
        """Drive ranks until all of them have the sum."""
        left = list(self.post.members)
        for _ in range(20):
            left = [member for member in left if not self.sums[member].advance()]
            if not left:
                return
        raise AssertionError("a sum does not end")

    def lose(self, member: int, undo: bool) -> None:
        self.post.lose(member)
        for each in self.post.members:
            self.sums[each].reset(undo)


def _lost(sums: _F32, before: _F32, gradients: dict[int, _F32], after: _F32) -> float:
    """The largest entry of what has come in and has neither come out nor is owed."""
    came = np.sum(list(gradients.values()), axis=0, dtype=np.float64) + before.sum(0)
    return float(np.abs(came - sums - after.sum(0)).max())


EXCHANGES = [f"allreduce+{name}" for name in NAMES] + ["tree+adaptive", "hierarchical+int8"]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_sum_that_nobody_has_is_begun_anew_with_the_residuals_of_before(
    exchange: str, turns: int
) -> None:
    ranks = _Ranks(exchange)
    for _ in range(2):
        ranks.start(ranks.gradients())
        ranks.end()
    before = ranks.owed()
    assert np.abs(before).max() > 1e-4
    torn = ranks.gradients()
    ranks.start(torn)
    for _ in range(turns):
        ranks.sums[0].advance()
        ranks.sums[2].advance()
    ranks.lose(1, undo=True)
    np.testing.assert_array_equal(ranks.owed(), before[[0, 2]])
    regions = ranks.start(torn)
    ranks.end()
    np.testing.assert_array_equal(regions[0], regions[2])
    left = {member: torn[member] for member in (0, 2)}
    assert _lost(regions[0], before[[0, 2]], left, ranks.owed()) < 1e-5
    # The last one that is left sums nothing, and pays what it owes.
    before = ranks.owed()
    ranks.lose(0, undo=False)
    last = ranks.gradients()
    regions = ranks.start(last)
    ranks.end()
    np.testing.assert_array_equal(regions[2], last[2] + before[1])
    assert not ranks.owed().any()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_sum_that_a_rank_has_keeps_the_residuals_that_its_messages_left(exchange: str) -> None:
    ranks = _Ranks(exchange)
    ranks.start(ranks.gradients())
    ranks.end()
    before, gradients = ranks.owed(), ranks.gradients()
    regions = ranks.start(gradients)
    ranks.end()
    after = ranks.owed()
    # Rank 2 has sent all it had to, and not taken the sum: rank 0 gives it.
    ranks.lose(1, undo=False)
    np.testing.assert_array_equal(ranks.owed(), after[[0, 2]])
    assert _lost(regions[0], before, gradients, after) < 1e-5

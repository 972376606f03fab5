"""Ranks that survive each other without MPI, as threads of one process.

A rank is lost here by a word in the store, as the launcher writes it; its thread and its sockets
may stay, so that nothing else tells the others of it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlio.comm.comm_protocol import Request
from dlio.comm.private_store import PrivateStore, StoreServer
from dlio.comm.survival.job_store import EventLog
from dlio.comm.survival.membership import messages_of
from dlio.comm.survival.store_membership import StoreMembership
from dlio.errors import CommError, PeerLost
from dlio.testing import CommunicatorTests
from dlio.testing.promises import run_promises

LIMIT_S = 60.0


class Job:
    """Ranks as threads, and the store of a launcher."""

    def __init__(self, folder: str) -> None:
        self.server = StoreServer(folder)
        self.store = PrivateStore(folder)
        self.events = EventLog(self.store)
        self.threads = ThreadPoolExecutor(8)
        self.ranks: list[StoreMembership] = []

    def start(self, ranks: int, least: int = 1) -> list[StoreMembership]:
        """Make the membership of each rank."""
        starting = [
            self.threads.submit(StoreMembership, self.store, rank, ranks, least)
            for rank in range(ranks)
        ]
        self.ranks = [each.result(LIMIT_S) for each in starting]
        return self.ranks

    def kill(self, *ranks: int) -> None:
        """Write deaths into the store, as the launcher does."""
        for rank in ranks:
            self.events.append({"dead": rank})

    def each(self, act: Callable[[StoreMembership], Any], *ranks: int) -> list[Any]:
        """Return `act` of the given ranks, or all of them, each in a thread of its own."""
        chosen = ranks or range(len(self.ranks))
        acting: list[Future[Any]] = [self.threads.submit(act, self.ranks[rank]) for rank in chosen]
        return [each.result(LIMIT_S) for each in acting]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.threads.shutdown()
        self.store.close()
        self.server.close()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Job]:
    """A job that is closed after the test."""
    monkeypatch.setenv("DLIO_TIMEOUT", str(LIMIT_S))
    tmp_path.chmod(0o700)
    job = Job(str(tmp_path))
    yield job
    job.close()


def _sum(rank: StoreMembership) -> float:
    array = np.full(1000, 1.0 + rank.me)
    rank.world.wait([rank.world.iallreduce(array)], "a sum")
    assert (array == array[0]).all()
    return float(array[0])


def _ends(request: Request) -> bool:
    """True if a request ends by PeerLost, False if it is done. Fails after a deadline."""
    deadline = time.monotonic() + LIMIT_S
    try:
        while not request.done():
            assert time.monotonic() < deadline
            time.sleep(1e-3)
    except PeerLost:
        return True
    return False


def test_its_communicators_keep_the_contract(job: Job) -> None:
    job.start(3)
    broken = job.each(lambda rank: run_promises(CommunicatorTests(), rank.world, quiet=True))
    assert broken == [[]] * 3


@pytest.mark.parametrize("dead", [(1,), (0,), (0, 2), (1, 2, 3)])
def test_those_that_are_left_go_on(job: Job, dead: tuple[int, ...]) -> None:
    job.start(4)
    left = tuple(rank for rank in range(4) if rank not in dead)
    assert job.each(_sum) == [10.0] * 4
    job.kill(*dead)
    assert job.each(lambda rank: rank.renew({"at": rank.me}), *left) == [
        [{"at": rank} for rank in left]
    ] * len(left)
    for place, number in enumerate(left):
        rank = job.ranks[number]
        assert (rank.members, rank.number) == (left, 1)
        assert (rank.world.rank, rank.world.size) == (place, len(left))
    assert job.each(_sum, *left) == [float(sum(1 + rank for rank in left))] * len(left)
    assert job.each(lambda rank: rank.world.allgather(rank.me), *left) == [list(left)] * len(left)


def test_everything_under_way_ends_though_no_connection_breaks(job: Job) -> None:
    job.start(3)
    arrays = [np.ones(10) for _ in range(2)]
    sums = [job.ranks[k].world.iallreduce(arrays[k]) for k in range(2)]
    inboxes = [bytearray(4) for _ in range(2)]
    receives = [job.ranks[k].world.irecv(inboxes[k], 2, 1) for k in range(2)]
    assert not any(each.done() for each in [*sums, *receives])
    job.kill(2)
    assert all(map(_ends, [*sums, *receives]))
    with pytest.raises(PeerLost):
        job.ranks[0].world.iallreduce(np.ones(1))
    with pytest.raises(PeerLost):
        job.ranks[0].world.isend(bytearray(1), 1, 1)


def test_an_abandoned_sum_never_writes_into_memory_in_use(job: Job) -> None:
    """Gloo completes the sum of all three after rank 0 has gone on."""
    job.start(3)
    arrays = [np.full(50, 1.0) for _ in range(3)]
    first = job.ranks[0].world.iallreduce(arrays[0])
    part = job.ranks[0].world.part
    others = [job.ranks[k].world.iallreduce(arrays[k]) for k in (1, 2)]
    assert not any(map(_ends, others))
    deadline = time.monotonic() + LIMIT_S
    while not part.is_idle():
        assert time.monotonic() < deadline
    job.kill(2)
    job.each(lambda rank: rank.renew(None), 0, 1)
    arrays[0][:] = 7
    assert _ends(first)
    assert (arrays[0] == 7).all()


def test_an_abandoned_message_never_writes_into_memory_in_use(job: Job) -> None:
    job.start(3)
    whole = np.full(1 << 24, 1, np.uint8)
    inbox = np.zeros_like(whole)
    receive = job.ranks[0].world.irecv(inbox, 1, 5)
    job.kill(2)
    while not job.ranks[0].world.part.generation.over:
        time.sleep(1e-3)
    assert _ends(receive)
    # Rank 1 has not noticed, and sends.
    job.ranks[1].mail.send(whole.data, 0, 5, (0, 0))
    job.each(lambda rank: rank.renew(None), 0, 1)

    def exchange(rank: StoreMembership) -> bytes:
        got = bytearray(3)
        other = 1 - rank.world.rank
        messages = messages_of(rank.world)
        sent = messages.isend(bytearray(b"new"), other, 5)
        rank.world.wait([messages.irecv(got, other, 5), sent], "a message")
        return bytes(got)

    # In order after the old one on the same connection, which is thereby dropped.
    assert job.each(exchange, 0, 1) == [b"new"] * 2
    assert not inbox.any()


def test_messages_of_an_earlier_generation_cannot_begin(job: Job) -> None:
    job.start(3)
    messages = messages_of(job.ranks[0].world)
    job.kill(1)
    job.each(lambda rank: rank.renew(None), 0, 2)
    with pytest.raises(PeerLost):
        messages.isend(bytearray(1), 1, 1)


def test_all_agree_on_the_same_answer(job: Job) -> None:
    job.start(3)
    assert job.each(lambda rank: rank.agree(True)) == [True] * 3
    assert job.each(lambda rank: rank.agree(rank.me != 1)) == [False] * 3
    agreeing = [job.threads.submit(job.ranks[k].agree, True) for k in (0, 1)]
    time.sleep(0.05)
    assert not any(each.done() for each in agreeing)
    job.kill(2)
    assert [each.result(LIMIT_S) for each in agreeing] == [False] * 2


def test_a_rank_that_is_lost_after_it_has_agreed_changes_no_answer(job: Job) -> None:
    job.start(3)
    job.each(lambda rank: rank.agree(True), 0, 1, 2)
    waiting = [job.threads.submit(job.ranks[k].agree, True) for k in (1, 2)]
    time.sleep(0.05)
    job.kill(1)
    # The one that is told first has written the answer.
    answers = [each.result(LIMIT_S) for each in waiting]
    assert answers == [False] * 2
    assert job.ranks[0].agree(True) is False


def test_parts_and_duplicates_are_made_anew(job: Job) -> None:
    job.start(4)

    def make(rank: StoreMembership) -> tuple[Any, Any]:
        half = rank.world.split(rank.me // 2)
        return rank.world.dup(), half.dup()

    made = job.each(make)
    job.kill(1)
    job.each(lambda rank: rank.renew(None), 0, 2, 3)
    places = {0: [(0, 3), (0, 1)], 2: [(1, 3), (0, 2)], 3: [(2, 3), (1, 2)]}
    for rank, expected in places.items():
        assert [(comm.rank, comm.size) for comm in made[rank]] == expected
    gathered = job.each(lambda rank: made[rank.me][1].allgather(rank.me), 0, 2, 3)
    assert gathered == [[0], [2, 3], [2, 3]]


def test_one_that_a_rank_has_closed_is_gone(job: Job) -> None:
    job.start(3)
    made = job.each(lambda rank: rank.world.dup())
    made[0].close()
    job.kill(2)
    job.each(lambda rank: rank.renew(None), 0, 1)
    assert made[1].over
    assert job.each(_sum, 0, 1) == [3.0] * 2


def test_a_communicator_is_made_by_all_or_by_none(job: Job) -> None:
    job.start(3)
    making = [job.threads.submit(job.ranks[k].world.dup) for k in (0, 1)]
    time.sleep(0.05)
    job.kill(2)
    for each in making:
        with pytest.raises(PeerLost):
            each.result(LIMIT_S)
    job.each(lambda rank: rank.renew(None), 0, 1)
    again = job.each(lambda rank: rank.world.dup(), 0, 1)
    assert job.each(lambda rank: again[rank.me].allgather(rank.me), 0, 1) == [[0, 1]] * 2


@pytest.mark.parametrize("moment", ["before it has come", "before groups", "after groups"])
def test_a_rank_is_lost_while_the_others_regroup(
    job: Job, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(4)
    job.kill(3)
    if moment == "before it has come":
        renewing = [job.threads.submit(job.ranks[k].renew, k) for k in (0, 1)]
        time.sleep(0.05)
        assert not any(each.done() for each in renewing)
    else:
        # Rank 2 comes, and ends before or after it has connected.
        built, stopped = job.ranks[2]._built, threading.Event()

        def end(*wanted: Any) -> Any:
            if moment == "after groups":
                built(*wanted)
            stopped.set()
            raise SystemExit

        monkeypatch.setattr(job.ranks[2], "_built", end)
        ending = job.threads.submit(job.ranks[2].renew, 2)
        renewing = [job.threads.submit(job.ranks[k].renew, k) for k in (0, 1)]
        assert stopped.wait(LIMIT_S)
        with pytest.raises(SystemExit):
            ending.result(LIMIT_S)
    job.kill(2)
    assert [each.result(LIMIT_S) for each in renewing] == [[0, 1]] * 2
    assert [job.ranks[k].members for k in (0, 1)] == [(0, 1)] * 2
    assert job.each(_sum, 0, 1) == [3.0] * 2


def test_a_rank_that_nobody_lost_can_end_a_generation(job: Job) -> None:
    """As after a broken connection: all meet again, and connect anew."""
    job.start(3)
    waiting = job.ranks[1].world.iallreduce(np.ones(1))
    renewing = job.threads.submit(job.ranks[0].renew, None)
    assert _ends(waiting)
    job.each(lambda rank: rank.renew(None), 1, 2)
    renewing.result(LIMIT_S)
    assert job.ranks[0].members == (0, 1, 2)
    assert job.each(_sum) == [6.0] * 3


def test_too_few_ranks_do_not_go_on(job: Job) -> None:
    job.start(3, least=2)
    job.kill(0, 1)
    with pytest.raises(CommError, match="1 rank left, and --min-ranks is 2: this job ends"):
        job.ranks[2].renew(None)


def test_generations_follow_each_other(job: Job) -> None:
    job.start(2)
    for number in range(1, 20):
        job.each(lambda rank: rank.renew(None))
        assert job.each(_sum) == [3.0] * 2
        assert job.ranks[0].number == number

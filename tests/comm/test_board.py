"""The board of a node: one row per rank, which others read."""

import os
import threading
from collections.abc import Iterator

import pytest

from dlio.comm import board
from dlio.comm.board import WINDOW, Board, BoardReader, RankPhase, RankRow
from dlio.comm.comm_protocol import Request
from dlio.comm.deadlines import wait_all


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """The row of this process."""
    monkeypatch.setattr(board, "_board", None)
    row = board.open_board()
    assert board.open_board() is row
    yield row
    os.close(row.file)


def _read(own: Board) -> RankRow:
    reader = BoardReader(os.getpid(), own.file)
    row = reader.read()
    reader.close()
    assert row is not None
    return row


def test_a_row_tells_steps_and_phases(own: Board) -> None:
    assert _read(own).phase is RankPhase.UNWATCHED
    phases = []
    with board.computing():
        phases.append(_read(own).phase)
        with board.blocked():
            phases.append(_read(own).phase)
            with board.blocked():
                pass
            phases.append(_read(own).phase)
        phases.append(_read(own).phase)
        with board.off_the_record():
            phases.append(_read(own).phase)
    computes, waits, elsewhere = RankPhase.COMPUTING, RankPhase.BLOCKED, RankPhase.UNWATCHED
    assert phases == [computes, waits, waits, computes, elsewhere]
    row = _read(own)
    assert (row.phase, row.step, len(row.seconds)) == (elsewhere, 1, 1)
    assert 0 < row.busy[0] <= row.seconds[0]


def test_a_row_keeps_the_last_steps(own: Board) -> None:
    for _ in range(WINDOW + 3):
        with board.computing():
            pass
    row = _read(own)
    assert (row.step, len(row.seconds), len(row.busy)) == (WINDOW + 3, WINDOW, WINDOW)


def test_something_else_in_the_midst_of_a_step_lasts_until_the_next(own: Board) -> None:
    with board.computing():
        board.end_step()
        assert _read(own).phase is RankPhase.UNWATCHED
    with board.computing():
        assert _read(own).phase is RankPhase.COMPUTING
    assert len(_read(own).seconds) == 2


class _Later:
    """A request that is done at the third look, and tells the phase meanwhile."""

    def __init__(self, own: Board) -> None:
        self._own, self.phases = own, list[RankPhase]()

    def done(self) -> bool:
        self.phases.append(_read(self._own).phase)
        return len(self.phases) > 2

    def cancel(self) -> bool:
        return True


def test_a_rank_waits_while_its_main_thread_does(own: Board) -> None:
    of_main, of_other = _Later(own), _Later(own)

    def wait(request: Request) -> None:
        wait_all([request], "a test", 10, "this test")

    with board.computing():
        wait(of_main)
        thread = threading.Thread(target=wait, args=(of_other,))
        thread.start()
        thread.join()
    assert of_main.phases == [RankPhase.COMPUTING, RankPhase.BLOCKED, RankPhase.BLOCKED]
    assert of_other.phases == [RankPhase.COMPUTING] * 3


def test_beats_come_from_the_thread_that_beats(own: Board) -> None:
    first = _read(own)
    thread = threading.Thread(target=own.beat)
    thread.start()
    thread.join()
    later = _read(own)
    assert later.beat > first.beat
    assert later.thread != first.thread == threading.get_native_id()


def test_a_rank_that_has_ended_has_no_row() -> None:
    reader = BoardReader(2**22 + 1, 3)
    assert reader.read() is None
    reader.close()


def test_without_a_row_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_board", None)
    with board.computing(), board.blocked(), board.off_the_record():
        board.end_step()
    assert board._board is None

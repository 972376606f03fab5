"""The progress thread runs only while it has messages to move on."""

import threading
from collections.abc import Callable

from dlio.comm.progress_thread import ProgressThread
from dlio.comm.single import SingleCommunicator


class _Poked(SingleCommunicator):
    """Two ranks of a library that makes progress only when it is called."""

    size = 2

    def __init__(self, helps: bool = True) -> None:
        self.helps = helps
        self.pokes = 0

    def poke(self) -> bool:
        self.pokes += 1
        return self.helps


def _running() -> bool:
    return any(thread.name == "dlio-progress" for thread in threading.enumerate())


def test_a_library_is_called_while_something_is_under_way(soon: Callable[..., bool]) -> None:
    comm = _Poked()
    progress = ProgressThread(comm)
    assert not _running()
    progress.go()
    assert soon(lambda: comm.pokes > 5)
    progress.rest()
    # One more call may be under way.
    assert soon(lambda: progress._thread is not None and _rests(comm))
    before = comm.pokes
    progress.go()
    assert soon(lambda: comm.pokes > before)
    progress.close()
    assert not _running()
    progress.go()
    assert not _running()


def _rests(comm: _Poked) -> bool:
    before = comm.pokes
    threading.Event().wait(0.05)
    return comm.pokes == before


def test_no_thread_is_started_where_it_does_not_help() -> None:
    for comm in (SingleCommunicator(), _Poked(helps=False)):
        progress = ProgressThread(comm)
        progress.go()
        assert not _running()
        progress.rest()
        progress.close()

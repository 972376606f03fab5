"""A forked child has free locks, empty groups of threads, and file systems of its own."""

import os
import threading
from collections.abc import Callable

import fsspec
import pytest

from dlio.data.source import FsspecHandle
from dlio.util.forks import call_in_child, new_lock, new_rlock
from dlio.util.threads import Workers

_DEADLINE_S = 60.0


def in_child(check: Callable[[], object]) -> bool:
    """The truth of `check()` in a forked child."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("make", [new_lock, new_rlock])
def test_a_lock_that_another_thread_holds_is_free_in_a_child(
    make: Callable[[], threading.Lock],
) -> None:
    lock = make()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(_DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(_DEADLINE_S)
    assert in_child(lambda: lock.acquire(timeout=1.0))
    assert not lock.acquire(blocking=False)  # It is still the thread's.
    over.set()
    thread.join(_DEADLINE_S)
    assert lock.acquire(timeout=1.0)


class _Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


def test_methods_are_called_in_children_while_their_object_lives() -> None:
    counter, gone = _Counter(), _Counter()
    call_in_child(counter.count)
    call_in_child(gone.count)
    del gone
    assert in_child(lambda: counter.calls == 1)
    assert counter.calls == 0


def test_a_group_has_no_threads_in_a_child() -> None:
    over = threading.Event()
    with Workers("test", lambda _: over.wait(_DEADLINE_S), 2, wake=over.set) as group:
        assert in_child(lambda: len(group) == 0 and group.close() == [])
        assert len(group.alive()) == 2


def test_a_child_opens_its_own_remote_file_system() -> None:
    class Files(FsspecHandle):
        def __init__(self) -> None:
            self._opened = fsspec.filesystem("http", block_size=77)

    files = Files()
    parents = files._files
    assert files._files is parents

    def renewed() -> bool:
        mine = files._files
        same = type(mine) is type(parents) and mine.storage_options == parents.storage_options
        return same and mine is not parents and mine is files._files and mine.loop is not None

    assert in_child(renewed)
    assert FsspecHandle()._files is None

"""The funnel: one thread makes the calls of all threads."""

import threading

import pytest

from dlio.comm import funnel
from dlio.comm.funnel import Funnel, wait_serving


def _still_running(thread: threading.Thread, limit_s: float) -> bool:
    thread.join(limit_s)
    return thread.is_alive()


def test_calls_are_made_by_the_owner_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Funnel()
    monkeypatch.setattr(funnel, "_funnel", made)
    callers: list[int] = []
    results: list[int] = []

    def one() -> int:
        callers.append(threading.get_ident())
        return len(callers)

    def work() -> None:
        results.extend(made.call(one) for _ in range(20))
        with pytest.raises(ZeroDivisionError):
            made.call(lambda: 1 / 0)

    thread = threading.Thread(target=work)
    thread.start()
    assert wait_serving(lambda limit_s: not _still_running(thread, limit_s), 10)
    assert results == list(range(1, 21))
    assert set(callers) == {threading.get_ident()}
    assert not wait_serving(threading.Event().wait, 0.01)


def test_calls_that_are_handed_over_wait_for_the_owner() -> None:
    made = Funnel()
    done = threading.Event()
    thread = threading.Thread(target=lambda: made.call(done.set))
    thread.start()
    assert not done.wait(0.1)
    made.pump()
    thread.join(60)
    assert done.is_set()


def test_an_owner_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(funnel, "_LOOK_S", 0.01)
    made: list[Funnel] = []
    owner = threading.Thread(target=lambda: made.append(Funnel()))
    owner.start()
    owner.join()
    with pytest.raises(RuntimeError, match="has ended"):
        made[0].call(lambda: None)

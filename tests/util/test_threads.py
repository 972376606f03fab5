"""Groups of threads: they stop when told, nobody forgets who did not, and none outlives main."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from dlio.util import threads
from dlio.util.threads import Workers, join_with


def until_stopped(entered: threading.Semaphore, workers: list[Workers]) -> Callable[[int], None]:
    def run(_: int) -> None:
        entered.release()
        workers[0].stopping.wait(60)

    return run


def test_all_threads_run_under_their_names_and_end_with_the_block() -> None:
    entered, group = threading.Semaphore(0), list[Workers]()
    group.append(Workers("dlio-test", until_stopped(entered, group), 3))
    with group[0] as workers:
        for _ in range(3):
            assert entered.acquire(timeout=400)
        assert workers.alive() == ["dlio-test-0", "dlio-test-1", "dlio-test-2"]
        assert not workers.wait(0.01)
    assert workers.alive() == []


def test_a_thread_is_given_its_number() -> None:
    numbers: list[int] = []
    with Workers("dlio-test", numbers.append, 4) as workers:
        assert workers.wait(60)
    assert sorted(numbers) == [0, 1, 2, 3]


def test_a_single_thread_has_no_number_in_its_name() -> None:
    done = threading.Event()
    with Workers("dlio-test", lambda _: done.wait(60), wake=done.set) as workers:
        assert workers.alive() == ["dlio-test"]


def test_no_threads_are_waited_for_at_once() -> None:
    with Workers("dlio-test", lambda _: None, 0) as workers:
        assert workers.wait()
        assert len(workers) == 0


def test_wake_is_called_once_after_the_flag_is_set() -> None:
    seen: list[bool] = []
    ready = threading.Event()

    def wake() -> None:
        seen.append(workers.stopping.is_set())
        ready.set()

    workers = Workers("dlio-test", lambda _: ready.wait(60), wake=wake).start()
    workers.stop()
    workers.stop()
    assert workers.close() == []
    assert seen == [True]


def test_who_does_not_end_is_returned_each_time_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    workers = Workers("dlio-hung", lambda _: release.wait(60), 2, stop_timeout_s=0.01).start()
    with caplog.at_level(logging.WARNING, "dlio"):
        assert workers.close() == ["dlio-hung-0", "dlio-hung-1"]
        assert workers.close() == ["dlio-hung-0", "dlio-hung-1"]
    assert len(caplog.messages) == 1
    assert "dlio-hung-0, dlio-hung-1 did not end" in caplog.messages[0]
    release.set()
    assert workers.wait(60)


def test_a_thread_may_close_its_own_group() -> None:
    closed: list[list[str]] = []
    group: list[Workers] = []
    group.append(Workers("dlio-test", lambda _: closed.append(group[0].close())))
    assert group[0].start().wait(60)
    assert closed == [[]]


def test_joining_does_the_work_that_the_threads_need_done_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_join_by", threads._join_by)
    done = threading.Event()

    def waiting(wait: Callable[[float], bool], timeout_s: float) -> bool:
        done.set()
        return wait(timeout_s)

    join_with(waiting)
    with Workers("dlio-test", lambda _: done.wait(60)) as workers:
        assert workers.wait(60)


def run_script(body: str) -> "subprocess.CompletedProcess[str]":
    script = (
        f"import atexit, os, sys, threading, time\nfrom dlio.util.threads import Workers\n{body}"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=False
    )


ENDLESS = """
def run(number):
    while not workers.stopping.wait(0.001):
        pass
    time.sleep(0.1)
    os.write(1, b"ended %d\\n" % number)
workers = Workers("dlio-test", run, 2)
workers.start()
"""


def test_threads_that_nobody_closes_are_joined_before_the_interpreter_ends() -> None:
    ended = run_script(ENDLESS)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == ["ended 0", "ended 1"]


def test_they_are_joined_after_an_error_too() -> None:
    ended = run_script(ENDLESS + "raise SystemExit(3)")
    assert ended.returncode == 3
    assert sorted(ended.stdout.splitlines()) == ["ended 0", "ended 1"]


def test_the_users_own_threads_and_exit_handlers_come_first() -> None:
    ended = run_script(
        ENDLESS
        + """
def mine():
    threading.main_thread().join()
    time.sleep(0.2)
    print("thread", len(workers.alive()), flush=True)
threading.Thread(target=mine).start()
atexit.register(lambda: print("handler", len(workers.alive()), flush=True))
"""
    )
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[:2] == ["thread 2", "handler 2"]
    assert len(ended.stdout.splitlines()) == 4


def test_groups_that_serve_others_are_stopped_after_them() -> None:
    ended = run_script(
        """
def serve(_):
    server.stopping.wait(60)
    os.write(1, b"server\\n")
server = Workers("dlio-server", serve, serves_others=True)
server.start()
def work(number):
    worker.stopping.wait(60)
    time.sleep(0.1)
    assert not server.stopping.is_set()
    os.write(1, b"worker\\n")
worker = Workers("dlio-worker", work, 2)
worker.start()
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["worker", "worker", "server"]


def test_a_hung_thread_is_reported_and_does_not_hold_up_the_end() -> None:
    ended = run_script(
        """
Workers("dlio-hung", lambda _: time.sleep(600), stop_timeout_s=0.05).start()
"""
    )
    assert ended.returncode == 0
    assert len(ended.stderr.splitlines()) == 1
    assert "dlio-hung did not end within 0.05 s" in ended.stderr


@pytest.mark.cold  # A fork has imported dlio before.
def test_no_thread_is_started_when_the_interpreter_ends() -> None:
    # Registered before dlio's own handler, so called after it.
    script = """
import atexit
def late():
    try:
        Workers("dlio-late", print).start()
    except RuntimeError as error:
        print(error)
atexit.register(late)
from dlio.util.threads import Workers
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.stdout == "dlio cannot start threads: the interpreter is ending\n"


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    ended = run_script(
        """
release = threading.Event()
workers = Workers("dlio-test", lambda _: release.wait(60), wake=release.set).start()
child = os.fork()
if child:
    print("child ended", os.waitpid(child, 0)[1], flush=True)
else:
    with Workers("dlio-child", lambda _: None) as own:
        own.wait(60)
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "child ended 0\n", "")

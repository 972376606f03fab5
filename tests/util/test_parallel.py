"""Calls on a source in threads: in order, with their errors, and never waited for in vain."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from functools import partial

import pytest

from dlio.errors import SourceError
from dlio.util.parallel import SourceThread, Task, each_of, follow
from tests.conftest import SOURCES

HANGS = """
import threading
from dlio.errors import SourceError
from dlio.util.parallel import each_of

try:
    each_of(lambda _: threading.Event().wait(), [1, 2], 2, "/remote")
except SourceError as error:
    print(error, flush=True)
"""


def test_results_are_in_the_order_of_items() -> None:
    second = threading.Event()

    def call(item: int) -> int:
        if item == 0:
            assert second.wait(60)  # The second call ends first.
        else:
            second.set()
        return -item

    assert each_of(call, [0, 1], 2, "data") == [0, -1]
    assert each_of(call, [], 2, "data") == []


def test_the_first_error_is_raised() -> None:
    def call(item: int) -> int:
        raise SourceError(f"item {item} is bad")

    with pytest.raises(SourceError, match="item 3 is bad"):
        each_of(call, [3], 4, "data")


def test_tasks_that_follow_others_are_run() -> None:
    ran: list[int] = []

    def task(number: int) -> Task:
        def call() -> Iterable[Task]:
            ran.append(number)
            return [task(number + 1), task(number + 1)] if number < 2 else []

        return call

    follow([task(0)], 3, "data")
    assert sorted(ran) == [0, 1, 1, 2, 2, 2, 2]


def test_tasks_that_follow_are_run_before_more_are_begun() -> None:
    """Tasks that follow may hold much: all names of a folder."""
    held: list[int] = []

    def folder(number: int) -> Task:
        def call() -> Iterable[Task]:
            held.append(held[-1] + 10 if held else 10)
            return [look] * 10

        return call

    def look() -> Iterable[Task]:
        held.append(held[-1] - 1)
        return ()

    follow([folder(number) for number in range(500)], 1, "data")
    assert len(held) == 500 * 11
    assert max(held) <= 40


def test_a_process_ends_whose_source_never_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        env={**os.environ, "DLIO_TIMEOUT": "1", "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/remote: no answer for 1 s: the source hangs")


def test_a_thread_makes_one_call_after_another_and_gives_up_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DLIO_TIMEOUT", "0.2")

    def fail() -> None:
        raise SourceError("a sample is damaged")

    over = threading.Event()
    with SourceThread("/remote") as thread:
        assert [thread.call(partial(pow, n, 2)) for n in range(3)] == [0, 1, 4]
        with pytest.raises(SourceError, match="damaged"):
            thread.call(fail)
        assert not thread.hangs
        with pytest.raises(SourceError, match="/remote: no answer"):
            thread.call(over.wait)
        assert thread.hangs
        over.set()

"""Threads that wait for each other's Python code are told, and no others."""

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dlio
from dlio.loader import waiting_threads
from dlio.loader.waiting_threads import ThreadTimes, _told_of, _waits_for_lock

PYTHON = ThreadTimes(2, waited=0.92, used=1.0, queued=0.02, blocked=0.55, batch_s=0.021)


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return index


# Measured on two cores, but for the last three.
@pytest.mark.parametrize(
    ("times", "cores", "gains"),
    [
        pytest.param(PYTHON, 2, True, id="Python"),
        pytest.param(ThreadTimes(2, 0.99, 1.32, 0.02, 0.5, 0.0125), 2, True, id="Pillow"),
        pytest.param(ThreadTimes(4, 0.98, 1.36, 0.3, 0.62, 0.0137), 2, True, id="more than cores"),
        pytest.param(ThreadTimes(4, 0.99, 0.3, 0.01, 0.1, 0.011), 2, False, id="storage"),
        pytest.param(ThreadTimes(2, 0.99, 1.93, 0.03, 0.22, 0.031), 2, False, id="NumPy"),
        pytest.param(ThreadTimes(2, 0.9, 1.17, 0.08, 0.52, 0.0005), 2, False, id="tiny samples"),
        pytest.param(PYTHON, 1, False, id="one core"),
        pytest.param(ThreadTimes(2, 0.1, 1.0, 0.02, 0.55, 0.021), 2, False, id="slow training"),
        pytest.param(ThreadTimes(8, 0.9, 1.0, 0.8, 0.1, 0.021), 8, False, id="busy machine"),
    ],
)
def test_who_would_gain_from_processes(times: ThreadTimes, cores: int, gains: bool) -> None:
    assert times.shares_core(cores) == gains


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, float], None]:
    """Have threads wait in a function of the kernel, and use a share of a core, of four cores."""

    def says(waits_for: bytes, share: float) -> None:
        def read(_: threading.Thread, name: str) -> bytes:
            used = int(time.perf_counter() * share * 1e9)
            return waits_for if name == "wchan" else f"{used} 0 1".encode()

        monkeypatch.setattr(waiting_threads, "_told_of", read)
        monkeypatch.setattr(waiting_threads, "available_cores", lambda: 4)
        for name in ("_WATCHED_S", "_EACH_S", "_LONG_S", "_WAITING"):
            monkeypatch.setattr(waiting_threads, name, 0.0)
        monkeypatch.setattr(waiting_threads, "_FEWEST", 3)

    return says


def _warned(
    caplog: pytest.LogCaptureFixture, loader: torch.utils.data.DataLoader[Any]
) -> list[str]:
    with caplog.at_level(logging.WARNING, "dlio"):
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 400
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", [dlio.DataLoader, dlio.StatefulDataLoader])
def test_threads_that_wait_for_each_other_are_told_once(
    kind: Any, kernel: Callable[[bytes, float], None], caplog: pytest.LogCaptureFixture
) -> None:
    kernel(b"futex_do_wait", 0.5)
    (line,) = _warned(caplog, kind(Numbers(), 10, num_workers=2))
    assert re.match(r"Numbers: 2 threads of the loader together have \d+% of one core", line)
    assert "workers='process'" in line


@pytest.mark.parametrize(("waits_for", "share"), [(b"poll_schedule_timeout", 0.5), (b"0", 1.9)])
def test_threads_that_wait_for_others_are_not(
    waits_for: bytes,
    share: float,
    kernel: Callable[[bytes, float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel(waits_for, share)
    assert not _warned(caplog, dlio.DataLoader(Numbers(), 10, num_workers=2))


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 2, "workers": "process"}]
)
def test_other_ways_to_read_are_not_told(
    options: dict[str, Any],
    kernel: Callable[[bytes, float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel(b"futex_do_wait", 0.5)
    assert not _warned(caplog, dlio.DataLoader(Numbers(), 10, **options))


def test_a_kernel_that_tells_nothing_is_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting_threads, "_told_of", lambda *_: b"")
    assert not _warned(caplog, dlio.DataLoader(Numbers(), 10, num_workers=2))


def test_what_threads_wait_for_is_told_by_the_kernel() -> None:
    lock, woken = threading.Lock(), threading.Event()

    def wait() -> None:
        with lock:
            woken.wait(60)

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        if not _told_of(thread, "wchan") or not _told_of(thread, "schedstat"):
            woken.set()
            pytest.skip("the kernel does not tell of the waits of threads")
        end = time.monotonic() + 60
        while not _waits_for_lock(thread) and time.monotonic() < end:
            time.sleep(0.01)
        is_waiting = _waits_for_lock(thread)
    woken.set()
    thread.join()
    assert is_waiting
    assert _told_of(thread, "wchan") == b""

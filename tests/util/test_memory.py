"""Large pieces of memory: they begin with a page, belong to one user, and are used again."""

import gc
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

import dlio.util.memory as memory
from dlio.util.memory import LARGE, joined, new_memory


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> memory._PiecePool:
    pool = memory._PiecePool()
    monkeypatch.setattr(memory, "_pool", pool)
    return pool


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("count", [0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 7])
def test_memory_is_writable_and_as_long_as_asked_for(count: int) -> None:
    view = new_memory(count)
    assert (len(view), view.readonly, view.format) == (count, False, "B")
    view[:] = bytes(count)
    assert bytes(view) == bytes(count)
    if count >= LARGE:
        assert _address(view) % mmap.PAGESIZE == 0


def test_memory_that_nothing_refers_to_is_used_again(pool: memory._PiecePool) -> None:
    first = new_memory(2 * LARGE)
    place = _address(first)
    del first
    assert pool.lent_bytes == 0
    assert _address(new_memory(2 * LARGE - 100)) == place


def test_whatever_is_made_of_memory_keeps_it(pool: memory._PiecePool) -> None:
    holders: list[Callable[[memoryview], object]] = [
        lambda view: view[5:10],
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.frombuffer(view[8:], np.float32)[3:],
        lambda view: torch.frombuffer(view, dtype=torch.uint8)[7:],
        lambda view: torch.from_numpy(np.asarray(view)).view(torch.int16)[::2],
    ]
    for hold in holders:
        held = hold(new_memory(LARGE))
        gc.collect()
        assert pool.lent_bytes == LARGE
        other = new_memory(LARGE)
        assert pool.lent_bytes == 2 * LARGE
        del held, other
        gc.collect()
        assert pool.lent_bytes == 0


def test_no_more_is_kept_than_is_in_use_and_a_little(pool: memory._PiecePool) -> None:
    views = [new_memory(32 * LARGE) for _ in range(8)]
    while views:
        views.pop()
        assert pool.free_bytes <= max(pool.lent_bytes, 64 * LARGE)
    assert pool.free_bytes == 64 * LARGE


def test_threads_never_share_memory(pool: memory._PiecePool) -> None:
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(200):
            array = np.frombuffer(new_memory(LARGE), np.uint8)
            array[::4096] = number
            if (array[::4096] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert pool.lent_bytes == 0


@pytest.mark.parametrize("size", [10, LARGE])
def test_joined_parts_are_those_of_bytes_join(size: int) -> None:
    parts: list[bytes | bytearray | memoryview] = [
        b"",
        b"abc",
        bytearray(size),
        memoryview(b"x" * size)[1:],
        np.arange(16, dtype=np.uint8).data,
    ]
    assert bytes(joined(parts)) == b"".join(parts)

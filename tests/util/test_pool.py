"""Pooled memory: nobody gets memory that somebody holds, and none is lost."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlio.util.buffer_pool import BufferPool


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_buffer_that_came_back_serves_the_next_of_its_size() -> None:
    pool = BufferPool(2)
    first = pool.take(4 << 20)
    where = address(first)
    assert first.shape == (4 << 20,)
    pool.give_back(first)
    assert address(pool.take(4 << 20)) == where


def test_two_buffers_are_never_the_same_memory() -> None:
    pool = BufferPool(2)
    assert address(pool.take(100)) != address(pool.take(100))


def test_a_much_larger_buffer_does_not_serve_a_small_request() -> None:
    pool = BufferPool(2)
    pool.give_back(pool.take(8 << 20))
    small = pool.take(1 << 20)
    assert pool.statistics().spare == 1
    assert len(small) == 1 << 20


def test_headroom_lets_a_somewhat_larger_request_use_the_memory() -> None:
    pool = BufferPool(2, headroom=0.25)
    pool.give_back(pool.take(4 << 20))
    assert len(pool.take(5 << 20)) == 5 << 20
    assert pool.statistics().spare == 0


def test_no_more_is_kept_than_was_asked_for() -> None:
    pool = BufferPool(2)
    for buffer in [pool.take(10) for _ in range(5)]:
        pool.give_back(buffer)
    assert pool.statistics().spare == 2
    assert pool.statistics().out == 0
    pool.clear()
    assert pool.statistics().spare == 0


def test_a_pool_of_none_keeps_none() -> None:
    pool = BufferPool(0)
    pool.give_back(pool.take(10))
    assert pool.statistics().spare == 0


@pytest.mark.parametrize("size", [0, 1, 7, 1 << 20])
def test_lent_memory_has_the_size_asked_for(size: int) -> None:
    array = BufferPool(1).lend(size)
    assert array.shape == (size,)
    assert array.flags.writeable


def test_lent_memory_comes_back_with_its_last_array() -> None:
    pool = BufferPool(2)
    array = pool.lend(1000)
    where = address(array)
    assert pool.statistics().out == 1
    del array
    assert pool.statistics().out == 0
    assert address(pool.lend(1000)) == where


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[10:20],
        lambda array: array[10:20][2:4].reshape(2, 1),
        lambda array: array.view("<u8"),
        lambda array: array.data[5:6],
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array.view(np.float32).reshape(2, -1))[1].numpy(),
        lambda array: np.frombuffer(array.data, np.uint8, 4),
    ],
)
def test_lent_memory_stays_out_while_anything_refers_to_it(view: Any) -> None:
    pool = BufferPool(2)
    array = pool.lend(1 << 10)
    held = view(array)
    del array
    gc.collect()
    assert pool.statistics().out == 1
    del held
    gc.collect()
    assert (pool.statistics().out, pool.statistics().spare) == (0, 1)


def test_lent_memory_outlives_its_pool() -> None:
    pool = BufferPool(2)
    array = pool.lend(1 << 20)
    array[:] = 7
    del pool
    gc.collect()
    assert int(array.sum()) == 7 << 20


def test_memory_in_a_reference_cycle_comes_back_when_it_is_collected() -> None:
    pool = BufferPool(2)
    cycle: list[Any] = [pool.lend(100)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.statistics().out == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "lend", "drop"]), st.integers(0, 5000)), max_size=60
    )
)
def test_whatever_is_held_keeps_its_own_bytes(acts: list[tuple[str, int]]) -> None:
    pool = BufferPool(3, headroom=0.1)
    held: list[tuple[Any, Any, int]] = []
    for k, (act, number) in enumerate(acts):
        if act == "drop" and held:
            buffer, array, _ = held.pop(number % len(held))
            del array
            if buffer is not None:
                pool.give_back(buffer)
            del buffer
        elif act != "drop":
            buffer = pool.take(number) if act == "take" else None
            array = pool.lend(number) if buffer is None else buffer[:number]
            array[:] = k % 251
            held.append((buffer, array, k % 251))
            del array
        assert all((array == mark).all() for _, array, mark in held)
        assert pool.statistics().out == len(held)


def test_threads_never_share_what_they_hold() -> None:
    pool = BufferPool(4)
    wrong: list[int] = []

    def work(number: int) -> None:
        for k in range(300):
            array = pool.lend(64 + k)
            array[:] = number
            buffer = pool.take(64)
            buffer[:] = number
            if not (buffer == number).all() or not (array == number).all():
                wrong.append(number)
            pool.give_back(buffer)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert pool.statistics().out == 0

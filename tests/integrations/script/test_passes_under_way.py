"""Passes that the script leaves unfinished are over at the same call on all ranks."""

import gc
from collections.abc import Iterator
from typing import Any, cast

import pytest

from dlio.integrations.script.pass_use import PassMemory, PassUse
from dlio.integrations.script.passes_under_way import GarbageWatch, PassesUnderWay


def _uses(count: int) -> list[PassUse]:
    return [PassUse(PassMemory(), (number,), "") for number in range(count)]


def _batch(number: int) -> Any:
    return cast(Any, f"batch {number}")


def test_a_pass_that_stays_open_steps_aside_until_it_gives_again() -> None:
    passes, (old, new) = PassesUnderWay(), _uses(2)
    passes.took(old, _batch(0))
    passes.took(new, _batch(1))
    assert list(passes.batches) == [old, new]  # They may be taken for one step.
    passes.took(new, _batch(2))
    assert list(passes.batches) == [new]
    passes.took(old, _batch(3))
    assert passes.batches == {new: _batch(2), old: _batch(3)}


def test_a_pass_is_in_use_again_after_a_loop_within_its_own() -> None:
    passes, (outer, inner, innermost) = PassesUnderWay(), _uses(3)
    passes.took(outer, _batch(0))
    for number in range(3):
        passes.took(inner, _batch(number))
        for _ in range(2):
            passes.took(innermost, _batch(9))
        assert list(passes.batches) == [innermost]
        passes.ended(innermost)
        assert inner in passes.batches
    passes.ended(inner)
    assert passes.batches == {outer: _batch(0)}


def test_a_pass_that_is_computed_on_is_in_use() -> None:
    passes, (rare, often) = PassesUnderWay(), _uses(2)
    passes.took(rare, _batch(0))
    for number in range(3):
        passes.took(often, _batch(number))
        passes.used(rare)
        assert rare in passes.batches
    passes.took(often, _batch(3))
    passes.took(often, _batch(4))
    assert rare not in passes.batches
    passes.used(rare)
    assert passes.batches == {often: _batch(4), rare: _batch(0)}


def test_passes_that_are_left_by_one_place_do_not_add_up() -> None:
    passes, memory = PassesUnderWay(), PassMemory()
    for _ in range(20):
        left, loop = PassUse(memory, ("left",), ""), PassUse(memory, ("loop",), "")
        passes.begins(left)
        passes.took(left, _batch(0))
        for number in range(3):
            passes.took(loop, _batch(number))
        passes.ended(loop)
        assert list(passes.batches) == [left]


@pytest.fixture
def watch() -> Iterator[GarbageWatch]:
    watch = GarbageWatch()
    watch.start()
    yield watch
    watch.close()
    assert not any(getattr(each, "__self__", None) is watch for each in gc.callbacks)


def test_an_object_in_a_cycle_is_freed_at_any_moment_and_others_with_their_last_name(
    watch: GarbageWatch,
) -> None:
    freed: list[bool] = []

    class Watched:
        def __del__(self) -> None:
            freed.append(watch.frees)

    one = Watched()
    del one
    cycle: list[object] = [Watched()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert freed == [False, True]
    assert not watch.frees

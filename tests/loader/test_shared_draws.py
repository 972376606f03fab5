"""Random numbers that data sets draw in threads, which no run repeats, are told."""

import logging
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import dlio
from dlio.loader.shared_draws import SharedDraws
from dlio.util import printable

_DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "numpy.random": lambda: np.random.rand(),  # noqa: NPY002
    "torch": lambda: torch.rand(1),
}


class _Rows(torch.utils.data.Dataset[int]):
    """Numbers, each after a call."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        self._call()
        return index


@pytest.fixture
def warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], str]]:
    monkeypatch.setattr(printable, "_told", set())
    with caplog.at_level(logging.WARNING, "dlio"):
        yield lambda: caplog.text


@pytest.mark.parametrize("name", list(_DRAWS))
def test_draws_while_the_consumer_waits_are_told(name: str, warned: Callable[[], str]) -> None:
    rows, draws = _Rows(_DRAWS[name]), SharedDraws()
    assert draws.fetch(rows, 3) == 3
    assert not warned()
    draws.waiting(True)
    assert draws.fetch(rows, 4) == 4
    assert f"_Rows draws random numbers of {name}, which the loader's threads share" in warned()
    assert not draws.looks


def test_numbers_that_the_consumer_may_have_drawn_are_not_told(warned: Callable[[], str]) -> None:
    draws = SharedDraws()

    def consumer_goes_on() -> None:
        draws.waiting(False)
        random.random()

    draws.waiting(True)
    assert draws.fetch(_Rows(consumer_goes_on), 1) == 1
    assert not warned()
    assert draws.looks


@pytest.mark.parametrize(
    ("call", "workers", "is_told"),
    [
        (random.random, 2, True),
        (random.random, 1, False),
        (int, 2, False),
    ],
)
def test_a_loader_of_several_threads_tells(
    call: Callable[[], object],
    workers: int,
    is_told: bool,
    warned: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, waiting = threading.Event(), SharedDraws.waiting

    def noted(self: SharedDraws, now: bool) -> None:
        waiting(self, now)
        waits.set()

    def drawn() -> None:
        assert waits.wait(60)
        call()

    monkeypatch.setattr(SharedDraws, "waiting", noted)
    with dlio.DataLoader(_Rows(drawn), 16, num_workers=workers) as loader:
        assert [int(k) for batch in loader for k in batch] == list(range(64))
    assert ("share: no run repeats them; workers='process' does" in warned()) is is_told

"""The suite of loader states catches each fault of a loader."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from dlio.errors import UsageError
from dlio.testing import LoaderStateTests
from dlio.testing.loader_state import State
from tests.testing.faults import Fault, assert_caught, assert_complete

COUNT, BATCH = 23, 4


class Loader:
    """A loader that keeps every promise; faults are put into it."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(COUNT), COUNT)

    def __len__(self) -> int:
        return -(-COUNT // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        order, first = self.order(), self.position
        for start in range(first, COUNT, BATCH):
            self.position = start + BATCH
            if self.position >= COUNT:
                self.epoch, self.position = self.epoch + 1, 0
            yield order[start : start + BATCH]

    def state_dict(self) -> State:
        return {"format": 1, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: State) -> None:
        if state_dict.get("format") != 1:
            raise UsageError("this state has a format that is not known")
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]


class Tests(LoaderStateTests):
    kind: type[Loader] = Loader

    def make(self) -> Loader:
        return self.kind()


class TestLoader(Tests):
    """The loader that the faults are put into keeps every promise."""


class _RepeatsABatch(Loader):
    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.position = max(0, self.position - BATCH)


class _StaysAtTheEnd(Loader):
    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        if self.epoch and not self.position:
            self.epoch -= 1


class _StartsOver(Loader):
    """Forgets, once it has resumed, which epoch it is at."""

    resumed = False

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.resumed = True

    def order(self) -> list[int]:
        return super().order() if not self.epoch or not self.resumed else list(range(COUNT))


class _SavingTakesABatch(Loader):
    def __iter__(self) -> Iterator[list[int]]:
        while self.position < COUNT and self.epoch == 0:
            start, self.position = self.position, self.position + BATCH
            yield self.order()[start : start + BATCH]
        self.epoch, self.position = 1, 0

    def state_dict(self) -> State:
        self.position += 1
        return super().state_dict()


class _LivingState(Loader):
    def state_dict(self) -> State:
        self.__dict__.setdefault("format", 1)
        return self.__dict__


class _EatsTheState(Loader):
    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        state_dict["position"] = 0


class _StateOfObjects(Loader):
    def state_dict(self) -> State:
        return {**super().state_dict(), "random": random.Random(1)}


class _AddsUp(Loader):
    def load_state_dict(self, state_dict: State) -> None:
        before = self.position
        super().load_state_dict(state_dict)
        self.position += before


class _LoadsWhenIterated(Loader):
    pending: Any = None

    def load_state_dict(self, state_dict: State) -> None:
        if state_dict.get("format") != 1:
            raise UsageError("this state has a format that is not known")
        self.pending = state_dict

    def __iter__(self) -> Iterator[list[int]]:
        if self.pending is not None:
            super().load_state_dict(self.pending)
            self.pending = None
        return super().__iter__()


class _TakesAnything(Loader):
    def load_state_dict(self, state_dict: State) -> None:
        self.epoch = state_dict.get("epoch", 0)
        self.position = state_dict.get("position", 0)


def _of(broken: type[Loader]) -> type[Tests]:
    return type(broken.__name__, (Tests,), {"kind": broken})


FAULTS = [
    Fault("test_the_rest_is_the_same_from_every_step", _of(_RepeatsABatch)),
    Fault("test_a_state_at_the_end_leads_to_the_next_epoch", _of(_StaysAtTheEnd)),
    Fault("test_the_epoch_after_a_resumed_one_is_the_same", _of(_StartsOver)),
    Fault("test_saving_disturbs_nothing", _of(_SavingTakesABatch)),
    Fault("test_a_saved_state_stays_as_it_is", _of(_LivingState)),
    Fault("test_loading_leaves_the_state_as_it_is", _of(_EatsTheState)),
    Fault("test_a_state_can_be_written_to_a_file", _of(_StateOfObjects)),
    Fault("test_a_state_is_replaced_by_the_one_loaded_last", _of(_AddsUp)),
    Fault("test_a_state_that_was_loaded_is_the_state", _of(_LoadsWhenIterated)),
    Fault("test_a_state_that_makes_no_sense_is_refused", _of(_TakesAnything)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_catches(fault: Fault) -> None:
    assert_caught(fault)


def test_each_promise_has_a_fault() -> None:
    assert_complete(LoaderStateTests, FAULTS)

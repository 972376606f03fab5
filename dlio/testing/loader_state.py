"""The promises of a loader's `state_dict` and `load_state_dict`, each as a test.

Subclass `LoaderStateTests` and give `make`. As by grain's checker, the state is saved and restored
at every step, and the rest of the epoch compared.
"""

import copy
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from dlio.errors import DlioError
from dlio.util.units import counted

State = dict[str, Any]
"""A loader's state, as torch's stateful loaders have it: a dictionary of plain values."""


class StatefulLoader(Protocol):
    """A loader whose place in an epoch can be saved and restored."""

    def __iter__(self) -> Iterator[Any]:
        """Start, or continue, an epoch."""

    def __len__(self) -> int:
        """Steps of an epoch."""

    def state_dict(self) -> State:
        """The place behind the batches that have been handed out."""

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from that place with the next iteration."""


class LoaderStateTests(ABC):
    """Tests that a loader can stop at any step and continue as if it had not."""

    follows = True
    """True if the epoch after a resumed one is that of a loader that never stopped."""

    @abstractmethod
    def make(self) -> StatefulLoader:
        """A loader with at least three steps, at its first epoch."""

    def twin(self) -> StatefulLoader:
        """A loader that must accept the first one's state: with other workers, for example."""
        return self.make()

    def test_the_rest_is_the_same_from_every_step(self) -> None:
        whole = _batches(self.make())
        for step in range(len(whole)):
            rest = _batches(self._resumed(self._state_after(step)))
            assert rest == whole[step:], f"resumed after {step} of {counted(len(whole), 'step')}"

    def test_a_state_at_the_end_leads_to_the_next_epoch(self) -> None:
        loader = self.make()
        steps = len(_batches(loader))
        state = loader.state_dict()
        following = _batches(loader)
        after = _batches(self._resumed(state))
        assert len(after) == steps
        if self.follows:
            assert after == following

    def test_the_epoch_after_a_resumed_one_is_the_same(self) -> None:
        if not self.follows:
            pytest.skip("its epochs do not follow from its state")
        loader = self.make()
        _batches(loader)
        following = _batches(loader)
        resumed = self._resumed(self._state_after(1))
        _batches(resumed)
        assert _batches(resumed) == following

    def test_saving_disturbs_nothing(self) -> None:
        loader, batches = self.make(), []
        loader.state_dict()
        for batch in loader:
            batches.append(_plain(batch))
            loader.state_dict()
        assert batches == _batches(self.make())

    def test_a_saved_state_stays_as_it_is(self) -> None:
        loader = self.make()
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        before = copy.deepcopy(state)
        for _ in iterator:
            pass
        assert state == before

    def test_loading_leaves_the_state_as_it_is(self) -> None:
        state = self._state_after(1)
        before = copy.deepcopy(state)
        rests = [_batches(self._resumed(state)) for _ in range(2)]
        assert state == before
        assert rests[0] == rests[1]

    def test_a_state_can_be_written_to_a_file(self) -> None:
        state = self._state_after(1)
        whole = _batches(self.make())
        for written in (json.loads(_as_json(state)), pickle.loads(pickle.dumps(state))):  # noqa: S301
            assert _batches(self._resumed(written)) == whole[1:]

    def test_a_state_is_replaced_by_the_one_loaded_last(self) -> None:
        resumed = self.twin()
        for step in (2, 1):
            resumed.load_state_dict(self._state_after(step))
        assert _batches(resumed) == _batches(self.make())[1:]

    def test_a_state_that_was_loaded_is_the_state(self) -> None:
        resumed = self._resumed(self._state_after(1))
        again = self._resumed(resumed.state_dict())
        assert _batches(again) == _batches(self.make())[1:]

    def test_a_state_that_makes_no_sense_is_refused(self) -> None:
        for state in ({"kind": "nonsense"}, {"format": -1, "epoch": -1}):
            with pytest.raises((DlioError, ValueError)):
                self.make().load_state_dict(state)

    def _resumed(self, state: State) -> StatefulLoader:
        """A twin that has loaded a state."""
        loader = self.twin()
        loader.load_state_dict(state)
        return loader

    def _state_after(self, steps: int) -> State:
        loader = self.make()
        iterator = iter(loader)
        for _ in islice(iterator, steps):
            pass
        return loader.state_dict()


def _as_json(state: State) -> str:
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the state has values that JSON cannot carry: {error}") from error


def _batches(loader: StatefulLoader) -> list[object]:
    return [_plain(batch) for batch in loader]


def _plain(batch: object) -> object:
    """Lists in place of tensors and arrays: values that compare by ==."""
    return _pytree.tree_map(
        lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor | np.ndarray) else leaf, batch
    )

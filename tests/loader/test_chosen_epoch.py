"""Epochs chosen between a pass's beginning and its first batch, and first batches left out."""

import copy
import pickle
from typing import Any

import pytest

import dlio
from dlio.errors import UsageError


def _epoch(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def _loader(**options: Any) -> dlio.DataLoader:
    return dlio.DataLoader(list(range(20)), 4, shuffle=True, seed=2, **options)


ORDERS = [_epoch(loader) for loader in [_loader()] for _ in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_may_be_chosen_until_the_first_batch(workers: int) -> None:
    loader = _loader(num_workers=workers)
    iterator = iter(loader)
    loader.set_epoch(2)
    assert _epoch(iterator) == ORDERS[2]
    assert _epoch(loader) == ORDERS[3]
    iterator = iter(loader)
    first = next(iterator).tolist()
    loader.set_epoch(1)  # Of the next pass: this one has begun.
    assert [first, *_epoch(iterator)] == _epoch(_chosen(4))
    assert _epoch(loader) == ORDERS[1]


def _chosen(epoch: int) -> dlio.DataLoader:
    loader = _loader()
    loader.set_epoch(epoch)
    return loader


def test_the_sampler_of_the_loader_chooses_its_epoch() -> None:
    # So Lightning finds it, which looks for `set_epoch` on samplers alone.
    loader = _loader()
    sampler: Any = loader.sampler
    sampler.set_epoch(3)
    assert _epoch(loader) == ORDERS[3]
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        its_sampler: Any = other.sampler
        its_sampler.set_epoch(1)
        assert _epoch(other) == ORDERS[1]
    plain: Any = dlio.DataLoader(list(range(20)), 4, shuffle=True)
    plain.sampler.set_epoch(1)  # Of no effect: torch chooses the order.
    assert sorted(number for batch in _epoch(plain) for number in batch) == list(range(20))


def test_an_epoch_resumed_at_its_end_is_empty_unless_another_one_is_chosen() -> None:
    loader = _loader()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    resumed = _loader()
    resumed.load_state_dict(state)
    assert _epoch(resumed) == []
    assert _epoch(resumed) == ORDERS[1]
    resumed = _loader()
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    resumed.set_epoch(1)
    assert _epoch(iterator) == ORDERS[1]


def test_the_next_pass_leaves_first_batches_out() -> None:
    loader = _loader()
    loader.skip_first_batches(2)
    loader.set_epoch(1)
    assert _epoch(loader) == ORDERS[1][2:]
    assert _epoch(loader) == ORDERS[2]
    loader.skip_first_batches(9)
    assert _epoch(loader) == []
    # A position that was saved goes before.
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    resumed = _loader()
    resumed.load_state_dict(loader.state_dict())
    resumed.skip_first_batches(1)
    assert len(_epoch(resumed)) == 2
    with pytest.raises(UsageError, match="give seed="):
        dlio.DataLoader(list(range(20)), 4).skip_first_batches(1)
    with pytest.raises(UsageError, match="count"):
        loader.skip_first_batches(-1)

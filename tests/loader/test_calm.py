"""While half of the batches ahead are complete, one thread makes batches and the others rest."""

import gc
import threading
import time
from functools import partial

import numpy as np
import pytest

import dlio
from dlio.image.native import pool_library
from dlio.loader.planned_engine.pipeline import Pipeline
from tests.conftest import in_time


class Numbers:
    """A map-style data set of small arrays."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(8, index)


def _rests(pipeline: Pipeline) -> bool:
    return pipeline._complete == len(pipeline._under_way)


def test_one_thread_works_while_half_of_the_batches_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, bool]] = []
    running: set[Pipeline] = set()
    make = Pipeline._make

    def noted(self: Pipeline, *arguments: object) -> None:
        running.add(self)
        calm = 2 * self._complete >= self._context.ahead
        made.append((threading.current_thread().name, calm))
        make(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "_make", noted)
    monkeypatch.setattr(pool_library, "find", lambda: None)  # Of Python's threads.
    with (
        dlio.open(Numbers(), tiers="ram:16MiB") as data,
        dlio.DataLoader(data, batch_size=1, num_workers=4, prefetch_factor=4) as loader,
    ):
        seen = []
        for batch in loader:
            seen.append(int(batch[0, 0]))
            # A trainer that is slower than the loader, on a busy machine too.
            (pipeline,) = running
            assert in_time(partial(_rests, pipeline), 60)
    assert sorted(seen) == list(range(400))
    others = [name for name, calm in made if calm and not name.endswith("-0")]
    calm = sum(calm for _, calm in made)
    assert calm > 200
    # A thread may be between its look at the batches and its sample when one is completed.
    assert len(others) <= 0.1 * calm


def test_all_threads_end_while_they_rest() -> None:
    with (
        dlio.open(Numbers(), tiers="ram:16MiB") as data,
        dlio.DataLoader(data, batch_size=1, num_workers=4) as loader,
    ):
        batches = iter(loader)
        next(batches)
        time.sleep(0.1)  # All that is ahead is complete, and all threads but one rest.
        began = time.monotonic()
    assert time.monotonic() - began < 60
    assert in_time(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("dlio-decode")]
    )


class Few(Numbers):
    def __len__(self) -> int:
        return 8


def test_threads_end_with_a_loader_that_failed_and_was_dropped() -> None:
    def broken(sample: object) -> object:
        raise ValueError("it is broken")

    with (
        dlio.open(Few(), tiers="ram:16MiB", transform=broken) as data,
        pytest.raises(Exception, match="it is broken"),
    ):
        list(dlio.DataLoader(data, batch_size=8, num_workers=2))
    gc.collect()  # An idle thread that held the batch would keep its error, and so the loader.
    assert in_time(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("dlio-decode")], 5
    )

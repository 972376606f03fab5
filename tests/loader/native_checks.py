"""Comparing batches of native threads with those of Python's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dlio
from dlio.loader.planned_engine import native_pool
from dlio.loader.planned_engine.native_pool import NativeJob, NativePool


class Spy:
    """Counts the samples that native threads were given, and those that they left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given = self.refused = 0
        refused = NativeJob.refused
        submit = NativePool.submit

        def count_given(pool: NativePool, job: NativeJob) -> None:
            self.given += job.slots
            submit(pool, job)

        def count_refused(job: NativeJob) -> list[int]:
            slots = refused(job)
            self.refused += len(slots)
            return slots

        monkeypatch.setattr(NativePool, "submit", count_given)
        monkeypatch.setattr(NativeJob, "refused", count_refused)


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flat(each)
    else:
        yield value


def batches_of(
    path: Path,
    opened: dict[str, Any],
    loaded: dict[str, Any],
    view: Callable[[dlio.Dataset], dlio.Dataset] | None = None,
) -> list[list[Any]]:
    """The batches of two epochs, the first while blocks are brought into the tier."""
    options = {"tiers": "ram:64MiB", **opened}
    loaded = {"batch_size": 16, "shuffle": True, **loaded}
    with (
        dlio.open(str(path), **options) as data,
        dlio.DataLoader(data if view is None else view(data), **loaded) as loader,
    ):
        return [list(flat(batch)) for _ in range(2) for batch in loader]


def check_same(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: dict[str, Any],
    view: Callable[[dlio.Dataset], dlio.Dataset] | None = None,
    **loaded: Any,
) -> None:
    """Compare the batches of native threads with those of Python's."""
    made = batches_of(path, opened, loaded, view)
    with monkeypatch.context() as patched:
        patched.setattr(native_pool, "find", lambda: None)
        wanted = batches_of(path, opened, loaded, view)
    assert len(made) == len(wanted)
    for batch, other in zip(made, wanted, strict=True):
        for tensor, same in zip(batch, other, strict=True):
            assert (tensor.dtype, tensor.shape) == (same.dtype, same.shape)
            assert tensor.stride() == same.stride()
            assert torch.equal(tensor, same)

"""Comparing batches of native threads with those of Python's.

Run under mpirun, it prints a JSON line of the samples of a rank.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dlio
from dlio.comm import world
from dlio.image.native import pool_library
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
    options = {"tiers": "ram:64MiB", "seed": 0, **opened}
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
        patched.setattr(pool_library, "find", lambda: None)
        wanted = batches_of(path, opened, loaded, view)
    assert len(made) == len(wanted)
    for batch, other in zip(made, wanted, strict=True):
        for tensor, same in zip(batch, other, strict=True):
            if not isinstance(same, torch.Tensor):
                assert tensor == same
                continue
            assert (tensor.dtype, tensor.shape) == (same.dtype, same.shape)
            assert tensor.stride() == same.stride()
            assert torch.equal(tensor, same)


def flat_columns(batch: Any) -> list[Any]:
    """The tensors of a batch, and lists of its texts as bytes."""
    columns = batch.values() if isinstance(batch, dict) else batch
    return [
        [each.encode() if isinstance(each, str) else each for each in column]
        if isinstance(column, list)
        else column
        for column in columns
    ]


def samples_of_rank(path: str, batch: int, mode: str) -> dict[str, Any]:
    """Return digests of the samples of two epochs, by epoch and number."""
    made: dict[str, str] = {}
    cropped: dict[str, Any] = {} if "texts" in path else {"image_size": 24}
    with pytest.MonkeyPatch.context() as patched:
        spy = Spy(patched)
        nodes = min(2, world().size)  # Samples come from peers, too.
        with (
            dlio.open(path, tiers="ram:1MiB", seed=0, **cropped) as data,
            dlio.DataLoader(data, batch, shuffle=True, mode=mode, pretend_nodes=nodes) as loader,
        ):
            for epoch in range(2):
                for batch_of_samples in loader:
                    for number, *sample in zip(
                        loader.last_samples.tolist(), *flat_columns(batch_of_samples), strict=True
                    ):
                        content = b"".join(
                            part.numpy().tobytes() if isinstance(part, torch.Tensor) else part
                            for part in sample
                        )
                        made[f"{epoch} {number}"] = hashlib.sha1(content).hexdigest()
        return {"samples": made, "given": spy.given}


if __name__ == "__main__":
    path, batch, mode = sys.argv[1:]
    print(json.dumps(samples_of_rank(path, int(batch), mode)), flush=True)

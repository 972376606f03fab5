"""Small batches are made several at a time, and handed out as if each had been made alone."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import pytest
import simplejpeg
import torch

import dlio
from dlio.errors import SourceError
from dlio.image.native import pool_library
from dlio.loader.planned_engine import engine
from dlio.loader.planned_engine.batch_memory import BatchMemory
from dlio.loader.planned_engine.native_pool import NativeJob, NativePool, NativeRecipe
from dlio.loader.shuffle.sample_shuffle import Shuffle, StepSamples

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())

COUNT, BATCH = 600, 10
VALUES = np.random.default_rng(0).random((COUNT, 16), np.float32)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["values"] = VALUES
        file["number"] = np.arange(COUNT)
    return path


def numbers(batches: Iterator[dict[str, torch.Tensor]]) -> list[list[int]]:
    """The samples of batches, whose values are compared with the file's."""
    made = []
    for batch in batches:
        made.append(batch["number"].tolist())
        np.testing.assert_array_equal(batch["values"].numpy(), VALUES[made[-1]])
    return made


def test_python_works_once_for_several_batches(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[int] = []
    submit = NativePool.submit

    def count(pool: NativePool, job: NativeJob) -> None:
        jobs.append(job.slots)
        submit(pool, job)

    monkeypatch.setattr(NativePool, "submit", count)
    with (
        dlio.open(str(rows), tiers="ram:8MiB", seed=0) as data,
        dlio.DataLoader(data, BATCH, shuffle=True, num_workers=2) as loader,
    ):
        list(loader)
        jobs.clear()
        made = numbers(iter(loader))
        assert sorted(chain(*made)) == list(range(COUNT))
        assert {len(each) for each in made} == {BATCH}
        # The first is alone, so that it comes soon; then up to four times as many each time, or
        # fewer, as far as steps are planned.
        assert jobs[0] == BATCH
        assert all(job <= BATCH * 4**k for k, job in enumerate(jobs))
        assert max(jobs) == 16 * BATCH
        assert sum(jobs) == COUNT
        assert len(jobs) < COUNT // BATCH // 2


def test_a_batch_that_is_kept_or_saved_has_memory_of_its_own(rows: Path) -> None:
    with (
        dlio.open(str(rows), tiers="ram:8MiB", seed=0) as data,
        dlio.DataLoader(data, BATCH, shuffle=True, num_workers=2) as loader,
    ):
        list(loader)
        for batch in loader:
            for tensor in batch.values():
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
            batch["values"].fill_(0.0)  # It is not that of the next one.
        numbers(iter(loader))


def test_a_pass_goes_on_in_the_middle_of_batches_made_together(rows: Path) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2}
    with dlio.open(str(rows), tiers="ram:8MiB", seed=0) as data:
        with dlio.DataLoader(data, BATCH, **options) as loader:
            list(loader)
            feed = iter(loader)
            begun = numbers(next(feed) for _ in range(20))
            state = loader.state_dict()
            rest = numbers(feed)
        with dlio.DataLoader(data, BATCH, **options) as loader:
            loader.load_state_dict(state)
            assert numbers(iter(loader)) == rest
    assert sorted(chain(*begun, *rest)) == list(range(COUNT))


def _lose(folder: Path, data: dlio.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage the end of a block in a tier, whose samples the source no longer has."""
    (path,) = folder.rglob("*.blk")
    block = bytearray(path.read_bytes())
    block[-300:] = bytes(300)
    path.write_bytes(block)

    def gone(*_: object) -> list[bytes]:
        raise SourceError("it is gone")

    monkeypatch.setattr(type(data.reader), "read", gone)
    monkeypatch.setattr("dlio.storage.source_requests.can_read_payloads", lambda: False)


@pytest.mark.parametrize("on_error", ["skip", "stop"])
def test_a_lost_sample_takes_its_own_batch_alone(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Literal["skip", "stop"]
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    with (
        dlio.open(str(rows), tiers=f"{tier}:8MiB", seed=0) as data,
        dlio.DataLoader(data, BATCH, num_workers=2, on_error=on_error) as loader,
    ):
        list(loader)
        _lose(tier, data, monkeypatch)
        feed, made, failed = iter(loader), [], []
        for step in range(COUNT // BATCH):
            try:
                made += numbers(iter([next(feed)]))
            except SourceError:
                failed.append(step)
        skipped = len(loader.stats()["skipped"])
    # The last ones of the block, whose batch is made together with four others.
    assert failed == ([COUNT // BATCH - 1] if on_error == "stop" else [])
    assert (1 <= skipped <= 10) == (on_error == "skip")
    kept = COUNT - skipped - BATCH * len(failed)
    assert list(chain(*made)) == list(range(kept))


def test_batches_that_python_makes_do_not_wait_for_others(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take_own = Shuffle.take_own

    def count(shuffle: Shuffle, number: int, most: int) -> list[StepSamples]:
        taken.append(most)
        return take_own(shuffle, number, most)

    monkeypatch.setattr(Shuffle, "take_own", count)
    # As where samples have to be brought first, or native threads left most of them.
    monkeypatch.setattr(NativeRecipe, "pays", False)
    with (
        dlio.open(str(rows), tiers="ram:8MiB", seed=0) as data,
        dlio.DataLoader(data, BATCH, shuffle=True, num_workers=2) as loader,
    ):
        for _ in range(2):
            assert len(numbers(iter(loader))) == COUNT // BATCH
    assert not taken


@pytest.mark.parametrize("workers", [2, 16])
def test_crops_are_made_together_and_a_lost_one_takes_its_own_batch(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers > 2:  # As batches of many bytes are.
        monkeypatch.setattr(engine, "batches_together", lambda _: 1)
    generator = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "pictures" / f"{number % 3}" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (16, 16, 3), np.uint8)
        path.write_bytes(simplejpeg.encode_jpeg(pixels, quality=90))
    broken = tmp_path / "pictures" / "1" / "31.jpg"
    broken.write_bytes(broken.read_bytes()[:-150])
    most: list[int] = []
    lent: list[int] = []
    take_own, take = Shuffle.take_own, BatchMemory.take

    def count(shuffle: Shuffle, number: int, many: int) -> list[StepSamples]:
        taken = take_own(shuffle, number, many)
        most.append(len(taken))
        return taken

    def lend(memory: BatchMemory, rows: int | None = None) -> Any:
        array = take(memory, rows)
        lent.append(array.nbytes)
        return array

    def made() -> list[list[Any]]:
        opened = dlio.open(str(tmp_path / "pictures"), image_size=8, tiers="ram:8MiB", seed=0)
        options: dict[str, Any] = {"num_workers": workers, "on_error": "skip"}
        with opened as data, dlio.DataLoader(data, 4, **options) as loader:
            return [[*batch, loader.last_samples.tolist()] for _ in range(2) for batch in loader]

    monkeypatch.setattr(Shuffle, "take_own", count)
    monkeypatch.setattr(BatchMemory, "take", lend)
    together = made()
    assert max(most) > 2
    # Whoever keeps one batch keeps no other.
    assert set(lent) == {4 * 8 * 8 * 3}
    monkeypatch.setattr(engine, "_together", lambda *_: 1)
    most.clear()
    alone = made()
    assert not most
    assert len(together) == len(alone) == 30
    for (images, labels, samples), (others, *rest) in zip(together, alone, strict=True):
        assert [labels.tolist(), samples] == [rest[0].tolist(), rest[1]]
        assert images.stride() == others.stride()
        assert torch.equal(images, others)
    assert sorted(len(labels) for _, labels, _ in together) == [3] * 2 + [4] * 28

"""One process: every sample once, the same pixels always, and nothing left behind."""

import gc
import json
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import dlio
from dlio.errors import DecodeError, DlioError, SourceError, UsageError
from dlio.loader.delivery import HostMemoryKind
from dlio.loader.planned_engine.batch_memory import BatchMemory
from dlio.util.shared_folders import SharedFolder

N = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("loader") / "pictures"
    draw_once(root, images=N, validation=3, classes=3)
    return root / "train"


@pytest.fixture(autouse=True)
def _nothing_is_left(
    soon: Callable[[Callable[[], bool]], bool], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    # Other jobs of this user have folders in shared memory too: check those of this test.
    folders: list[str] = []
    make = SharedFolder.__init__

    def make_and_note(self: SharedFolder, name: str) -> None:
        make(self, name)
        folders.append(self.path)

    monkeypatch.setattr(SharedFolder, "__init__", make_and_note)
    yield
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("dlio")]
    assert names == []

    assert soon(lambda: not any(os.path.exists(folder) for folder in folders))


def _epoch(loader: dlio.DataLoader) -> tuple[list[int], dict[int, bytes], list[int]]:
    """(samples in order, pixels of each, sizes of batches)."""
    samples: list[int] = []
    pixels, sizes = {}, []
    for images, labels in loader:
        sizes.append(len(images))
        for k, sample in enumerate(loader.last_samples.tolist()):
            pixels[sample] = images[k].numpy().tobytes()
            assert labels[k] == loader.data.reader.labels[sample]
        samples += loader.last_samples.tolist()
    return samples, pixels, sizes


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none"])
def test_an_epoch_is_every_sample_once(folder: Path, tiers: str) -> None:
    with (
        dlio.open(str(folder), tiers=tiers, image_size=32) as data,
        dlio.DataLoader(data, 8, True) as loader,
    ):
        orders = []
        for _ in range(3):
            samples, _, sizes = _epoch(loader)
            assert sorted(samples) == list(range(N))
            assert sizes == [8] * 11 + [2]
            assert len(loader) == 12
            orders.append(samples)
        assert orders[0] != orders[1] != orders[2]


def test_images_are_channels_last_views_of_uint8(folder: Path) -> None:
    with dlio.open(str(folder), image_size=32) as data, dlio.DataLoader(data, 8) as loader:
        images, labels = next(iter(loader))
        assert images.shape == (8, 3, 32, 32)
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
        assert loader.last_samples.tolist() == list(range(8))
        assert torch.equal(images[3], data[3][0])
        assert labels[3] == data[3][1] == data.targets[3]


def test_pixels_are_the_same_from_any_tier_thread_and_batch(folder: Path, tmp_path: Path) -> None:
    seen = []
    for tiers, workers, batch in [
        ("none", 1, 8),
        ("ram:64MiB", 4, 8),
        (f"ram:200KiB,{tmp_path}:64MiB", 2, 5),
    ]:
        with (
            dlio.open(str(folder), tiers=tiers, image_size=32, seed=9) as data,
            dlio.DataLoader(data, batch, True, num_workers=workers) as loader,
        ):
            for epoch in (0, 1):
                loader.set_epoch(epoch)
                samples, pixels, _ = _epoch(loader)
                seen.append((epoch, samples, pixels))
            data.set_epoch(1)
            assert data[7][0].numpy().tobytes() == pixels[7]
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]
    assert seen[0][2] != seen[1][2]


def test_the_source_is_read_once_and_then_the_tiers(folder: Path, tmp_path: Path) -> None:
    with dlio.open(str(folder), image_size=32) as probe:
        size = int(probe.reader.sizes.sum())
    tiers = f"ram:{size // 3}B,{tmp_path}:64MiB"
    with (
        dlio.open(str(folder), tiers=tiers, image_size=32) as data,
        dlio.DataLoader(data, 8, True) as loader,
    ):
        _epoch(loader)
        assert size <= loader.stats()["bytes"]["source"] <= 1.02 * size
        for _ in range(2):
            _epoch(loader)
            counted = loader.stats()["bytes"]
            assert counted["source"] == counted["peer"] == 0
            assert counted["ram"] + counted["disk"] == size
            assert 0.25 * size < counted["ram"] < 0.34 * size
        assert loader.stats()["samples"] == N
    # The disk tier stays: another job reads only the blocks of RAM from the source.
    with (
        dlio.open(str(folder), tiers=tiers, image_size=32) as data,
        dlio.DataLoader(data, 8, True) as loader,
    ):
        _epoch(loader)
        assert loader.stats()["bytes"]["source"] < 0.36 * size


def test_tiers_for_half_leave_half_to_the_source(folder: Path) -> None:
    with dlio.open(str(folder), image_size=32) as probe:
        size = int(probe.reader.sizes.sum())
    with (
        dlio.open(str(folder), tiers=f"ram:{size // 2}B", image_size=32) as data,
        dlio.DataLoader(data, 8, True) as loader,
    ):
        for epoch in range(3):
            _epoch(loader)
            counted = loader.stats()["bytes"]
            if epoch:
                assert counted["source"] + counted["ram"] == size
                assert counted["source"] == pytest.approx(size / 2, rel=0.06)


@pytest.mark.parametrize("steps", [0, 1, 5, 11, 12])
def test_a_resumed_epoch_is_exactly_the_rest(folder: Path, steps: int) -> None:
    with dlio.open(str(folder), tiers="none", image_size=32) as data:
        with dlio.DataLoader(data, 8, True, seed=4) as loader:
            loader.set_epoch(2)
            whole, pixels, _ = _epoch(loader)
            loader.set_epoch(2)
            done: list[int] = []
            iterator = iter(loader)
            for _ in range(steps):
                next(iterator)
                done += loader.last_samples.tolist()
            state = loader.state_dict()
            del iterator
        if not steps:
            assert state["position"] == 0
        # On another batch size, as another number of ranks would have.
        with dlio.DataLoader(data, 3, True, seed=4) as other:
            other.load_state_dict(state)
            other.set_epoch(2)
            rest, again, _ = _epoch(other)
            assert done + rest == whole
            assert all(pixels[sample] == again[sample] for sample in rest)
            _epoch(other)
            # A whole pass is over: the state is the next one's.
            after = other.state_dict()
            assert (after["epoch"], after["position"]) == (4, 0)
            with pytest.raises(UsageError, match="does not fit"):
                other.load_state_dict({**state, "samples": N + 5})


def test_leaving_early_leaves_nothing(folder: Path) -> None:
    with dlio.open(str(folder), image_size=32) as data, dlio.DataLoader(data, 4, True) as loader:
        for _ in range(3):
            for _ in loader:
                break
        first = next(iter(loader))
        # Two passes at once.
        one, two = iter(loader), iter(loader)
        assert len(next(one)[0]) == len(next(two)[0]) == len(first[0])
        del one, two


def test_the_pass_that_is_ahead_ends_before_the_data_set_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dlio.open(str(folder), image_size=32)
    alive: list[set[str]] = []
    close = data.close

    def closing() -> None:
        alive.append({t.name for t in threading.enumerate() if t.name.startswith("dlio-shuffle")})
        close()

    monkeypatch.setattr(data, "close", closing)
    with dlio.DataLoader(data, 1, True, num_workers=1, persistent_workers=True) as loader:
        for _ in loader:
            pass
        assert "dlio-shuffle" in {thread.name for thread in threading.enumerate()}
    assert alive == [set()]


def test_batches_that_are_kept_are_not_overwritten(folder: Path) -> None:
    with (
        dlio.open(str(folder), tiers="none", image_size=32, seed=0) as data,
        dlio.DataLoader(data, 8, True) as loader,
    ):
        kept = list(loader)
        loader.set_epoch(0)
        assert all(
            torch.equal(before[0], after[0]) for before, after in zip(kept, loader, strict=True)
        )


def test_a_steady_epoch_allocates_no_batch() -> None:
    memory = BatchMemory((2, 4, 4, 3), "uint8", HostMemoryKind.NO)
    first = memory.take()
    tensor = torch.from_numpy(first[:1]).permute(0, 3, 1, 2)
    address = first.ctypes.data
    del first
    assert memory.take().ctypes.data != address  # A view of a view still holds it.
    del tensor
    assert memory.take().ctypes.data == address


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("tiers", ["none", "ram:64MiB"])
@pytest.mark.parametrize("side", [8, 1000], ids=["several-at-once", "one-by-one"])
def test_batches_go_with_their_last_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str, tiers: str, side: int
) -> None:
    """Not when Python looks for cycles: memory of 300 batches was held at a time."""
    monkeypatch.setenv("DLIO_NATIVE", native)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((40, side, side))
    with (
        dlio.open(tmp_path / "rows.h5", tiers=tiers) as data,
        dlio.DataLoader(data, 4, num_workers=2) as loader,
    ):
        list(loader)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                earlier: list[weakref.ref[torch.Tensor]] = []
                for batch in loader:
                    earlier.append(weakref.ref(batch["x"] if isinstance(batch, dict) else batch))
                    del batch
                assert [each() for each in earlier] == [None] * 10
        finally:
            gc.enable()


def test_a_transform_gets_crops_and_is_collated(folder: Path) -> None:
    def transform(image: torch.Tensor) -> dict[str, torch.Tensor]:
        assert image.shape == (3, 32, 32)
        return {"mean": image.float().mean()}

    with (
        dlio.open(str(folder), tiers="none", image_size=32, transform=transform) as data,
        dlio.DataLoader(data, 8) as loader,
    ):
        made, labels = next(iter(loader))
        assert made["mean"].shape == labels.shape == (8,)
        assert made["mean"][2] == data[2][0]["mean"]


def test_a_transform_that_fails_raises_its_own_error(folder: Path) -> None:
    def transform(_: torch.Tensor) -> None:
        raise ZeroDivisionError("in the user's code")

    with (
        dlio.open(str(folder), tiers="none", image_size=32, transform=transform) as data,
        dlio.DataLoader(data, 8) as loader,
        pytest.raises(ZeroDivisionError, match="user's code"),
    ):
        next(iter(loader))


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(folder, tmp_path / "damaged")
    victims = sorted((tmp_path / "damaged").rglob("*.jpg"))
    victims[10].write_bytes(victims[10].read_bytes()[:2000])
    victims[50].write_bytes(b"no image at all")
    return tmp_path / "damaged"


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none"])
def test_a_damaged_sample_stops_by_default_and_is_named(damaged: Path, tiers: str) -> None:
    with (
        dlio.open(str(damaged), tiers=tiers, image_size=32, seed=0) as data,
        dlio.DataLoader(data, 8, True) as loader,
        pytest.raises(DecodeError, match=r"(crosses/00010|dots/00020|checkers/000.*).jpg cannot"),
    ):
        _epoch(loader)


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none"])
def test_or_is_skipped_counted_and_named(damaged: Path, tiers: str) -> None:
    files = sorted(damaged.rglob("*.jpg"))
    names = {f"{files[k].parent.name}/{files[k].name}" for k in (10, 50)}
    with (
        dlio.open(str(damaged), tiers=tiers, image_size=32, on_error="skip") as data,
        dlio.DataLoader(data, 8, True) as loader,
    ):
        samples, _, sizes = _epoch(loader)
        assert len(samples) == sum(sizes) == loader.stats()["samples"] == N - 2
        assert set(loader.stats()["skipped"]) == names
        assert {data.reader.name(sample) for sample in set(range(N)) - set(samples)} == names


def test_a_file_that_vanished_stops_and_is_named(damaged: Path) -> None:
    with dlio.open(str(damaged), tiers="ram:64MiB", image_size=32) as data:
        name = data.reader.name(5)
        (damaged / name).unlink()
        with dlio.DataLoader(data, 8) as loader, pytest.raises(SourceError, match=name):
            _epoch(loader)


def test_data_sets_and_loaders_can_be_pickled(folder: Path) -> None:
    with dlio.open(str(folder), tiers="ram:64MiB", image_size=32) as data:
        with dlio.DataLoader(data, 8) as loader:
            next(iter(loader))
            copy = pickle.loads(pickle.dumps(loader))
            with copy:
                assert torch.equal(next(iter(copy))[0], next(iter(loader))[0])
        again = pickle.loads(pickle.dumps(data))
        assert torch.equal(again[3][0], data[3][0])
        assert repr(again) == repr(data)


def test_dropping_the_last_batch(folder: Path) -> None:
    with (
        dlio.open(str(folder), tiers="none", image_size=32) as data,
        dlio.DataLoader(data, 8, True, drop_last=True) as loader,
    ):
        assert _epoch(loader)[2] == [8] * 11
        assert len(loader) == 11


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": "fork"}, "choose thread or process"),
        ({"on_error": "retry"}, "choose stop or skip"),
        ({"mode": "chaos"}, "choose batch, global, ring"),
        ({"pretend_nodes": 2}, "2 nodes with 1 rank"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    folder: Path, options: dict[str, object], words: str
) -> None:
    with dlio.open(str(folder), tiers="none") as data, pytest.raises(DlioError, match=words):
        next(iter(dlio.DataLoader(data, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiers": "ram:much"}, "is not a size"),
        ({"tiers": "ram:10B"}, "too small for a single block"),
        ({"tiers": "/nowhere:1GiB"}, "/nowhere is not there: create it"),
        ({"tiers": "ram:4000TiB", "size": True}, None),
        ({"on_error": "ignore"}, "stop or skip"),
        ({"image_size": 0}, "image_size=0"),
    ],
)
def test_tiers_that_cannot_be_are_refused(
    folder: Path, options: dict[str, object], words: str | None
) -> None:
    options.pop("size", None)
    if words is None:  # More than there is, but the data is small: nothing is wrong.
        with dlio.open(str(folder), image_size=32, **options) as data:  # type: ignore[arg-type]
            next(iter(dlio.DataLoader(data)))
        return
    with (
        pytest.raises(DlioError, match=words),
        dlio.open(str(folder), **options) as data,  # type: ignore[arg-type]
        dlio.DataLoader(data) as loader,
    ):
        next(iter(loader))


def test_a_disk_too_full_is_found_before_the_first_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dlio.storage.tier import Tier

    monkeypatch.setattr(Tier, "free_bytes", lambda _: 1000)
    with (
        dlio.open(str(folder), tiers=f"{tmp_path}:1GiB") as data,
        pytest.raises(DlioError, match=r"has only 1000 B free: lower its capacity"),
    ):
        next(iter(dlio.DataLoader(data)))


@pytest.mark.parametrize("mode", ["local", "ring", "partial(0.2)"])
@pytest.mark.daily("local", "partial(0.2)")
def test_an_inexact_epoch_is_resumed_as_it_was_saved_or_not_at_all(
    pictures: Path, mode: str
) -> None:
    def loader(data: Any, chosen: str) -> dlio.DataLoader:
        return dlio.DataLoader(data, 2, shuffle=True, seed=4, mode=chosen)

    with dlio.open(str(pictures), tiers="ram:32MiB", image_size=32) as data:
        with loader(data, mode) as first:
            whole = [first.last_samples.tolist() for _ in first]
            iterator = iter(first)
            later = [(next(iterator), first.last_samples.tolist())[1] for _ in range(2)]
            state = json.loads(json.dumps(first.state_dict()))
            rest = [first.last_samples.tolist() for _ in iterator]
        assert sorted(chain(*whole)) == list(range(12))
        assert sorted(chain(*later, *rest)) == list(range(12))
        with loader(data, mode) as resumed:
            resumed.load_state_dict(state)
            assert [resumed.last_samples.tolist() for _ in resumed] == rest
            assert [resumed.last_samples.tolist() for _ in resumed] != rest

        def goes_on(chosen: str, saved: dict[str, Any]) -> None:
            with loader(data, chosen) as other:
                other.load_state_dict(saved)
                next(iter(other))

        with pytest.raises(dlio.UsageError, match="of mode"):
            goes_on("batch", state)
        for key, value in (("homes", "0" * 16), ("ranks", 3)):
            with pytest.raises(dlio.UsageError, match="in the middle"):
                goes_on(mode, {**state, key: value})
        with loader(data, "batch") as exact:
            next(iter(exact))
            state = exact.state_dict()
        with pytest.raises(dlio.UsageError, match="in the middle"):
            goes_on(mode, state)

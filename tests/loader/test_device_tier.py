"""The tier on a device, with the host in its place: the same crops as from RAM, nothing evicted."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dlio
from dlio.errors import DlioError, UsageError
from dlio.storage.device_tier import DeviceTier
from dlio.storage.tier_spec import TierSpec, decoded_spec, parse_tiers
from dlio.util.settings import DEVICE_TIER
from tests.loader.recorded_streams import RecordedStreams

_IMAGES = 60
_BOUND = 1
"""Greatest difference of `crop_batch` from OpenCV, in steps of 255."""
_Pass = dict[int, tuple[npt.NDArray[np.uint8], int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("device-tier") / "pictures"
    draw_once(root, images=_IMAGES, validation=3, classes=3)
    return root / "train"


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_TIER, "1")


def _passes(folder: Path, tiers: str, count: int = 3, **options: Any) -> tuple[list[_Pass], Any]:
    """(by pass, the pixels and the label of each sample; the counts of each pass)."""
    workers = options.pop("num_workers", 2)
    transform = options.get("transform")
    passes, decoded = [], []
    with (
        dlio.open(folder, tiers=tiers, **{"image_size": 48, **options}) as data,
        dlio.DataLoader(
            data, 16, shuffle=True, device="cpu", seed=1, num_workers=workers
        ) as loader,
    ):
        for _ in range(count):
            samples: _Pass = {}
            for images, labels in loader:
                if transform is None:
                    assert images.movedim(-3, -1).is_contiguous()
                for k, sample in enumerate(loader.last_samples.tolist()):
                    samples[sample] = images[k].numpy().copy(), labels[k].tolist()
            passes.append(samples)
            decoded.append(loader.stats()["decoded"])
        notes = loader.stats()["notes"]
    return passes, (decoded, notes)


def _close(ours: list[_Pass], theirs: list[_Pass]) -> bool:
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        for sample, (pixels, label) in mine.items():
            assert label == other[sample][1]
            difference = pixels.astype(np.int64) - other[sample][0]
            if np.abs(difference).max() > _BOUND:
                return False
    return True


@pytest.mark.parametrize(("train", "crops"), [(True, 1), (True, 2), (False, 1)])
def test_crops_are_those_of_the_tier_in_ram(folder: Path, train: bool, crops: int) -> None:
    ram, _ = _passes(folder, "ram:32MiB:decoded,ram:64MiB", train=train, crops=crops)
    ours, (decoded, _) = _passes(folder, "gpu:16MiB:decoded,ram:64MiB", train=train, crops=crops)
    assert _close(ours, ram)
    assert decoded == [0, _IMAGES, _IMAGES]
    first, second = ours[0][0][0], ours[1][0][0]
    assert np.array_equal(first, second) is not train


def test_a_tier_that_is_too_small_keeps_the_first_images_of_the_first_order(
    folder: Path,
) -> None:
    kept = []
    for workers in (1, 3):
        ours, (decoded, notes) = _passes(
            folder, "gpu:150KiB:decoded,ram:64MiB", count=4, num_workers=workers
        )
        assert 0 < decoded[1] < _IMAGES
        assert decoded == [0, decoded[1], decoded[1], decoded[1]]
        assert [f"keeps {decoded[1]} decoded images" in " ".join(notes)] == [True]
        kept.append(ours)
    assert _close(kept[0], kept[1])
    whole, _ = _passes(folder, "gpu:16MiB:decoded,ram:64MiB", count=4)
    assert _close(kept[0], whole)


def test_images_that_the_device_has_no_room_for_come_from_ram(folder: Path) -> None:
    tiers = "gpu:150KiB:decoded,ram:16MiB:decoded,ram:64MiB"
    _, (alone, _) = _passes(folder, "gpu:150KiB:decoded,ram:64MiB")
    ours, (decoded, _) = _passes(folder, tiers, count=4)
    assert decoded[3] == _IMAGES > alone[-1]
    whole, _ = _passes(folder, "gpu:16MiB:decoded,ram:64MiB", count=4)
    assert _close(ours, whole)


def test_mixtures_and_normalised_batches_are_those_of_the_tier_in_ram(folder: Path) -> None:
    import dlio.transforms as T  # noqa: N812 - as everybody calls them

    both = []
    for place in ("ram", "gpu"):
        transform = T.Compose([T.ToDtype(torch.float32, scale=True), T.MixUp()])
        passes, _ = _passes(
            folder, f"{place}:16MiB:decoded,ram:64MiB", transform=transform, train=True
        )
        both.append(passes)
    for mine, other in zip(*both, strict=True):
        for sample, (pixels, label) in mine.items():
            assert label == other[sample][1]
            assert np.abs(pixels - other[sample][0]).max() <= 1.01 / 255


@pytest.mark.parametrize("room", ["16MiB", "150KiB"])
def test_the_kernel_normalises_as_the_transform_does(folder: Path, room: str) -> None:
    import dlio.transforms as T  # noqa: N812 - as everybody calls them

    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    transform = T.Compose([T.RandomResizedCrop(48), T.Normalize(mean, std)])
    ours, (decoded, _) = _passes(folder, f"gpu:{room}:decoded,ram:64MiB", transform=transform)
    ram, _ = _passes(folder, "ram:16MiB:decoded,ram:64MiB", transform=transform)
    assert decoded[2] > 0
    for mine, other in zip(ours, ram, strict=True):
        for sample, (pixels, label) in mine.items():
            assert label == other[sample][1]
            assert pixels.dtype == np.float32
            assert np.abs(pixels - other[sample][0]).max() <= 1.01 / 255 / min(std)


def test_damaged_images_are_left_out_and_take_no_room(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    victims = sorted(copy.rglob("*.jpg"))[:3]
    for path in victims:
        path.write_bytes(path.read_bytes()[:200])
    passes, (decoded, _) = _passes(copy, "gpu:16MiB:decoded,ram:64MiB", on_error="skip")
    assert [len(each) for each in passes] == [_IMAGES - 3] * 3
    assert decoded == [0, _IMAGES - 3, _IMAGES - 3]


def test_uses_of_the_memory_follow_each_other_on_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = RecordedStreams(eager=True)
    ram, _ = _passes(folder, "ram:32MiB:decoded,ram:64MiB")
    monkeypatch.setattr("dlio.loader.delivery.streams_of", lambda device: streams)
    ours, _ = _passes(folder, "gpu:16MiB:decoded,ram:64MiB")
    assert _close(ours, ram)
    calls = [call for call, _ in streams.log]
    batches = 3 * -(-_IMAGES // 16)
    assert calls.count("copies wait") == batches - 1
    assert calls.count("record") == 2 * batches  # Of the tier's use, and of the whole batch.
    waited = [number for call, number in streams.log if call == "copies wait"]
    assert waited == sorted(waited)


@pytest.mark.mpi
def test_ranks_of_a_node_keep_different_images_and_get_nearly_all_that_they_keep(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    body = str(Path(__file__).with_name("device_tier_checks.py"))
    done = mpirun(2, "-W", "error", body, str(folder))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kept = [set(report["kept"]) for report in reports]
    assert not kept[0] & kept[1]
    assert len(kept[0] | kept[1]) > 0.8 * _IMAGES
    for epoch in (1, 2):
        assert sum(report["epochs"][epoch][0] for report in reports) == _IMAGES
        # Without a preference for the rank that keeps an image, half of these.
        assert sum(report["epochs"][epoch][1] for report in reports) > 0.7 * _IMAGES


def _host() -> torch.device:
    return torch.device("cpu")


class _Copies:
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    def record(self) -> Any:
        return self

    def wait(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def test_the_capacity_is_used_and_not_exceeded_and_nothing_is_placed_twice() -> None:
    notes: list[str] = []
    tier = DeviceTier(100, 1000, _host(), notes.append)
    with tier.turn(_Copies()) as pixels:
        assert len(pixels) == 1000
        places = [tier.place(sample, 5, 6, sample) for sample in range(20)]
        assert places[:10] == [96 * k for k in range(10)]
        assert places[10:] == [None] * 10
        assert tier.place(3, 5, 6, 3) is None
        assert tier.place(50, 1, 1, 0) is None  # The first that did not fit was the last.
    entries = tier.find(np.array([9, 10, 3]))
    assert entries.tolist() == [[864, 5, 6, 9], [-1, -1, -1, -1], [288, 5, 6, 3]]
    assert len(notes) == 1
    tier.close()
    assert (tier.find(np.arange(100))[:, 0] == -1).all()
    with pytest.raises(DlioError, match="close its loader first"), tier.turn(_Copies()):
        pass


def test_specifications_are_parsed_and_others_refused_with_the_remedy() -> None:
    spec, _ = parse_tiers("gpu:40GiB:decoded,ram:2GiB")
    assert spec == TierSpec("gpu", "gpu", 40 << 30, True)
    assert str(spec) == "gpu:40GiB:decoded"
    assert decoded_spec("ram:1GiB:decoded,gpu:1GiB:decoded", "gpu") == TierSpec(
        "gpu", "gpu", 1 << 30, True
    )
    with pytest.raises(UsageError, match="write gpu:1GiB:decoded"):
        parse_tiers("gpu:1GiB")


@pytest.fixture
def batches(folder: Path) -> Iterator[Any]:
    with dlio.open(folder, tiers="gpu:1MiB:decoded,ram:64MiB", image_size=48) as data:
        yield data


def test_loaders_that_cannot_use_it_are_refused_with_the_remedy(
    batches: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, remedy in (
        ({}, "give device='cuda'"),
        ({"device": "cpu", "collate_fn": lambda samples: samples}, "leave collate_fn out"),
        ({"device": "cpu", "workers": "process"}, "leave out"),
    ):
        with pytest.raises(UsageError, match=remedy):
            next(iter(dlio.DataLoader(batches, 8, **options)))
    changed = dlio.open(
        folder, tiers="gpu:1MiB:decoded", image_size=48, transform=lambda image: image
    )
    with changed, pytest.raises(UsageError, match="transforms of whole batches"):
        next(iter(dlio.DataLoader(changed, 8, device="cpu")))
    monkeypatch.delenv(DEVICE_TIER)
    with pytest.raises(UsageError, match=r"this loader's device is cpu.*ram:1MiB:decoded"):
        next(iter(dlio.DataLoader(batches, 8, device="cpu")))

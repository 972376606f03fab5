"""Tiers of decoded images: images come back unchanged, and are kept only where that saves time."""

import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import dlio
from dlio.errors import TierFull, UsageError
from dlio.storage.decoded_tier import DecodedTier
from dlio.storage.tier_spec import TierSpec, decoded_spec, parse_tiers

_Pixels = npt.NDArray[np.uint8]


def _noise(seed: int, rows: int = 60, columns: int = 80) -> _Pixels:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)


def _flat(seed: int) -> _Pixels:
    return np.full((60, 80, 3), seed, np.uint8)


def _name() -> str:
    return f"test-decoded-{os.getpid()}"


def test_every_process_that_opens_the_tier_reads_its_images() -> None:
    notes: list[str] = []
    with_room = 16 << 20
    one, other = (DecodedTier(_name(), 100, with_room, notes.append) for _ in range(2))
    for sample in range(50):
        (one if sample % 2 else other).put(sample, _noise(sample), sample + 3, 0.01)
    for tier in (one, other):
        for sample in range(50):
            image = tier.get(sample)
            assert image is not None
            assert np.array_equal(image[0], _noise(sample))
            assert image[1] == sample + 3
        assert tier.get(50) is None
        image = None
    path = one._folder.path
    one.close()
    assert os.path.isdir(path)
    other.close()
    assert not os.path.exists(path)


def test_the_capacity_is_used_and_not_exceeded() -> None:
    tier = DecodedTier(_name(), 1000, 4 << 20, lambda note: None)
    size = _noise(0).nbytes
    for sample in range(1000):
        tier.put(sample, _noise(sample), 0, 0.01)
    held = sum(tier.get(sample) is not None for sample in range(1000))
    assert 0.9 * (4 << 20) / size < held <= (4 << 20) / size
    folder = tier._folder.path
    slabs = [name for name in os.listdir(folder) if name.startswith("slab")]
    assert sum(os.stat(os.path.join(folder, name)).st_size for name in slabs) <= 4 << 20
    tier.close()


def test_compressible_images_are_kept_compressed_when_room_is_short() -> None:
    notes: list[str] = []
    tier = DecodedTier(_name(), 1000, 2 << 20, notes.append)
    for sample in range(1000):
        tier.put(sample, _flat(sample % 256), 0, 0.01)
    assert "kept as LZ4" in notes[0]
    # The images that were measured first are stored raw.
    held = [sample for sample in range(1000) if (image := tier.get(sample)) is not None]
    assert len(held) > 4 * (2 << 20) / _flat(0).nbytes
    for sample in held:
        image = tier.get(sample)
        assert image is not None
        assert np.array_equal(image[0], _flat(sample % 256))
    tier.close()


def test_images_that_decode_faster_than_the_tier_returns_them_are_not_kept() -> None:
    notes: list[str] = []
    tier = DecodedTier(_name(), 100, 16 << 20, notes.append)
    for sample in range(60):
        tier.put(sample, _noise(sample), 0, 1e-9)
    assert "not kept" in notes[0]
    assert [tier.get(sample) for sample in range(60)] == [None] * 60
    tier.close()


def test_full_memory_is_an_error_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching it would kill the process."""

    def full(descriptor: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    name = _name()
    with pytest.raises(TierFull, match=r"no room for a tier of decoded images \(8 B for room\)"):
        DecodedTier(name, 1000, 16 << 20, lambda note: None)
    monkeypatch.undo()
    DecodedTier(name, 1000, 16 << 20, lambda note: None).close()


def test_damage_is_detected() -> None:
    tier = DecodedTier(_name(), 10, 16 << 20, lambda note: None)
    tier.put(0, _noise(0), 1, 0.01)
    path = os.path.join(tier._folder.path, "slab.1")
    with open(path, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 4]))
    assert tier.get(0) is None
    tier._index[0, 2] = 1 << 40
    assert tier.get(0) is None
    tier.close()


def test_specifications_as_users_write_them_are_parsed() -> None:
    decoded, blocks = parse_tiers("ram:1GiB:decoded,ram:2GiB")
    assert decoded == TierSpec("ram", "/dev/shm", 1 << 30, True)
    assert not blocks.decoded
    assert str(decoded) == "ram:1GiB:decoded"
    assert decoded_spec("/nvme:1GiB,ram:1GiB:decoded") == decoded
    for wrong in ("ram:1GiB:decodedx", "/nvme:1GiB:decoded", "ram:decoded"):
        with pytest.raises(UsageError, match="tier"):
            parse_tiers(wrong)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.daily("True")
def test_pixels_are_the_same_with_and_without_the_tier(imagenet: Path, train: bool) -> None:
    def epochs(tiers: str) -> tuple[list[dict[int, bytes]], list[int], str]:
        passes, decoded = [], []
        with (
            dlio.open(str(imagenet), tiers=tiers, image_size=64, train=train) as data,
            dlio.DataLoader(data, 16, shuffle=True, num_workers=2) as loader,
        ):
            for epoch in (1, 1, 2):
                loader.set_epoch(epoch)
                pixels: dict[int, bytes] = {}
                for images, labels in loader:
                    for sample, image, label in zip(
                        loader.last_samples.tolist(), images, labels.tolist(), strict=True
                    ):
                        pixels[sample] = image.numpy().tobytes()
                        assert label == data.reader.labels[sample]
                passes.append(pixels)
                decoded.append(loader.stats()["decoded"])
            assert loader.stats()["decode_saved_s"] > 0 or not decoded[-1]
            data.set_epoch(1)
            assert data[5][0].numpy().tobytes() == passes[0][5]
            return passes, decoded, " ".join(loader.stats()["notes"])

    whole, hits, note = epochs("ram:256MiB,ram:256MiB:decoded")
    assert hits == [0, 200, 200]
    assert "decoded images are kept" in note
    part, some, _ = epochs("ram:256MiB,ram:2MiB:decoded")
    assert 0 < some[1] < 200
    assert whole[0] == whole[1] == part[0] == part[1]
    assert whole[2] == part[2]
    assert (whole[2] == whole[0]) == (not train)
    if not train:
        plain, none, _ = epochs("ram:256MiB")
        assert none == [0, 0, 0]
        assert plain[0] == whole[0]


def test_data_without_images_to_crop_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "values.npy", np.zeros((10, 4)))
    with pytest.raises(UsageError, match="decoded tiers keep images"):
        dlio.open(str(tmp_path / "values.npy"), tiers="ram:1GiB:decoded")

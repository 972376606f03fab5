"""A tier whose disk fails costs time, not the job: every sample is right, and the user is told."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.errors import TierError
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from tests.storage.test_hierarchy import MemoryReader, N

NUMBERS = (errno.ESTALE, errno.EIO, errno.EROFS, errno.ENOSPC)
CALLS = ("has", "read", "publish", "claim", "discard", "blocks", "read_whole")


class Ill(Tier):
    """A tier of which some methods fail with an error."""

    failing: dict[str, int]

    def __getattribute__(self, name: str) -> object:
        failing = object.__getattribute__(self, "__dict__").get("failing", {})
        if name in failing:

            def fail(*_: object) -> None:
                raise OSError(failing[name], os.strerror(failing[name]))

            return fail
        return super().__getattribute__(name)


def _hierarchy(reader: MemoryReader, tmp_path: Path) -> tuple[Hierarchy, Ill]:
    tiers = []
    for name in ("fast", "slow"):
        (tmp_path / name).mkdir(exist_ok=True)
        tiers.append(Ill(TierSpec("disk", str(tmp_path / name), 1 << 30), "d", "n"))
    pins = (np.arange(reader.layout.blocks) % 3 - 1).astype(np.int8)
    return Hierarchy(reader, tiers, pins), tiers[0]


def _read_all(hierarchy: Hierarchy) -> list[str]:
    reader, places_read = hierarchy.reader, []
    blocks, places = reader.layout.locate(np.arange(N, dtype=np.int64))
    assert isinstance(reader, MemoryReader)
    for sample in range(N):
        payload, where = hierarchy.read(sample, int(blocks[sample]), int(places[sample]))
        assert bytes(payload) == reader.payloads[sample]
        places_read.append(where)
    return places_read


@pytest.mark.parametrize(
    ("number", "call", "filled"),
    [
        pytest.param(
            *(number, call, filled),
            marks=[] if (number == errno.EIO and filled) or call == "all" else pytest.mark.nightly,
        )
        for number in NUMBERS
        for call in (*CALLS, "all")
        for filled in (False, True)
    ],
)
def test_a_failing_tier_is_gone_on_without(
    number: int, call: str, filled: bool, tmp_path: Path
) -> None:
    reader = MemoryReader()
    hierarchy, ill = _hierarchy(reader, tmp_path)
    with hierarchy:
        if filled:
            _read_all(hierarchy)
        ill.failing = dict.fromkeys(CALLS if call == "all" else [call], number)
        for block in range(reader.layout.blocks):
            hierarchy.block_fetcher.fill(block)
        hierarchy.missing()
        _read_all(hierarchy)
        assert "disk" in _read_all(hierarchy)  # The other tier is well.
        said = [note for note in hierarchy.notes() if ill.path in note]
        assert len(said) <= 3
        assert len(said) == len(set(said))
        assert bool(said) == bool(hierarchy.counters.tier_errors)
        if call == "all":
            assert said
            assert os.strerror(number) in said[0]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.EROFS])
def test_a_damaged_block_that_cannot_be_removed_is_not_served(number: int, tmp_path: Path) -> None:
    reader = MemoryReader()
    hierarchy, ill = _hierarchy(reader, tmp_path)
    with hierarchy:
        for block in range(reader.layout.blocks):
            hierarchy.block_fetcher.fill(block)
        ill.failing = {"discard": number, "publish": number}
        for path in Path(ill.path).glob("*.blk"):
            data = bytearray(path.read_bytes())
            for at in range(len(data) // 2, len(data), 997):
                data[at] ^= 1
            path.write_bytes(data)
        damaged = len(ill.blocks())
        assert damaged
        _read_all(hierarchy)
        healed, errors = hierarchy.counters.healed, hierarchy.counters.tier_errors
        assert healed >= damaged
        assert errors >= damaged
        _read_all(hierarchy)
        assert (hierarchy.counters.healed, hierarchy.counters.tier_errors) == (healed, errors)
        assert sum("cannot be cleared" in note for note in hierarchy.notes()) == 1


def test_a_tier_that_is_removed_while_it_is_used_is_gone_on_without(tmp_path: Path) -> None:
    reader = MemoryReader()
    hierarchy, ill = _hierarchy(reader, tmp_path)
    with hierarchy:
        _read_all(hierarchy)
        for path in Path(ill.path).iterdir():
            path.unlink()
        Path(ill.path).rmdir()
        _read_all(hierarchy)
        _read_all(hierarchy)
        assert hierarchy.counters.tier_errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; skipped without the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if os.geteuid() or made.returncode:
        pytest.skip("needs root, and the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _remount(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)


def _labels(data: dlio.Dataset) -> tuple[list[int], dict[str, object]]:
    loader = dlio.DataLoader(data, batch_size=4)
    labels = sorted(int(n) for _, labels in loader for n in labels)
    return labels, dict(loader.stats())


def test_a_tier_that_is_read_only_is_read(pictures: Path, small_disk: Path) -> None:
    tiers = f"{small_disk}:8MiB"
    with dlio.open(str(pictures), tiers="none", image_size=32) as data:
        expected, _ = _labels(data)
    stage(str(pictures), StageOptions(tiers=tiers))
    _remount(small_disk)
    with dlio.open(str(pictures), tiers=tiers, image_size=32) as data:
        labels, stats = _labels(data)
        assert labels == expected
        assert isinstance(stats["bytes"], dict)
        assert stats["bytes"]["source"] == 0
        assert stats["bytes"]["disk"] > 0
        notes = stats["notes"]
        assert isinstance(notes, list)
        assert sum("Read-only file system" in note for note in notes) == 1
        mounted = data.mounted
        assert mounted is not None
        assert mounted.hierarchy.counters.tier_errors


def test_an_empty_read_only_tier_is_left_out_but_nothing_is_staged_there(
    pictures: Path, small_disk: Path
) -> None:
    _remount(small_disk)
    tiers = f"ram:8MiB,{small_disk}:8MiB"
    with dlio.open(str(pictures), tiers=tiers, image_size=32) as data:
        for _ in range(2):
            labels, stats = _labels(data)
            assert len(labels) == 12
        assert isinstance(stats["bytes"], dict)
        assert stats["bytes"]["ram"] > 0
        mounted = data.mounted
        assert mounted is not None
        assert any("Read-only file system" in note for note in mounted.hierarchy.notes())
    with pytest.raises(TierError, match="Read-only file system"):
        stage(str(pictures), StageOptions(tiers=f"{small_disk}:8MiB"))

"""No byte is read from a slower place while a faster place of the node has it."""

from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.plan.layout import Layout
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from tests.storage.test_hierarchy import MemoryReader, N


def _tiers(tmp_path: Path) -> list[Tier]:
    for name in ("fast", "slow"):
        (tmp_path / name).mkdir(exist_ok=True)
    return [
        Tier(TierSpec("disk", str(tmp_path / name), 1 << 30), "d", "n") for name in ("fast", "slow")
    ]


def _fill(reader: MemoryReader, tmp_path: Path, tier: int) -> None:
    """Have all blocks in one tier only."""
    blocks = reader.layout.blocks
    with Hierarchy(reader, _tiers(tmp_path), np.full(blocks, tier, np.int8)) as hierarchy:
        assert all(hierarchy.block_fetcher.fill(block) for block in range(blocks))
    reader.reads[:] = 0


def _read_all(hierarchy: Hierarchy) -> None:
    reader = hierarchy.reader
    layout: Layout = reader.layout
    blocks, places = layout.locate(np.arange(N, dtype=np.int64))
    assert isinstance(reader, MemoryReader)
    for sample in range(N):
        payload, where = hierarchy.read(sample, int(blocks[sample]), int(places[sample]))
        assert bytes(payload) == reader.payloads[sample]
        assert where != "source"


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("pinned", [-1, 0, 1, None])
def test_a_block_that_any_tier_has_is_not_read_from_the_source(
    tier: int, pinned: int | None, tmp_path: Path
) -> None:
    reader = MemoryReader()
    _fill(reader, tmp_path, tier)
    blocks = reader.layout.blocks
    pins = np.arange(blocks) % 3 - 1 if pinned is None else np.full(blocks, pinned)
    with Hierarchy(reader, _tiers(tmp_path), pins.astype(np.int8)) as hierarchy:
        hierarchy.fetcher.hurry(np.arange(64), lambda: None)
        _read_all(hierarchy)
        _read_all(hierarchy)
        for block in range(blocks):
            hierarchy.block_fetcher.fill(block)
        assert hierarchy.missing() == 0
        assert hierarchy.counters.bytes["source"] == 0
        # Blocks of the fast tier are brought there from the slow one, once.
        moved = hierarchy.counters.moved_bytes
        brought = sum(
            len(hierarchy.tiers[0].read_whole(b)) for b in np.flatnonzero(pins == 0).tolist()
        )
        if tier == 1:
            assert moved == brought
    assert not reader.reads.any()


# SECURITY.md: S3
def test_a_damaged_block_of_a_slower_tier_is_read_from_the_source(tmp_path: Path) -> None:
    reader = MemoryReader()
    _fill(reader, tmp_path, 1)
    slow = _tiers(tmp_path)[1]
    path = Path(slow.path) / "00000000.blk"
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)
    blocks = reader.layout.blocks
    with Hierarchy(reader, _tiers(tmp_path), np.zeros(blocks, np.int8)) as hierarchy:
        assert all(hierarchy.block_fetcher.fill(block) for block in range(blocks))
        assert hierarchy.counters.healed == 1
        _read_all(hierarchy)
    assert (reader.reads == (reader.layout.block_of(np.arange(N)) == 0)).all()
    assert not path.exists()
    slow.close()


@pytest.mark.parametrize("ram", ["60KiB", "200KiB", "8MiB"])
def test_memory_is_filled_from_what_was_staged(
    ram: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "disk").mkdir()
    disk = f"{tmp_path / 'disk'}:64MiB"
    staged = stage(str(pictures), StageOptions(tiers=disk))
    assert staged.read_bytes
    with dlio.open(str(pictures), tiers=f"ram:{ram},{disk}", image_size=32) as data:
        loader = dlio.DataLoader(data, batch_size=4)
        for _ in range(3):
            assert sum(len(labels) for _, labels in loader) == 12
            assert loader.stats()["bytes"]["source"] == 0
        mounted = data.mounted
        assert mounted is not None
        home = mounted.hierarchy.pinned
        wanted = int(mounted.block_bytes[home == 0].sum())
        assert mounted.hierarchy.counters.moved_bytes == wanted

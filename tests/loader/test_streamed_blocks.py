"""Blocks that no tier holds are streamed: read once, whole, and removed when they are used up."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlio
from dlio.errors import UsageError
from dlio_staging.pack_folder import pack

N = 3000


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streamed")
    values = np.arange(N * 250).reshape(N, 250)
    np.save(root / "values.npy", values)
    pack(str(root / "values.npy"), str(root / "packed"), compress="none")
    return root / "packed"


def _epoch(loader: dlio.DataLoader) -> list[int]:
    seen: list[int] = []
    for batch in loader:
        (values,) = batch.values()
        seen += (values[:, 0] // 250).tolist()
    return seen


def test_each_block_is_read_once_and_does_not_stay(packed: Path) -> None:
    with (
        dlio.open(str(packed), tiers="none") as data,
        dlio.DataLoader(data, 10, shuffle=True, source_order="block(4)", num_workers=2) as loader,
    ):
        blocks = int(np.asarray(data.reader.block_bytes).sum())  # type: ignore[attr-defined]
        most = 0
        for _ in range(2):
            seen = []
            for batch in loader:
                (values,) = batch.values()
                seen += (values[:, 0] // 250).tolist()
                assert data.mounted is not None
                most = max(most, len(data.mounted.hierarchy.targets.streamed_blocks()))
            assert sorted(seen) == list(range(N))
            assert seen != sorted(seen)
            # Blocks that the last steps of a pass left may serve the next one.
            read = loader.stats()["bytes"]["source"]
            # On a busy machine a few samples that wait too long are read on their own.
            assert 0.9 * blocks < read < 1.2 * blocks
        assert 4 <= most < data.reader.layout.blocks // 4
        folder = data.mounted.hierarchy.tiers[-1].path  # type: ignore[union-attr]
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


def test_pinned_blocks_stay_and_the_others_pass(packed: Path) -> None:
    with (
        dlio.open(str(packed), tiers="ram:3MiB") as data,
        dlio.DataLoader(data, 10, shuffle=True, source_order="block(4)", num_workers=2) as loader,
    ):
        whole = int(np.asarray(data.reader.block_bytes).sum())  # type: ignore[attr-defined]
        for _ in range(2):
            assert sorted(_epoch(loader)) == list(range(N))
        share = loader.stats()["bytes"]["source"] / whole
        assert share == pytest.approx(0.5, abs=0.03)


def test_a_pass_goes_on_where_it_was_left(packed: Path) -> None:
    with dlio.open(str(packed), tiers="none") as data:
        options: dict[str, Any] = {"shuffle": True, "source_order": "block(4)", "num_workers": 2}
        one = dlio.DataLoader(data, 16, **options)
        seen = []
        for step, batch in enumerate(one):
            (values,) = batch.values()
            seen += (values[:, 0] // 250).tolist()
            if step == 20:
                state = one.state_dict()
                break
        other = dlio.DataLoader(data, 8, **options)
        other.load_state_dict(state)
        seen += _epoch(other)
        assert sorted(seen) == list(range(N))
        plain = dlio.DataLoader(data, 8, shuffle=True)
        plain.load_state_dict(state)
        with pytest.raises(UsageError, match="source order block"):
            iter(plain)


def test_what_it_does_not_go_with(packed: Path) -> None:
    with dlio.open(str(packed), tiers="none") as data:
        with pytest.raises(UsageError, match="mode batch or global"):
            dlio.DataLoader(data, 8, source_order="block", mode="local")
        with pytest.raises(UsageError, match="source order"):
            dlio.DataLoader(data, 8, source_order="rows")
    loader = dlio.DataLoader(list(range(50)), 5, shuffle=True, seed=1, source_order="block")
    with pytest.raises(UsageError, match="reads itself"):
        iter(loader)

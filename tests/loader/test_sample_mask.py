"""Loaders of an epoch's kept samples: each once in every mode, for the bytes of those alone."""

import json
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

import dlio
from dlio.errors import UsageError
from tests.drawn import small_pictures
from tests.loader.sample_mask_checks import BATCH, CASES

BODY = str(Path(__file__).with_name("sample_mask_checks.py"))
N = 103


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept") / "pictures"
    small_pictures(root, images=N)
    return root


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.daily("2")
def test_every_mode_gives_each_kept_sample_once_and_reads_no_other(
    mpirun: Callable[..., subprocess.CompletedProcess[str]],
    folder: Path,
    ranks: int,
    request: pytest.FixtureRequest,
) -> None:
    # By day, every second one.
    numbers = range(len(CASES)) if request.config.getoption("--nightly") else (1, 3, 5, 7)
    done = mpirun(ranks, "-W", "error", BODY, str(folder), ",".join(map(str, numbers)))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == ranks
    with dlio.open(str(folder)) as data:
        keep = np.random.default_rng(5).random(N) < 0.5
        keep[data.reader.layout.samples_of(1)] = False
        layout, sizes = data.reader.layout, data.reader.sizes
    kept = np.flatnonzero(keep).tolist()
    steps = -(-len(kept) // (BATCH * ranks))
    for place, number in enumerate(numbers):
        tiers, mode, source_order = CASES[number]
        cases = [rank["cases"][place] for rank in reports]
        assert sorted(chain(*(s for case in cases for s in case["whole"]))) == kept, mode
        assert sorted(chain(*(s for case in cases for s in case["parts"]))) == kept, mode
        assert {case["steps"] for case in cases} == {len(case["whole"]) for case in cases}
        assert cases[0]["steps"] == steps
        assert sum(case["after"] for case in cases) == N
        for case in cases:
            assert "give set_epoch the keep= that it was saved with" in case["refused"]
        read = {tier: sum(case["bytes"][tier] for case in cases) for tier in cases[0]["bytes"]}
        assert sum(case["late"] for case in cases) == 0
        used = int(sizes[kept].sum())
        if tiers != "none":
            assert (read["source"], read["disk"]) == (0, 0)
            assert read["ram"] + read["peer"] == used
        elif source_order == "sample":
            assert read["source"] == used
        else:
            # Blocks that a kept sample is in, whole and once; and kept samples on their own that
            # were wanted before their block had come.
            blocks = np.unique(layout.block_of(np.array(kept)))
            whole = layout.sums(lambda samples: sizes[samples])[blocks].sum()
            single = sum(case["single_bytes"] for case in cases)
            assert single <= used
            assert read["source"] - single <= whole
            assert read["source"] >= used


def test_any_data_set_in_an_order_of_dlios_takes_a_bitmap() -> None:
    keep = np.arange(50) % 3 == 0
    loader = dlio.DataLoader(list(range(50)), 4, True, seed=1)
    loader.set_epoch(2, keep)
    assert len(loader) == 5
    results = [batch.tolist() for batch in loader]
    assert sorted(chain(*results)) == np.flatnonzero(keep).tolist()
    # Of that epoch alone.
    assert sorted(chain(*(batch.tolist() for batch in loader))) == list(range(50))
    assert len(loader) == 13


def test_persistent_workers_work_ahead_of_the_next_epoch_of_all_and_drop_it(folder: Path) -> None:
    keep = np.arange(N) % 4 > 0
    with (
        dlio.open(str(folder), tiers="ram:64MiB", image_size=32) as data,
        dlio.DataLoader(data, 8, True, num_workers=1, persistent_workers=True) as loader,
    ):
        for epoch in range(3):
            loader.set_epoch(epoch, keep if epoch == 1 else None)
            results = [int(s) for _ in loader for s in loader.last_samples]
            assert sorted(results) == np.flatnonzero(keep | (epoch != 1)).tolist()


def test_orders_that_are_not_dlios_own_are_refused() -> None:
    keep = np.ones(9, np.bool_)
    data = list(range(9))
    for loader in (
        dlio.DataLoader(data, 2),
        dlio.DataLoader(data, 2, sampler=SequentialSampler(data)),
    ):
        with pytest.raises(UsageError, match="give seed=, and no sampler"):
            loader.set_epoch(0, keep)
    with pytest.raises(UsageError, match="for 9 samples give uint8"):
        dlio.DataLoader(data, 2, seed=1).set_epoch(0, keep[:5])


def test_blocks_in_turn_and_a_bitmap_exclude_each_other(folder: Path) -> None:
    with (
        dlio.open(str(folder), image_size=32) as data,
        dlio.DataLoader(data, 8, False, source_order="block(2)") as loader,
    ):
        loader.set_epoch(0, np.arange(N) % 2 == 0)
        with pytest.raises(UsageError, match="wants shuffle=True"):
            iter(loader)

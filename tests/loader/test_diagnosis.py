"""The diagnosis of a pass names remedies that fit the data, and none where nothing is wrong."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import dlio
from dlio.comm import world
from dlio.data.patches import PatchOptions
from dlio.data.reader import open_parts
from dlio.loader.diagnosis import diagnose
from dlio.loader.patch_source import open_patches
from dlio.loader.stats import PassStats


def _pass(**given: Any) -> PassStats:
    usual = {
        "engine": "planned",
        "samples": 1000,
        "batches": 20,
        "seconds": 10.0,
        "stall_s": 5.0,
        "first_batch_s": 0.1,
        "threads": 2,
        "thread_s": {"ram": 1.0, "decode": 18.0},
        "skipped": [],
        "notes": [],
        "bytes": {"source": 0, "disk": 0, "ram": 110_000 * 1000, "peer": 0},
        "late": 0,
        "decoded": 0,
        "images": True,
    }
    return cast(PassStats, {**usual, **given})


def _bytes(**given: int) -> dict[str, int]:
    return {"source": 0, "disk": 0, "ram": 0, "peer": 0, **given}


@pytest.mark.parametrize(
    "given",
    [
        {"stall_s": 0.0},
        {"stall_s": 0.4},
        {"stall_s": 0.5},
        {"seconds": 0.0, "stall_s": 0.0, "samples": 0, "batches": 0, "first_batch_s": None},
    ],
)
def test_it_is_silent_where_nothing_is_wrong(given: dict[str, Any]) -> None:
    line = diagnose(_pass(**given), cores=2)
    assert "the loader keeps up" in line
    assert "remedy" not in line


def test_a_pass_of_no_batch_is_said_with_the_cause() -> None:
    line = diagnose(_pass(batches=0, samples=0, stall_s=0.0, first_batch_s=None), cores=2)
    assert "no batch: this rank has fewer samples than batch_size, and drop_last=True" in line


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_tells_a_pass_without_a_batch_from_none(workers: int) -> None:
    with dlio.DataLoader(range(9), 4, num_workers=workers) as loader:
        assert loader.diagnosis() == "no pass has begun yet"
        batches = iter(loader)
        assert loader.diagnosis() == "the pass has had no batch yet"
        next(batches)
        assert "samples/s" in loader.diagnosis()
    with dlio.DataLoader(range(3), 4, num_workers=workers, drop_last=True) as loader:
        list(loader)
        assert "the pass had no batch: this rank has fewer samples" in loader.diagnosis()


@pytest.mark.parametrize("given", [{}, {"thread_s": {}}])
def test_it_does_not_say_that_a_loader_keeps_up_which_was_waited_for(given: dict[str, Any]) -> None:
    line = diagnose(_pass(seconds=0.1, stall_s=0.09, **given), cores=2)
    assert "waited 90%" in line
    assert "90 ms, too little to tell a bottleneck by" in line
    assert "keeps up" not in line
    assert "remedy" not in line


@pytest.mark.parametrize(
    ("given", "cores", "words", "silent"),
    [
        # Large pictures: fewer pixels, and more threads where there are cores.
        ({}, 2, ["decode", "pack --resize"], ["num_workers"]),
        ({}, 8, ["decode", "num_workers=8", "pack --resize"], []),
        # Small ones cannot be made smaller.
        ({"bytes": _bytes(ram=9_000 * 1000)}, 2, ["decoded"], ["--resize", "num_workers"]),
        ({"bytes": _bytes(ram=9_000 * 1000)}, 8, ["num_workers=8"], ["--resize"]),
        ({"bytes": _bytes(ram=9_000 * 1000), "decoded": 9}, 2, ["more cores"], ["--resize"]),
        # Tables have no pictures.
        (
            {"images": False, "bytes": _bytes(ram=24 * 1000)},
            2,
            ["batch_size", "24 B"],
            ["--resize", "decoded images", "memory is the limit"],
        ),
        (
            {"images": False, "bytes": _bytes(source=24 * 1000), "thread_s": {"source": 18.0}},
            2,
            ["batch_size"],
            ["larger tiers", "dlio stage"],
        ),
        ({"images": False, "bytes": _bytes(ram=900_000 * 1000)}, 2, ["more cores"], ["--resize"]),
        # The source.
        (
            {"bytes": _bytes(source=10**9), "thread_s": {"source": 19.0}},
            2,
            ["source", "954 MiB", "larger tiers"],
            ["--resize"],
        ),
        (
            {
                "images": False,
                "bytes": _bytes(source=24 * 1000, ram=24 * 1000),
                "thread_s": {"source": 18.0},
            },
            2,
            ["source", "dlio stage"],
            ["batch_size"],
        ),
        # The network is named only where much comes from it.
        (
            {"bytes": _bytes(ram=10**9, peer=10**9), "thread_s": {"peer": 1.0}},
            2,
            ["network", "mode='batch'"],
            [],
        ),
        (
            {"bytes": _bytes(ram=10**9, peer=10**6), "thread_s": {"decode": 8.0}},
            2,
            ["decode", "busy for 40%"],
            ["network"],
        ),
        # A first batch.
        (
            {
                "first_batch_s": 4.9,
                "bytes": _bytes(source=10**9),
                "thread_s": {"source": 9.0, "decode": 1.0},
            },
            2,
            ["first batch", "dlio stage"],
            [],
        ),
        ({"first_batch_s": 4.9}, 2, ["first batch", "persistent_workers"], ["dlio stage"]),
        # Other engines know less.
        ({"engine": "torch", "thread_s": {}}, 2, ["not seen from here"], ["remedy"]),
        ({"bytes": {}, "images": None}, 2, ["decode", "more cores"], ["--resize"]),
        ({"thread_s": {"fetch": 19.0}}, 2, ["dlio.open", "workers='process'"], ["num_workers"]),
        ({"thread_s": {"transform": 19.0}}, 4, ["num_workers=4", "dlio.transforms"], []),
        ({"thread_s": {"ram": 19.0}}, 2, ["memory is the limit"], ["num_workers"]),
        ({"thread_s": {"ram": 19.0}}, 16, ["num_workers=16"], ["fewer threads"]),
    ],
)
def test_remedies_fit_the_data(
    given: dict[str, Any], cores: int, words: list[str], silent: list[str]
) -> None:
    line = diagnose(_pass(**given), cores)
    assert "\n" not in line
    for word in words:
        assert word in line
    for word in silent:
        assert word not in line


def test_the_time_in_which_a_tier_fills_is_the_sources(tmp_path: Path) -> None:
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    readers = open_parts(str(tmp_path / "t.bin"), dtype="uint16")
    source = open_patches([readers], PatchOptions((8,), stride=(8,), leading=True), {})
    counters = source.mount("ram:8MiB", world(), None, None).hierarchy.counters
    source.cut(0, 0, 0)
    assert list(counters.take_waits()) == ["source"]
    source.cut(0, 0, 0)
    assert list(counters.take_waits()) == ["ram"]
    source.unmount()
    source.close()

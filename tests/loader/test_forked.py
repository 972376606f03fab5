"""Worker processes of torch are forked: what they inherit of a mounted data set works there."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlio
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from tests.loader.datasets import Numbers
from tests.util.test_forks import in_child

_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    from dlio_staging.pack_folder import pack
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("forked")
    draw_once(root / "a", images=60, validation=2, classes=3)
    pack(str(root / "a" / "train"), str(root / "packed"))
    return str(root / "packed")


def _drawn(data: dlio.Dataset, **options: Any) -> list[tuple[list[int], Any]]:
    with dlio.DataLoader(data, 10, timeout=_DEADLINE_S, **options) as loader:
        return [(labels.tolist(), images.float().mean().item()) for images, labels in loader]


@pytest.mark.parametrize("tiers", ["ram:8MiB", "ram:8MiB:decoded,ram:8MiB", "none"])
@pytest.mark.daily("ram:8MiB:decoded,ram:8MiB", "none")
def test_processes_draw_what_threads_drew_before_them(packed: str, tiers: str) -> None:
    with dlio.open(packed, image_size=16, tiers=tiers, train=False) as data:
        for _ in range(2):  # The second time from tiers that are mounted anew.
            processes = _drawn(data, workers="process", num_workers=2)
            assert processes == _drawn(data) == _drawn(data, num_workers=0)


class _Slow(Numbers):
    """A data set whose samples come when they may, in the process that made it."""

    def __init__(self) -> None:
        super().__init__(40)
        self.asked, self.may = threading.Event(), threading.Event()
        self.may.set()
        self.parent = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if os.getpid() == self.parent:
            self.asked.set()
            assert self.may.wait(_DEADLINE_S)
        return {"index": index}


def test_a_child_does_not_wait_for_what_its_parents_threads_were_doing() -> None:
    slow = _Slow()
    data = dlio.open(slow, image_size=None, tiers="ram:1MiB")
    slow.may.clear()
    slow.asked.clear()
    with dlio.DataLoader(data, 8, num_workers=2) as loader:
        first = threading.Thread(target=lambda: next(iter(loader)))
        first.start()
        assert slow.asked.wait(_DEADLINE_S)  # A thread is reading.
        assert in_child(lambda: [int(data[k]["index"]) for k in range(40)] == list(range(40)))
        slow.may.set()
        first.join(_DEADLINE_S)
    data.close()


def test_a_child_that_closes_a_data_set_leaves_its_parents_tiers(packed: str) -> None:
    with (
        dlio.open(packed, image_size=16, tiers="ram:8MiB", train=False) as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        whole = [labels.tolist() for _, labels in loader]

        def closes() -> bool:
            data.close()
            return True

        assert in_child(closes)
        assert [labels.tolist() for _, labels in loader] == whole
        assert loader.stats()["bytes"]["source"] == 0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    with Tier(TierSpec("disk", str(tmp_path), 1 << 20), "d", "forked") as made:
        yield made


def test_a_childs_claims_are_its_own(tier: Tier) -> None:
    assert tier.claim(1)

    def claims() -> bool:
        refused, taken = not tier.claim(1), tier.claim(2)
        tier.release(1)
        return refused and taken

    assert in_child(claims)
    assert in_child(lambda: not tier.claim(1))  # The child's release did not give it up.
    assert tier.claim(2)  # The child's claim ended with it.


def test_a_block_that_a_thread_reads_is_read_by_a_child_on_its_own(packed: str) -> None:
    reader: Any = dlio.open(packed, image_size=16, tiers="none").reader
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with reader._tables._lock:
            held.set()
            over.wait(_DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(_DEADLINE_S)
    assert in_child(lambda: len(reader.read(np.arange(3))) == 3)
    over.set()
    thread.join(_DEADLINE_S)

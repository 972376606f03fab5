"""The hierarchy: the fastest tier is read, the source once, and every byte is right."""

import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.schema import IMAGE_LABEL
from dlio.errors import SourceError
from dlio.plan.layout import Layout, cut_blocks
from dlio.plan.order import Order
from dlio.storage.block_fetcher import BlockFetcher, BlockFiller, blocks_in_order
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.source_requests import SourceRequests
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from tests.conftest import in_time

N = 400


class MemoryReader:
    """A source in memory that counts how often each sample was read."""

    format = "memory"
    objects = True
    path = "memory"
    schema = IMAGE_LABEL
    classes: Sequence[str] = ("a",)
    fingerprint = "ab" * 16

    def __init__(self, size: int = 3000, broken: int | None = None) -> None:
        self.payloads = [
            IMAGE_LABEL.join({"image": os.urandom(size + k % 7), "label": k}) for k in range(N)
        ]
        self.labels = np.zeros(N, np.int64)
        self.sizes = np.array([len(payload) for payload in self.payloads], np.int64)
        self.layout: Layout = cut_blocks(self.sizes, Order(N, 1))
        self.broken = broken
        self.reads = np.zeros(N, np.int64)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return N

    def name(self, sample: int) -> str:
        return f"sample{sample}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        if self.broken is not None and self.broken in samples:
            raise SourceError(f"{self.name(self.broken)} is broken")
        with self._lock:
            self.reads[samples] += 1
        return [self.payloads[sample] for sample in samples]

    def close(self) -> None:
        pass


Make = Callable[[MemoryReader], Hierarchy]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make hierarchies over two disk tiers, as different processes of a node open them."""
    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()

    def hierarchy(reader: MemoryReader) -> Hierarchy:
        tiers = [
            Tier(TierSpec("disk", str(tmp_path / name), 1 << 30), "d", "n")
            for name in ("fast", "slow")
        ]
        pinned = (np.arange(reader.layout.blocks) % 3 - 1).astype(np.int8)  # -1, 0, 1, -1 ...
        return Hierarchy(reader, tiers, pinned)

    return hierarchy


def _read_all(hierarchy: Hierarchy) -> list[str]:
    reader = hierarchy.reader
    blocks, places = reader.layout.locate(np.arange(N, dtype=np.int64))
    places_read: list[str] = []
    for sample in range(N):
        payload, where = hierarchy.read(sample, int(blocks[sample]), int(places[sample]))
        assert isinstance(reader, MemoryReader)
        assert bytes(payload) == reader.payloads[sample]
        places_read.append(where)
    return places_read


def test_pinned_blocks_are_read_once_and_the_rest_each_time(make: Make) -> None:
    reader = MemoryReader()
    with make(reader) as hierarchy:
        _read_all(hierarchy)
        first = hierarchy.counters.bytes["source"]
        assert first <= 1.005 * reader.sizes.sum() + reader.sizes.max()
        assert (
            _read_all(hierarchy).count("disk")
            == (hierarchy.pinned[reader.layout.block_of(np.arange(N))] >= 0).sum()
        )
        pinned = hierarchy.pinned[reader.layout.block_of(np.arange(N))] >= 0
        assert (reader.reads[~pinned] == 2).all()
        assert hierarchy.counters.bytes["source"] - first == reader.sizes[~pinned].sum()


def test_processes_of_a_node_share_blocks_and_work(make: Make) -> None:
    reader = MemoryReader()
    with make(reader) as one, make(reader) as two:
        wanted = one.pinned >= 0
        order = Order(N, 0)

        def blocks() -> Iterator[int]:
            return blocks_in_order(reader.layout, order, wanted)

        with (
            BlockFiller(one.block_fetcher, blocks) as first,
            BlockFiller(two.block_fetcher, blocks) as second,
        ):
            assert first.join(60)
            assert second.join(60)
        assert one.missing() == two.missing() == 0
        assert reader.reads.max() == 1
        read = [hierarchy.counters.bytes["source"] for hierarchy in (one, two)]
        pinned = one.pinned[reader.layout.block_of(np.arange(N))] >= 0
        assert sum(read) == reader.sizes[pinned].sum()


def test_damage_in_a_tier_is_healed_from_the_source_and_counted(make: Make) -> None:
    reader = MemoryReader()
    with make(reader) as hierarchy:
        _read_all(hierarchy)
    damaged = 0
    for tier in hierarchy.tiers:
        for name in os.listdir(tier.path):
            if name.endswith(".blk"):
                file = Path(tier.path) / name
                data = bytearray(file.read_bytes())
                data[-1500] ^= 1
                file.write_bytes(data)
                damaged += 1
    with make(reader) as hierarchy:
        _read_all(hierarchy)  # It compares every byte.
        assert hierarchy.counters.healed == damaged
        # The damaged block is replaced at its next use; then nothing is left to heal.
        _read_all(hierarchy)
        read = hierarchy.counters.bytes["source"]
        _read_all(hierarchy)
        pinned = hierarchy.pinned[reader.layout.block_of(np.arange(N))] >= 0
        assert hierarchy.counters.healed == damaged
        assert hierarchy.counters.bytes["source"] - read == reader.sizes[~pinned].sum()
        assert "checksum" in hierarchy.notes()[0]


def test_a_tier_that_cannot_be_read_degrades_to_the_source(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(MemoryReader()) as hierarchy:
        _read_all(hierarchy)

        def failing(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(Tier, "read", failing)
        assert set(_read_all(hierarchy)) == {"source"}
        assert hierarchy.counters.healed > 0


def test_a_block_that_vanishes_is_read_from_the_source(make: Make) -> None:
    with make(MemoryReader()) as hierarchy:
        _read_all(hierarchy)
        hierarchy.tiers[0].discard(1)
        _read_all(hierarchy)


def test_an_unreadable_sample_does_not_affect_others(make: Make) -> None:
    reader = MemoryReader()
    with make(reader) as hierarchy:
        blocks, places = reader.layout.locate(np.arange(N, dtype=np.int64))
        reader.broken = int(np.flatnonzero(hierarchy.pinned[blocks] == 0)[0])
        for sample in range(N):
            where = int(blocks[sample]), int(places[sample])
            if sample == reader.broken:
                with pytest.raises(SourceError, match=f"sample{sample} is broken"):
                    hierarchy.read(sample, *where)
            else:
                assert bytes(hierarchy.read(sample, *where)[0]) == reader.payloads[sample]


def test_a_tier_that_fills_up_degrades_to_the_source(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio.errors import TierFull

    def full(*_: object) -> None:
        raise TierFull("the disk is full")

    monkeypatch.setattr(Tier, "publish", full)
    with make(MemoryReader()) as hierarchy:
        assert set(_read_all(hierarchy)) == {"source"}
        assert len([note for note in hierarchy.notes() if "full" in note]) == 1


def test_waiting_for_a_slow_filler_ends(make: Make) -> None:
    reader = MemoryReader()
    with make(reader) as one, make(reader) as two:
        two.block_fetcher.fill_timeout_s = 0.1
        block = int(np.flatnonzero(one.pinned == 0)[0])
        assert one.tiers[0].claim(block)  # And never fills it.
        two._reads.budget_bytes = 0
        samples = reader.layout.samples_of(block)
        payload, where = two.read(int(samples[0]), block, 0)
        assert where == "source"
        assert bytes(payload) == reader.payloads[samples[0]]
        assert "slow or stopped" in two.notes()[0]
        one.tiers[0].release(block)
        assert two.block_fetcher.fill(block)


def test_blocks_come_in_the_order_of_their_first_use() -> None:
    layout = MemoryReader().layout
    order = Order(N, 9)
    wanted = np.ones(layout.blocks, np.bool_)
    wanted[3] = False
    first_use = [order.positions(layout.samples_of(block)).min() for block in range(layout.blocks)]
    got = list(blocks_in_order(layout, order, wanted))
    assert got == [int(block) for block in np.argsort(first_use) if block != 3]


def _two_jobs(reader: MemoryReader, folder: Path) -> list[Hierarchy]:
    """Make two jobs that fill the same tier, each with several requests in flight."""
    jobs = []
    for _ in range(2):
        tier = Tier(TierSpec("disk", str(folder), 1 << 30), "x", fingerprint=reader.fingerprint)
        pins = np.zeros(reader.layout.blocks, np.int8)
        jobs.append(Hierarchy(reader, [tier], pins, requests=SourceRequests(reader, 4)))
    return jobs


def test_a_first_batch_is_read_before_its_blocks_and_nothing_twice(tmp_path: Path) -> None:
    """Two jobs fill one tier; each reads its first batch ahead of the blocks."""
    reader = MemoryReader()
    jobs = _two_jobs(reader, tmp_path)
    batches = [Order(N, seed).samples(np.arange(40)) for seed in range(2)]
    fillers = []
    blocks = np.ones(reader.layout.blocks, np.bool_)

    def fill(job: Hierarchy, seed: int) -> None:
        order = Order(N, seed)
        fillers.append(
            BlockFiller(job.block_fetcher, lambda: blocks_in_order(reader.layout, order, blocks))
        )

    for seed, job in enumerate(jobs):
        job.fetcher.hurry(batches[seed], functools.partial(fill, job, seed))
    for job, batch in zip(jobs, batches, strict=True):
        for sample in batch.tolist():
            block, place = (int(part[0]) for part in reader.layout.locate(np.array([sample])))
            assert bytes(job.read(sample, block, place)[0]) == reader.payloads[sample]
    assert in_time(lambda: len(fillers) == 2)
    assert all(filler.join(60) for filler in fillers)
    # Each job may read half a percent of the samples individually.
    assert N <= reader.reads.sum() <= N + 4
    for job in jobs:
        job.close()


def test_the_work_after_a_first_batch_is_done_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """A second pass may begin, and the tiers may be closed, while that work is under way."""
    job, other = _two_jobs(MemoryReader(), tmp_path)
    begun, go = threading.Event(), threading.Event()
    events = []

    def then() -> None:
        events.append("begins")
        begun.set()
        go.wait(60)
        events.append("ends")

    job.fetcher.hurry(np.arange(40), then)
    assert begun.wait(60)
    second = threading.Thread(target=job.fetcher.hurry, args=(np.arange(40), then))
    second.start()
    second.join(0.2)
    go.set()
    second.join(60)
    assert events == ["begins", "ends"] * 2
    job.fetcher.settle()
    job.fetcher.hurry(np.arange(40), then)
    assert events == ["begins", "ends"] * 2
    job.close()
    other.close()


def test_blocks_that_were_claimed_for_a_first_batch_are_released(tmp_path: Path) -> None:
    reader = MemoryReader()
    jobs = _two_jobs(reader, tmp_path)
    read = threading.Event()
    jobs[0].fetcher.hurry(np.arange(N), lambda: read.set())
    assert read.wait(60)
    assert not jobs[1].block_fetcher.fill(0, timeout_s=0)
    jobs[0].close()
    assert jobs[1].block_fetcher.fill(0, timeout_s=0)
    jobs[1].close()


def test_a_patient_reader_does_not_give_up_with_an_impatient_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = MemoryReader()
    mine, others = _two_jobs(reader, tmp_path)
    tier = others.tiers[others.pinned[0]]
    assert tier.claim(0)
    fill_or_wait = BlockFetcher._fill_or_wait
    trying, released = threading.Event(), threading.Event()

    def slowly(arrivals: BlockFetcher, block: int, there: int, timeout_s: float | None) -> bool:
        filled = fill_or_wait(arrivals, block, there, timeout_s)
        if timeout_s == 0:
            trying.set()
            released.wait(60)
        return filled

    monkeypatch.setattr(BlockFetcher, "_fill_or_wait", slowly)
    impatient = threading.Thread(target=lambda: mine.block_fetcher.fill(0, timeout_s=0))
    impatient.start()
    assert trying.wait(60)
    brought: list[bool] = []
    patient = threading.Thread(
        target=lambda: brought.append(mine.block_fetcher.fill(0, timeout_s=60))
    )
    patient.start()
    time.sleep(0.05)
    tier.release(0)
    released.set()
    for thread in (impatient, patient):
        thread.join(60)
    assert brought == [True]
    for job in (mine, others):
        job.close()

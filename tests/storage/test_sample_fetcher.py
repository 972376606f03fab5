"""Samples that are gathered: each is read once by a node, and completes its block."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.flow import Flow
from dlio.data.reader_contract import Abilities
from dlio.data.schema import IMAGE_LABEL, Buffer
from dlio.errors import SourceError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.partial_blocks import PartialBlocks
from dlio.storage.sample_fetcher import BackgroundLimit, SampleFiller
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from tests.conftest import in_time, is_running

N = 120
EACH = 10


class Waiting:
    """A source of single objects that counts its requests, and can be held up."""

    format = "memory"
    objects = True
    random_access = False
    path = "memory"
    schema = IMAGE_LABEL
    classes: Sequence[str] = ("a",)
    fingerprint = "cd" * 16

    def __init__(self, requests: int = 8) -> None:
        self.payloads = [
            IMAGE_LABEL.join({"image": bytes([k]) * (k % 37), "label": k}) for k in range(N)
        ]
        self.labels = np.zeros(N, np.int64)
        self.sizes = np.full(N, 30, np.int64)
        starts = np.arange(0, N + 1, EACH, dtype=np.int64)
        self.layout = Layout(starts, Order(N, 1, shuffled=True))
        self.flow = Flow(requests)
        self.reads = np.zeros(N, np.int64)
        self.asked: list[list[int]] = []
        self.broken: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    @property
    def abilities(self) -> Abilities:
        return Abilities(flow=self.flow, sizes_are_estimates=True, random_access=self.random_access)

    def __len__(self) -> int:
        return N

    def name(self, sample: int) -> str:
        return f"sample{sample}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        with self._lock:
            self.reads[samples] += 1
            self.asked.append(samples.tolist())
        assert self.gate.wait(60)
        if self.broken.intersection(samples.tolist()):
            raise SourceError(f"sample {samples.tolist()} is broken")
        return [self.payloads[sample] for sample in samples]

    def close(self) -> None:
        pass


Make = Callable[..., Hierarchy]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Hierarchy] = []

    def hierarchy(reader: Waiting, capacity: int = 1 << 20) -> Hierarchy:
        tier = Tier(TierSpec("disk", str(tmp_path), capacity), "d", "n")
        pinned = np.where(np.arange(reader.layout.blocks) == 3, -1, 0).astype(np.int8)
        made.append(Hierarchy(reader, [tier], pinned))
        return made[-1]

    yield hierarchy
    for each in made:
        each.close()


def _take(hierarchy: Hierarchy, sample: int) -> str:
    reader = hierarchy.reader
    assert isinstance(reader, Waiting)
    block, place = reader.layout.locate(np.array([sample]))
    payload, kind = hierarchy.read(sample, int(block[0]), int(place[0]))
    assert bytes(payload) == reader.payloads[sample]
    return kind


def _pinned(hierarchy: Hierarchy) -> list[int]:
    blocks = hierarchy.reader.layout.block_of(np.arange(N))
    samples: list[int] = np.flatnonzero(blocks != 3).tolist()
    return samples


def test_samples_complete_their_blocks_as_they_go_by(make: Make) -> None:
    reader = Waiting()
    hierarchy = make(reader)
    hierarchy.fetcher.expect(np.arange(N)[::-1])
    assert [_take(hierarchy, sample) for sample in range(N)] == ["source"] * N
    assert hierarchy.sample_fetcher is not None
    hierarchy.sample_fetcher.drain(threading.Event())
    assert hierarchy.missing() == 0
    assert {_take(hierarchy, sample) for sample in _pinned(hierarchy)} == {"disk"}
    assert reader.reads[_pinned(hierarchy)].tolist() == [1] * (N - EACH)
    (tier,) = hierarchy.tiers
    assert not [name for name in os.listdir(tier.path) if name.endswith(".part")]
    for block in range(reader.layout.blocks):
        if block != 3:
            assert len(tier.check(block)) == EACH


def test_a_sample_is_handed_over_before_its_tier_has_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, written = Waiting(), threading.Event()
    hierarchy = make(reader)
    add = PartialBlocks.add

    def slow(self: PartialBlocks, block: int, samples: Mapping[int, Buffer]) -> bool:
        assert written.wait(60)
        return add(self, block, samples)

    monkeypatch.setattr(PartialBlocks, "add", slow)
    sample = _pinned(hierarchy)[5]
    assert _take(hierarchy, sample) == "source"
    assert hierarchy.missing() > 0
    assert _take(hierarchy, sample) == "source"  # The same one: it is not read again.
    written.set()
    assert hierarchy.sample_fetcher is not None
    hierarchy.sample_fetcher.drain(threading.Event())
    assert _take(hierarchy, sample) == "disk"
    assert reader.reads[sample] == 1


def test_records_of_a_container_that_follow_one_another_take_one_request(make: Make) -> None:
    reader = Waiting(requests=1)
    reader.objects, reader.random_access = False, True
    reader.layout = Layout(reader.layout.starts, Order(N, 0, shuffled=False))
    reader.gate.clear()  # The first request waits, until all samples are queued behind it.
    hierarchy = make(reader)
    pinned = _pinned(hierarchy)
    reader.asked.clear()
    hierarchy.fetcher.expect(np.array(pinned))
    reader.gate.set()
    assert {_take(hierarchy, sample) for sample in pinned} <= {"source", "disk"}
    assert (reader.reads[pinned] == 1).all()
    whole = [each for each in reader.asked if len(each) == EACH]
    assert len(whole) >= len(pinned) // EACH - 1
    assert all(np.diff(each).tolist() == [1] * (len(each) - 1) for each in reader.asked)
    assert len({each[0] // EACH for each in whole}) == len(whole)  # No run leaves its block.


def test_samples_that_are_files_are_asked_for_one_by_one(make: Make) -> None:
    reader = Waiting(requests=1)
    hierarchy = make(reader)
    hierarchy.fetcher.expect(np.array(_pinned(hierarchy)))
    assert {_take(hierarchy, sample) for sample in _pinned(hierarchy)} <= {"source", "disk"}
    assert all(len(each) == 1 for each in reader.asked)


def test_processes_of_a_node_read_each_sample_once_between_them(make: Make) -> None:
    one, two = Waiting(), Waiting()
    hierarchies = [make(one), make(two)]
    order = Order(N, 5)
    everything = np.arange(one.layout.blocks) != 3
    for hierarchy in hierarchies:
        hierarchy.fetcher.expect(np.arange(N))
    fillers = []
    for hierarchy in hierarchies:
        assert hierarchy.sample_fetcher is not None
        fillers.append(SampleFiller(hierarchy.sample_fetcher, hierarchy.reader, order, everything))
    for hierarchy in hierarchies:
        for sample in range(N):
            _take(hierarchy, sample)
    assert all(filler.join(60) for filler in fillers)
    assert (one.reads + two.reads)[_pinned(hierarchies[0])].tolist() == [1] * (N - EACH)
    assert hierarchies[0].missing() == hierarchies[1].missing() == 0


def test_what_an_earlier_process_has_read_is_not_read_again(make: Make) -> None:
    before = Waiting()
    first = make(before)
    for sample in range(0, N, 3):
        _take(first, sample)
    first.close()
    after = Waiting()
    second = make(after)
    for sample in range(N):
        _take(second, sample)
    assert (before.reads + after.reads)[_pinned(second)].tolist() == [1] * (N - EACH)


@pytest.mark.parametrize("harm", ["torn", "altered", "altered head", "foreign"])
def test_harmed_pieces_are_read_again_and_never_handed_out(make: Make, harm: str) -> None:
    before = Waiting()
    first = make(before)
    for sample in range(0, N, 2):
        _take(first, sample)
    folder = first.tiers[0].path
    first.close()
    parts = [name for name in os.listdir(folder) if name.endswith(".part")]
    assert parts
    for name in parts:
        path = os.path.join(folder, name)
        with open(path, "r+b") as file:
            content = bytearray(file.read())
            if harm == "torn":
                content += content[:20]
            elif harm.startswith("altered"):
                content[45 if "head" in harm else -9] ^= 1
            else:
                content = bytearray(os.urandom(3000))
            file.seek(0)
            file.truncate()
            file.write(content)
    second = make(Waiting())
    for _ in range(2):
        for sample in range(N):
            _take(second, sample)
    assert second.sample_fetcher is not None
    filler = SampleFiller(
        second.sample_fetcher,
        second.reader,
        Order(N, 0),
        np.arange(second.reader.layout.blocks) != 3,
    )
    assert filler.join(60)
    assert second.missing() == 0


def test_a_sample_that_cannot_be_read_is_an_error_for_whoever_needs_it_alone(make: Make) -> None:
    reader = Waiting()
    hierarchy = make(reader)
    bad = _pinned(hierarchy)[17]
    reader.broken = {bad}
    assert hierarchy.sample_fetcher is not None
    mask = np.arange(reader.layout.blocks) != 3
    assert SampleFiller(hierarchy.sample_fetcher, reader, Order(N, 0), mask).join(60)
    for _ in range(2):
        with pytest.raises(SourceError, match="is broken"):
            _take(hierarchy, bad)
    others = [sample for sample in _pinned(hierarchy) if sample != bad]
    assert {_take(hierarchy, sample) for sample in others} == {"disk"}
    assert reader.reads[others].tolist() == [1] * len(others)
    assert hierarchy.missing() == 1


def test_samples_that_are_needed_go_before_those_that_fill(make: Make) -> None:
    reader = Waiting(requests=1)
    reader.gate.clear()
    hierarchy = make(reader)
    assert hierarchy.sample_fetcher is not None
    order = Order(N, 0, shuffled=False)
    filler = SampleFiller(hierarchy.sample_fetcher, reader, order, np.ones(N // EACH, np.bool_))
    wanted = _pinned(hierarchy)[-1]
    taken = threading.Thread(target=_take, args=(hierarchy, wanted))
    hierarchy.fetcher.expect(np.array([wanted]))
    taken.start()
    reader.gate.set()
    taken.join(60)
    assert not taken.is_alive()
    filler.close()


def test_a_tier_that_is_full_leaves_the_rest_to_the_source(make: Make) -> None:
    reader = Waiting()
    hierarchy = make(reader, capacity=2000)
    for _ in range(2):
        for sample in range(N):
            _take(hierarchy, sample)
    assert 0 < hierarchy.missing() < reader.layout.blocks
    assert any("no room" in note for note in hierarchy.notes())


def test_closing_ends_those_who_wait_for_a_source_that_hangs(make: Make) -> None:
    reader = Waiting()
    reader.gate.clear()
    hierarchy = make(reader)
    errors: list[Exception] = []

    def take() -> None:
        try:
            _take(hierarchy, 5)
        except SourceError as error:
            errors.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    while not reader.reads.any():
        waiting.join(0.01)
    assert hierarchy.sample_fetcher is not None
    hierarchy.sample_fetcher.stop()
    waiting.join(60)
    reader.gate.set()
    assert "closed" in str(errors[0])


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    reader = Waiting()
    with Tier(TierSpec("disk", str(tmp_path), 1 << 20), "d", "n") as tier:
        one, two = PartialBlocks(tier, reader), PartialBlocks(tier, reader)
        assert one.claim([7]) == [7]
        assert two.claim([6, 7, 8]) == [6, 8]
        one.close()
        assert two.claim([7]) == [7]
        two.close()


def test_few_requests_are_in_flight_while_enough_samples_are_ready(make: Make) -> None:
    reader = Waiting(requests=8)
    reader.flow.raise_to(8)
    reader.gate.clear()
    hierarchy = make(reader)
    hierarchy.fetcher.pace(0)
    hierarchy.fetcher.expect(np.array(_pinned(hierarchy)))
    assert in_time(lambda: len(reader.asked) >= 2)
    assert not in_time(lambda: len(reader.asked) > 2, 0.3)
    hierarchy.fetcher.pace(5)  # Five are lacking: none is ready.
    assert in_time(lambda: len(reader.asked) >= 8)
    reader.gate.set()
    assert {_take(hierarchy, sample) for sample in _pinned(hierarchy)} <= {"source", "disk"}
    assert (reader.reads[_pinned(hierarchy)] == 1).all()


def test_few_samples_are_read_ahead_of_need_as_long_as_others_are_taken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches of a pass may have been announced long before they are taken."""
    now = 0.0
    monkeypatch.setattr(
        "dlio.storage.sample_fetcher.BackgroundLimit", lambda: BackgroundLimit(lambda: now)
    )
    reader = Waiting(requests=8)
    reader.flow.raise_to(8)
    hierarchy = make(reader)
    mine, others = _pinned(hierarchy)[:3], _pinned(hierarchy)[3:]
    hierarchy.fetcher.expect(np.array(mine))
    _take(hierarchy, mine[0])
    assert in_time(lambda: len(reader.asked) == len(mine))
    now = 60.0
    _take(hierarchy, mine[1])
    reader.gate.clear()
    gather = hierarchy.sample_fetcher
    assert gather is not None
    blocks, places = reader.layout.locate(np.array(others[:8]))
    for sample, block, place in zip(others[:8], blocks.tolist(), places.tolist(), strict=True):
        gather.offer(sample, block, place, threading.Event())
    assert in_time(lambda: len(reader.asked) == len(mine) + 2)
    assert not in_time(lambda: len(reader.asked) > len(mine) + 2, 0.3)
    reader.gate.set()


def test_a_forked_child_does_not_wait_for_a_lock_of_its_parent(make: Make) -> None:
    hierarchy = make(Waiting())
    assert hierarchy.sample_fetcher is not None
    with hierarchy.sample_fetcher._lock:  # As a thread holds it at the moment of the fork.
        child = os.fork()
        if child == 0:
            hierarchy.fetcher.pace(0)
            hierarchy.fetcher.expect(np.arange(N))
            os._exit(0)
    ended = in_time(lambda: not is_running(child))
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ended

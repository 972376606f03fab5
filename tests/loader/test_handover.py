"""Batches are copied ahead, and memory is used again only after the copies from it are complete."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.delivery import handed_over
from dlio.storage.device_tier import DeviceCopies
from dlio.util.buffer_pool import BufferPool
from tests.loader.recorded_streams import RecordedStreams

_BATCHES = 12


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name == "dlio-device"] == []


def _feed(batches: Iterator[Any]) -> BatchStream:
    yield None
    for data in batches:
        yield BatchResult(data, 4)


def _handed(streams: RecordedStreams, batches: Iterator[Any]) -> BatchStream:
    inner = _feed(batches)
    next(inner)
    feed = handed_over(inner, streams)
    next(feed)
    return feed


def _batches(count: int = _BATCHES) -> Iterator[Any]:
    for number in range(count):
        images = torch.full((4, 8, 8, 3), number, dtype=torch.uint8).movedim(-1, 1)
        yield images, {"labels": torch.full((4,), number), "name": f"batch {number}"}


def test_a_batch_is_copied_then_awaited_by_its_users_stream_then_kept_for_it() -> None:
    streams = RecordedStreams()
    handed: list[set[int]] = []
    for fed in _handed(streams, _batches()):
        assert fed is not None
        images, rest = fed.data
        number = len(handed)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, torch.full((4, 3, 8, 8), number, dtype=torch.uint8))
        assert rest["labels"].tolist() == [number] * 4
        assert rest["name"] == f"batch {number}"
        handed.append({images.data_ptr(), rest["labels"].data_ptr()})
        at = streams.log.index(("wait", number))
        kept = [call for call in streams.log[at:] if call[0] == "keep"]
        assert {address for _, address in kept} == handed[-1]
    recorded = [k for k, call in enumerate(streams.log) if call[0] == "record"]
    copied = [k for k, call in enumerate(streams.log) if call[0] == "copy"]
    assert len(recorded) == _BATCHES
    for number, (before, at) in enumerate(pairwise([-1, *recorded])):
        assert len([k for k in copied if before < k < at]) == 2
        assert streams.log.index(("wait", number)) > at


def test_page_locked_memory_is_used_again_only_after_the_event_of_its_copies() -> None:
    streams = RecordedStreams()
    for _ in range(3):
        inner = _feed(_batches())
        next(inner)
        feed = handed_over(inner, streams)
        next(feed)
        values = [int(fed.data[0].unique()) for fed in feed if fed is not None]
        assert values == list(range(_BATCHES))
    # Of two under way and the one that is being copied, images and labels each.
    assert streams.allocated == streams.pool.statistics().allocated <= 6
    assert streams.pool.statistics().out == 0
    last: dict[int, int] = {}
    passed = set()
    event = 0
    for call, value in streams.log:
        if call == "copy":
            assert last.get(value, event) == event or last[value] in passed
            last[value] = event
        elif call == "record":
            event += 1
        elif call == "passed":
            passed.add(value)


def test_batches_made_in_page_locked_memory_are_not_copied_on_the_host() -> None:
    streams = RecordedStreams(pinned=True)
    pool = BufferPool(64, allocate=streams.pinned)

    def batches() -> Iterator[Any]:
        for number in range(_BATCHES):
            array = pool.lend(4 * 16)
            array[:] = number
            yield torch.from_numpy(array).view(4, 16)

    for _ in range(3):
        inner = _feed(batches())
        next(inner)
        feed = handed_over(inner, streams)
        next(feed)
        values = [int(fed.data.unique()) for fed in feed if fed is not None]
        assert values == list(range(_BATCHES))
    assert streams.pool.statistics().allocated == 0
    assert streams.allocated == pool.statistics().allocated <= 4
    assert pool.statistics().out == 0


def test_tensors_of_every_layout_arrive_as_they_are() -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    given = [
        base,
        base.T if base.ndim == 2 else base.permute(2, 0, 1),
        base[:, ::2],
        base[:1].expand(3, 4, 5),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        base.to(torch.bfloat16).requires_grad_(),
        base.to_sparse(),
    ]
    (fed,) = _handed(RecordedStreams(), iter([list(given)]))
    assert fed is not None
    for sent, got in zip(given, fed.data, strict=True):
        assert sent.dtype == got.dtype
        assert torch.equal(sent.to_dense(), got.to_dense())


class _Movable:
    def __init__(self) -> None:
        self.moved_by = 0

    def to(self, device: torch.device) -> "_Movable":
        self.moved_by = threading.get_ident()
        return self


class _Made:
    def made_on_device(self, copies: DeviceCopies) -> torch.Tensor:
        self.made_by = threading.get_ident()
        return copies.to_device(torch.tensor([5]))


def test_parts_are_made_on_the_copy_stream_and_users_objects_moved_on_their_own() -> None:
    mine, made = _Movable(), _Made()
    (fed,) = _handed(RecordedStreams(), iter([(mine, made)]))
    assert fed is not None
    assert fed.data[0] is mine
    assert mine.moved_by == threading.get_ident()
    assert made.made_by != threading.get_ident()
    assert fed.data[1].tolist() == [5]


def test_errors_come_in_their_place_and_end_the_pass() -> None:
    def broken() -> Iterator[Any]:
        yield from _batches(3)
        raise OSError("the disk is gone")

    feed = _handed(RecordedStreams(), broken())
    assert [next(feed) is None for _ in range(3)] == [False] * 3
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed)

    def failed() -> BatchStream:
        yield None
        yield BatchResult(torch.ones(2), 2)
        yield BatchResult(None, 2, error=ValueError("sample 7"))
        yield BatchResult(torch.ones(2), 2)

    inner = failed()
    next(inner)
    streams = RecordedStreams()
    handed = handed_over(inner, streams)
    next(handed)
    errors = [fed.error for fed in handed if fed is not None]
    assert [type(error) for error in errors] == [type(None), ValueError, type(None)]
    assert len([call for call in streams.log if call[0] == "wait"]) == 2


def test_a_pass_that_is_left_ends_its_thread_and_its_feed_and_gives_all_memory_back() -> None:
    closed = threading.Event()

    def endless() -> Iterator[Any]:
        try:
            while True:
                yield from _batches()
        finally:
            closed.set()

    streams = RecordedStreams()
    inner = _feed(endless())
    next(inner)
    feed = handed_over(inner, streams)
    next(feed)
    next(feed)
    feed.close()
    assert closed.is_set()
    assert streams.pool.statistics().out == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("handover") / "pictures"
    draw_once(root, images=60, validation=3, classes=3)
    return root / "train"


@pytest.mark.parametrize("workers", [None, "process"])
@pytest.mark.daily("process")
def test_a_loader_hands_over_the_same_batches_and_takes_no_more_memory_each_epoch(
    folder: Path, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = RecordedStreams()
    monkeypatch.setattr("dlio.loader.delivery.streams_of", lambda device: streams)

    def epochs(device: str | None) -> tuple[list[tuple[bytes, list[int]]], list[int]]:
        batches, allocated = [], []
        with (
            dlio.open(folder, image_size=32, tiers="ram:64MiB", seed=0) as data,
            dlio.DataLoader(data, 8, shuffle=True, device=device, workers=workers) as loader,
        ):
            for _ in range(3):
                for images, labels in loader:
                    batches.append((np.ascontiguousarray(images).tobytes(), labels.tolist()))
                allocated.append(streams.allocated)
        return batches, allocated

    plain, _ = epochs(None)
    handed, allocated = epochs("cpu")
    assert handed == plain
    # Images and labels of two batches under way, of the one that is being copied, and of the last
    # one of an epoch, which is smaller.
    assert 0 < allocated[0] <= allocated[-1] <= 8
    assert len([call for call in streams.log if call[0] == "wait"]) == len(plain)

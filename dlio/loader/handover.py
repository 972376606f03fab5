"""The hand-over of host batches to a device, ahead of their use.

One thread per pass takes batches from the feed, starts their copies on a stream of its own, and
queues them with an event. The consumer's stream waits for the event; the host waits for nothing.

    feed -> page-locked memory -> copy stream: copy, event -> queue -> consumer's stream: wait

Host memory: a batch is made in page-locked memory where its maker can (`BatchMemory`); other
tensors go through a pool of staging buffers. Either is kept until the event after its copy has
passed, and used again then. Device memory: torch's allocator gives a freed block to the next copy
unless the block's users are known, so each tensor is recorded for the consumer's stream.

The thread waits in three places, each without the interpreter's lock: for the feed, for room in the
queue, and for the event of a copy when `_UNDER_WAY` of them have not passed.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Protocol, Self, runtime_checkable

import torch

from dlio.comm.funnel import waiting
from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.contract import BatchData
from dlio.loader.nested_batches import map_leaves, tensors_in
from dlio.loader.streams import DeviceStreams
from dlio.storage.device_tier import CopyEvent, DeviceCopies
from dlio.util.buffer_pool import BufferLease, BufferPool
from dlio.util.threads import Workers

_AHEAD: Final = 2
"""Largest number of batches that wait on the device."""
_UNDER_WAY: Final = 2
"""Largest number of batches whose host memory waits for its copy."""
_MOST_SPARE: Final = 64
_LOOK_S: Final = 60.0
_JOIN_TIMEOUT_S: Final = 10.0


@runtime_checkable
class DeviceBatchPart(Protocol):
    """A part of a batch that is computed on the device, from host memory and the device's own."""

    def made_on_device(self, copies: DeviceCopies) -> BatchData:
        """Return the part. Called once, by the thread that copies, with the copy stream current.

        Args:
            copies: keeps host memory that it is given until the copy is complete.
        """


@dataclass(slots=True)
class _CopiedBatch:
    fed: BatchResult
    event: CopyEvent | None
    """Completes with the copy; None for an error, which has nothing to copy."""


class StagingBuffers:
    """Streams of a device and page-locked memory for copies to it. Owner: the loader."""

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self.pool = BufferPool(_MOST_SPARE, allocate=streams.pinned)


class _StagedCopies:
    """Copies of one batch, and the host memory that they are made from."""

    def __init__(self, staging: StagingBuffers) -> None:
        self._streams, self._pool = staging.streams, staging.pool
        self._tensors: list[torch.Tensor] = []
        self._leases: list[BufferLease] = []
        self.event: CopyEvent | None = None
        """Completes with all of them, once they have begun."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._streams.to_device(self._page_locked(tensor))

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        self._streams.into(target, self._page_locked(tensor))

    def record(self) -> CopyEvent:
        return self._streams.record()

    def wait(self, event: CopyEvent) -> None:
        self._streams.wait(event)

    def release(self) -> None:
        """Let the host memory be used again."""
        self._tensors.clear()
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    def _page_locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy in page-locked memory, which is kept until `release`."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return tensor
        if not self._streams.is_pinned(tensor):
            lease = self._pool.take(tensor.nbytes)
            self._leases.append(lease)
            shape = torch.empty_like(tensor, device="meta")  # Dense, and in the same order.
            memory = torch.from_numpy(lease.array).view(tensor.dtype)
            staged = memory.as_strided(shape.size(), shape.stride())
            return staged.copy_(tensor.detach())
        self._tensors.append(tensor)
        return tensor


def handed_over(feed: BatchStream, staging: StagingBuffers) -> BatchStream:
    """Yield the batches of `feed` on a device, copied ahead of their use."""
    streams = staging.streams
    with _Copier(feed, staging) as copier:
        yield None
        while (copied := copier.take()) is not None:
            fed = copied.fed
            if copied.event is not None:
                streams.wait(copied.event)
                for tensor in filter(_is_plain, tensors_in(fed.data)):
                    streams.keep(tensor)
                fed.data = map_leaves(lambda leaf: _moved_rest(leaf, streams), fed.data)
            del copied
            yield fed
            del fed


def _is_plain(leaf: BatchData) -> bool:
    """True for a tensor in one piece of memory, which the copy stream fills."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _moved_rest(leaf: BatchData, streams: DeviceStreams) -> BatchData:
    """Move other tensors, and objects with a `to` of their own, on their user's stream: the memory
    that they consist of is not known."""
    if _is_plain(leaf):
        return leaf
    to: Callable[[torch.device], BatchData] | None = getattr(leaf, "to", None)
    return to(streams.device) if callable(to) else leaf


class _Copier:
    """The thread that copies. Owner: the feed that it makes."""

    def __init__(self, feed: BatchStream, staging: StagingBuffers) -> None:
        self._feed, self._staging = feed, staging
        self._ready: SimpleQueue[_CopiedBatch | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._taken: list[_CopiedBatch | BaseException | None] = []
        self._under_way: deque[_StagedCopies] = deque()
        self._workers = Workers(
            "dlio-device", self._run, wake=self._room.release, stop_timeout_s=_JOIN_TIMEOUT_S
        )
        self._workers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def take(self) -> _CopiedBatch | None:
        """Return the next batch; None after the last. Raises the error that ended the thread."""
        while not waiting(self._has_taken, _LOOK_S):
            if not self._workers.alive() and self._ready.empty():
                return None
        item = self._taken.pop()
        self._room.release()
        if isinstance(item, BaseException):
            raise item
        return item

    def _has_taken(self, timeout_s: float) -> bool:
        try:
            self._taken.append(self._ready.get(timeout=timeout_s))
        except Empty:
            return False
        return True

    def _run(self, _: int) -> None:
        last: BaseException | None = None
        try:
            with self._staging.streams.copying():
                for fed in self._feed:
                    assert fed is not None
                    self._room.acquire()
                    if self._workers.stopping.is_set():
                        break
                    event = None if fed.error is not None else self._copy(fed)
                    self._ready.put(_CopiedBatch(fed, event))
                    del fed
        except BaseException as error:
            last = error
        try:
            self._feed.close()
            self._release(most=0)
        except BaseException as error:
            last = last or error
        finally:
            self._ready.put(last)

    def _copy(self, fed: BatchResult) -> CopyEvent:
        """Start the copies of a batch; return the event after them."""
        copies = _StagedCopies(self._staging)
        self._under_way.append(copies)

        def on_device(leaf: BatchData) -> BatchData:
            if _is_plain(leaf):
                return copies.to_device(leaf)
            return leaf.made_on_device(copies) if isinstance(leaf, DeviceBatchPart) else leaf

        try:
            fed.data = map_leaves(on_device, fed.data)
        finally:
            copies.event = copies.record()
        self._release(most=_UNDER_WAY)
        return copies.event

    def _release(self, most: int) -> None:
        """Release the host memory of complete copies; wait for the oldest beyond `most`."""
        while self._under_way:
            oldest = self._under_way[0]
            if oldest.event is not None and not oldest.event.query():
                if len(self._under_way) <= most:
                    return
                oldest.event.synchronize()
            oldest.release()
            self._under_way.popleft()

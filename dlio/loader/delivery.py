"""The delivery of batches to a device, ahead of their use, and their transforms there.

On CUDA one thread per pass takes batches from the feed, starts their copies on a stream of its own,
and queues them with an event. The consumer's stream waits for the event; the host for nothing. On
other devices a batch is copied when it is handed out.

    feed -> page-locked memory -> copy stream: copy, event -> queue -> consumer's stream: wait

Host memory: a batch is made in page-locked memory where its builder can (`BatchMemory`); other
tensors go through a pool of staging buffers. Either is kept until the event after its copy has
passed, and used again then. Device memory: torch's allocator gives a freed block to the next copy
unless the block's users are known, so each tensor is recorded for the consumer's stream.

The thread waits in three places, each without the interpreter's lock: for the feed, for room in the
queue, and for the event of a copy when `_UNDER_WAY` of them have not passed.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm.funnel import wait_serving
from dlio.image.fusion import BatchTransform
from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.contract import BatchData
from dlio.loader.nested_batches import map_leaves, tensors_in
from dlio.storage.device_tier import CopyEvent, DeviceCopies
from dlio.util.buffer_pool import BufferPool
from dlio.util.threads import Workers

_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams and events.
_AHEAD: Final = 2
"""Largest number of batches that wait on the device."""
_UNDER_WAY: Final = 2
"""Largest number of batches whose host memory waits for its copy."""
_MOST_SPARE: Final = 64
_LOOK_S: Final = 60.0
_JOIN_TIMEOUT_S: Final = 10.0


# Streams and memory of a device. The interface is this small so that tests can put a recorder in
# its place, which checks the order of calls; everything in the hand-over that needs a GPU is in
# `CudaStreams`.


class HostMemoryKind(Enum):
    """Memory of batches on the host."""

    NO = "no"
    """Ordinary memory."""
    BY_TORCH = "by torch"
    """Page-locked, by torch's caching allocator, which knows of the copies that users make and
    gives the memory of a freed batch away only when they are complete."""
    IN_POOL = "in pool"
    """Page-locked, used again as soon as nothing refers to the batch: the hand-over, which alone
    copies it, refers to it until its copy is complete."""


class CudaStreams:
    """One stream of a CUDA device for copies, with page-locked memory for them, and the streams of
    those who use the copies. Thread-safe. Owner: a loader, for all its passes.

    torch's allocator keeps freed memory by stream: a new stream for each pass would keep that of
    the passes before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One for all passes: torch hands out 32 in turn, and its allocator keeps memory by stream.
        self._stream: Any = _cuda.Stream(device)
        self.pool = BufferPool(_MOST_SPARE, allocate=pinned_memory)

    def copying(self) -> AbstractContextManager[object]:
        """Make the copy stream the calling thread's current stream."""
        entered: AbstractContextManager[object] = _cuda.stream(self._stream)
        return entered

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if the copy stream can read the tensor's memory while the host goes on."""
        return tensor.is_pinned()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy on the current stream; return the copy, or the tensor if it is there."""
        return tensor.to(self.device, non_blocking=True)

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start a copy into memory of the device, on the current stream."""
        target.copy_(tensor, non_blocking=True)

    def record(self) -> CopyEvent:
        """Return an event that completes with all that the copy stream has been given so far."""
        event = _cuda.Event(blocking=True)  # Waiting for it leaves the processor to others.
        event.record(self._stream)
        made: CopyEvent = event
        return made

    def wait(self, event: CopyEvent) -> None:
        """Have the calling thread's current stream wait for an event; the host goes on."""
        _cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, once it is freed, until the current stream has come so far."""
        if tensor.device == self.device:
            tensor.record_stream(_cuda.current_stream(self.device))


def pinned_memory(count: int) -> npt.NDArray[np.uint8]:
    """Allocate page-locked memory; shape (count,)."""
    memory: npt.NDArray[np.uint8] = torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def streams_of(device: torch.device) -> CudaStreams | None:
    """Return streams for copies to a device; None if copies to it are made in place."""
    return CudaStreams(device) if device.type == "cuda" else None


# Copies ahead of their use, on a stream of their own


@runtime_checkable
class DeviceBatchPart(Protocol):
    """A part of a batch that is computed on the device, from host memory and the device's own."""

    def made_on_device(self, copies: DeviceCopies) -> BatchData:
        """Return the part. Called once, by the thread that copies, with the copy stream current.
        Host memory that `copies` is given is kept until the copy is complete."""


_Copied = tuple[BatchResult, CopyEvent | None]
"""(batch, event that completes with its copy; None for an error, which has nothing to copy)."""


class _StagedCopies:
    """Copies of one batch, and the host memory that they are made from."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._tensors: list[torch.Tensor] = []
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

    def _page_locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy in page-locked memory, which is kept until `release`."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return tensor
        if not self._streams.is_pinned(tensor):
            shape = torch.empty_like(tensor, device="meta")  # Dense, and in the same order.
            memory = torch.from_numpy(self._streams.pool.lend(tensor.nbytes)).view(tensor.dtype)
            staged = memory.as_strided(shape.size(), shape.stride())
            tensor = staged.copy_(tensor.detach())
        self._tensors.append(tensor)
        return tensor


def handed_over(feed: BatchStream, streams: CudaStreams) -> BatchStream:
    """Yield the batches of `feed` on a device, copied ahead of their use."""
    with closing(_Copier(feed, streams)) as copier:
        yield None
        while (copied := copier.take()) is not None:
            fed, event = copied
            if event is not None:
                streams.wait(event)
                # Or torch would give a freed batch to the next copy while kernels still read it.
                for tensor in filter(_is_plain, tensors_in(fed.data)):
                    streams.keep(tensor)
                fed.data = map_leaves(lambda leaf: _moved_rest(leaf, streams), fed.data)
            del copied, event
            yield fed
            del fed


def _is_plain(leaf: BatchData) -> bool:
    """True for a tensor in one piece of memory, which the copy stream fills."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _moved_rest(leaf: BatchData, streams: CudaStreams) -> BatchData:
    """Move other tensors, and objects with a `to` of their own, on their user's stream: the memory
    that they consist of is not known."""
    if _is_plain(leaf):
        return leaf
    to: Callable[[torch.device], BatchData] | None = getattr(leaf, "to", None)
    return to(streams.device) if callable(to) else leaf


class _Copier:
    """The thread that copies. Owner: the feed that it makes."""

    def __init__(self, feed: BatchStream, streams: CudaStreams) -> None:
        self._feed, self._streams = feed, streams
        self._ready: SimpleQueue[_Copied | BaseException | None] = SimpleQueue()
        # Device memory is short: a batch that waits there is one that the model cannot use.
        self._room = threading.Semaphore(_AHEAD)
        self._taken: list[_Copied | BaseException | None] = []
        self._under_way: deque[_StagedCopies] = deque()
        self._workers = Workers(
            "dlio-device", self._run, wake=self._room.release, stop_timeout_s=_JOIN_TIMEOUT_S
        )
        self._workers.start()

    def close(self) -> None:
        self._workers.close()

    def take(self) -> _Copied | None:
        """Return the next batch; None after the last. Raises the error that ended the thread."""
        while not wait_serving(self._has_taken, _LOOK_S):
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
            with self._streams.copying():
                for fed in self._feed:
                    assert fed is not None
                    self._room.acquire()
                    if self._workers.stopping.is_set():
                        break
                    event = None if fed.error is not None else self._copy(fed)
                    self._ready.put((fed, event))
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
        copies = _StagedCopies(self._streams)
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


# Batches on any device, transformed there


class DeviceDelivery:
    """Brings batches to a device. Owner: the loader, which uses it for all passes: page-locked
    memory and the copy stream are made once."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, CudaStreams | None] = {}
        """By device; None for one whose copies are made in place."""

    def __call__(
        self,
        feed: BatchStream,
        device: torch.device | str | int | None,
        transform: BatchTransform | None,
    ) -> BatchStream:
        """Return the batches of `feed` on a device, transformed there; None for either leaves them
        as they are.

        On CUDA a thread copies them on a stream of its own, ahead of their use. On other devices
        they are copied when they are handed out.
        """
        if device is not None:
            target = target_of(device)
            if target not in self.streams:
                self.streams[target] = streams_of(target)
            streams = self.streams[target]
            if streams is None:
                feed = _changed(feed, lambda fed: moved(fed.data, target))
            else:
                feed = handed_over(feed, streams)
            next(feed)
        if transform is not None:
            feed = _changed(feed, partial(_transformed, transform))
            next(feed)
        return feed


def target_of(device: torch.device | str | int) -> torch.device:
    """Return a device with its number: the current one for "cuda"."""
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    return target


def _changed(feed: BatchStream, change: Callable[[BatchResult], BatchData]) -> BatchStream:
    yield None
    for fed in feed:
        assert fed is not None
        if fed.error is None:
            fed.data = change(fed)
        yield fed
        del fed


def _transformed(transform: BatchTransform, fed: BatchResult) -> BatchData:
    """Return (images, labels) or {"image": images}, transformed."""
    samples = fed.numbers()
    if isinstance(fed.data, dict):
        return {
            name: transform(images, None, fed.epoch, samples)[0]
            for name, images in fed.data.items()
        }
    images, labels, *pairs = fed.data  # Of samples that are mixed, also their partners.
    return transform(images, labels, fed.epoch, samples, *pairs)


def moved(data: BatchData, device: torch.device) -> BatchData:
    """Return a batch of any structure with its tensors on a device."""
    copies = _SynchronousCopies(device)

    def move(leaf: BatchData) -> BatchData:
        if isinstance(leaf, torch.Tensor):
            return copies.to_device(leaf)
        if isinstance(leaf, DeviceBatchPart):
            return leaf.made_on_device(copies)
        to: Callable[[torch.device], BatchData] | None = getattr(leaf, "to", None)
        return to(device) if callable(to) else leaf

    return map_leaves(move, data)


class _SynchronousCopies:
    """Copies that are complete when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    def record(self) -> None:
        pass

    def wait(self, event: CopyEvent) -> None:
        pass

"""Streams without a GPU: calls are recorded, and copies are made as late as possible."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from dlio.loader.delivery import CudaStreams
from dlio.storage.device_tier import CopyEvent
from dlio.util.buffer_pool import BufferPool

__all__ = ["RecordedEvent", "RecordedStreams"]


class RecordedEvent:
    """An event that is passed when somebody waits for it, on the host or on a stream."""

    def __init__(self, streams: "RecordedStreams", number: int) -> None:
        self._streams, self.number = streams, number
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self._streams.log.append(("synchronize", self.number))
        self._streams.pass_until(self)


class RecordedStreams(CudaStreams):
    """Streams of the host. A copy reads its source when the event after it is passed: memory that
    is used again too early gives the wrong values.

    Args:
        pinned: all memory is page-locked.
        eager: copies are made at once, for work on the host that reads them.
    """

    device = torch.device("cpu")

    def __init__(self, pinned: bool = False, eager: bool = False) -> None:
        self._eager = eager
        self.log: list[tuple[str, int]] = []
        """(call, number of the event, or address of the memory)."""
        self.copying_threads: set[int] = set()
        self.allocated = 0
        self.pool = BufferPool(64, allocate=self.pinned)
        self._everything_is_pinned = pinned
        self._lock = threading.RLock()
        self._begun: list[tuple[torch.Tensor, torch.Tensor] | RecordedEvent] = []
        self._events = 0

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.copying_threads.add(threading.get_ident())
        try:
            yield
        finally:
            self.copying_threads.discard(threading.get_ident())

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        self.allocated += 1
        return np.zeros(count, np.uint8)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._everything_is_pinned

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        assert threading.get_ident() in self.copying_threads
        with self._lock:
            made = tensor.clone() if self._eager else torch.empty_like(tensor)
            self._begun.append((made, tensor))
            self.log.append(("copy", tensor.data_ptr()))
            return made

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        assert threading.get_ident() in self.copying_threads
        with self._lock:
            if self._eager:
                target.copy_(tensor)
            self._begun.append((target, tensor))
            self.log.append(("copy", tensor.data_ptr()))

    def record(self) -> RecordedEvent:
        assert threading.get_ident() in self.copying_threads
        with self._lock:
            event = RecordedEvent(self, self._events)
            self._events += 1
            self._begun.append(event)
            self.log.append(("record", event.number))
            return event

    def wait(self, event: CopyEvent) -> None:
        assert isinstance(event, RecordedEvent)
        copying = threading.get_ident() in self.copying_threads
        self.log.append(("copies wait" if copying else "wait", event.number))
        self.pass_until(event)

    def keep(self, tensor: torch.Tensor) -> None:
        assert threading.get_ident() not in self.copying_threads
        self.log.append(("keep", tensor.data_ptr()))

    def pass_until(self, event: RecordedEvent) -> None:
        """Do the work of the copy stream up to an event."""
        with self._lock:
            while not event.is_passed:
                work = self._begun.pop(0)
                if isinstance(work, RecordedEvent):
                    work.is_passed = True
                    self.log.append(("passed", work.number))
                else:
                    work[0].copy_(work[1])

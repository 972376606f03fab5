"""Streams of a device, as far as the hand-over of batches needs them.

The interface is this small so that tests can put a recorder in its place, which checks the order of
calls. Everything that needs a GPU in the hand-over is in `CudaStreams`.
"""

from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlio.storage.device_tier import CopyEvent

_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams and events.


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


class DeviceStreams(Protocol):
    """One stream for copies, and the streams of those who use the copies. Thread-safe."""

    @property
    def device(self) -> torch.device: ...

    def copying(self) -> AbstractContextManager[object]:
        """Make the copy stream the calling thread's current stream."""

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        """Allocate page-locked memory; shape (count,)."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if the copy stream can read the tensor's memory while the host goes on."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy on the current stream; return the copy, or the tensor if it is there."""

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start a copy into memory of the device, on the current stream."""

    def record(self) -> CopyEvent:
        """Return an event that completes with all that the copy stream has been given so far."""

    def wait(self, event: CopyEvent) -> None:
        """Have the calling thread's current stream wait for an event; the host goes on."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, once it is freed, until the current stream has come so far."""


class CudaStreams:
    """Streams of a CUDA device. Owner: a loader, for all its passes.

    torch's allocator keeps freed memory by stream: a new stream for each pass would keep that of
    the passes before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = _cuda.Stream(device)

    def copying(self) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = _cuda.stream(self._stream)
        return entered

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        return pinned_memory(count)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor, non_blocking=True)

    def record(self) -> CopyEvent:
        event = _cuda.Event(blocking=True)  # Waiting for it leaves the processor to others.
        event.record(self._stream)
        made: CopyEvent = event
        return made

    def wait(self, event: CopyEvent) -> None:
        _cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        if tensor.device == self.device:
            tensor.record_stream(_cuda.current_stream(self.device))


def pinned_memory(count: int) -> npt.NDArray[np.uint8]:
    """Allocate page-locked memory; shape (count,)."""
    memory: npt.NDArray[np.uint8] = torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def streams_of(device: torch.device) -> DeviceStreams | None:
    """Return streams for copies to a device; None if copies to it are made in place."""
    return CudaStreams(device) if device.type == "cuda" else None

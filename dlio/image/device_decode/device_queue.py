"""The order of work on a device: a CUDA stream, or on the CPU one thing after another.

Everything that a decoder's slot has done on a device goes through this interface, so that tests can
record the order without a device.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class DeviceQueue(Protocol):
    """Work that a device does in the order in which it is queued. One thread uses it at a time."""

    device: torch.device
    number: int
    """The `cudaStream_t`; 0 on the CPU."""

    def running(self) -> AbstractContextManager[object]:
        """Queue torch's work here, and allocate its memory for here."""

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a host tensor to the device."""

    def wait(self) -> None:
        """Wait until everything queued so far is done. The GIL is released."""


class HostQueue:
    """The CPU, which does everything at once."""

    device = torch.device("cpu")
    number = 0

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wait(self) -> None:
        """Nothing is under way."""


class CudaQueue:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # torch gives these constructors no types.
        self.device = device
        self._stream = cuda.Stream(device)
        # Waits in the driver, without spinning.
        self._done = cuda.Event(blocking=True)
        self.number = int(self._stream.cuda_stream)

    def running(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not page-locked: the driver has copied it to memory of its own when the call returns.
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()


def queue_for(device: torch.device) -> DeviceQueue:
    """Return a new queue of a device: "cpu" or "cuda"."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()

"""A tier of decoded images in the memory of a rank's device, above all tiers of its node.

Images lie in one flat tensor, one behind another in the order in which their batches are handed
over: the first ones of the rank's order that fit, whatever its threads did first. Nothing is ever
evicted. The tensor belongs to one process, as each rank has its own device.

Copies into the tensor and kernels that read it may be on several streams, one per loader: each use
waits on the device for the one before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import DlioError, UsageError
from dlio.util.forks import new_lock
from dlio.util.units import counted, format_bytes

_ALIGNED: Final = 16
"""Bytes between the beginnings of images are a multiple of it."""
_FIRST, _ROWS, _COLUMNS, _LABEL = range(4)


class CopyEvent(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """True once the stream has passed it."""

    def synchronize(self) -> None:
        """Wait, without the interpreter's lock, until the stream has passed it."""


class DeviceCopies(Protocol):
    """Copies to a device on the calling thread's stream."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a tensor's copy; return it."""

    def into(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start copying a tensor into memory of the device."""

    def record(self) -> CopyEvent | None:
        """Return an event that completes with the stream's work so far; None if it is complete."""

    def wait(self, event: CopyEvent) -> None:
        """Make the stream wait for an event."""


class DeviceTier:
    """Decoded images in a device's memory. Thread-safe. Owner: the mount. `note` is called once,
    with a sentence that says how much is kept when the tier is full.

    Raises UsageError if the device has less memory free.
    """

    def __init__(
        self, samples: int, capacity: int, device: torch.device, note: Callable[[str], object]
    ) -> None:
        self.capacity, self.device = capacity, device
        self.is_full = False
        """True once an image did not fit; no other is kept from then on."""
        self._note = note
        self._lock = new_lock()
        self._table = np.full((samples, 4), -1, np.int64)
        """First byte, rows, columns, label of each sample; -1 for those that are not here."""
        self._pixels: torch.Tensor | None = None
        self._used = self._images = 0
        self._last: CopyEvent | None = None
        self._is_closed = False
        self._decode_s, self._decoded = 0.0, 0
        free = free_bytes(device)
        if free is not None and capacity > free:
            raise UsageError(
                f"tier gpu:{format_bytes(capacity).replace(' ', '')}:decoded: {device} has "
                f"{format_bytes(free)} free: give it less, and leave room for the model, or end "
                "other processes on the device"
            )

    @property
    def saves_s(self) -> float:
        """Seconds of decoding that one image saves: the mean of those decoded so far."""
        return self._decode_s / max(1, self._decoded)

    def count(self, decode_s: float) -> None:
        """Note the seconds that decoding one image took."""
        with self._lock:
            self._decode_s += decode_s
            self._decoded += 1

    def find(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return (first byte, rows, columns, label) of samples; first byte -1 for those that are
        not here. Shape (n, 4)."""
        return self._table[samples]

    @contextmanager
    def turn(self, copies: DeviceCopies) -> Iterator[torch.Tensor]:
        """Use the memory, a flat uint8 tensor, on a stream: after all earlier uses, before later
        ones. Raises UsageError if the device lacks the memory, DlioError after `close`."""
        with self._lock:
            if self._is_closed:
                raise DlioError(
                    "a data set was closed while a batch of it was copied: close its loader first"
                )
            if self._last is not None:
                copies.wait(self._last)
            # At the first use, not when mounting: the model and its optimizer have got their memory
            # by then, and the error tells how much is really missing.
            if self._pixels is None:
                self._pixels = self._allocate()
            try:
                yield self._pixels
            finally:
                self._last = copies.record()

    def place(self, sample: int, rows: int, columns: int, label: int) -> int | None:
        """Keep an image that is about to be copied; call within `turn`.

        Returns its first byte, or None: it is here already, or does not fit.
        """
        size = rows * columns * 3
        if self.is_full or self._table[sample, _FIRST] >= 0:
            return None
        # Not even a smaller one later: the tier keeps the first images of the rank's order.
        if self._used + size > self.capacity:
            self.is_full = True
            self._note(
                f"{self.device} keeps {counted(self._images, 'decoded image')}, "
                f"{format_bytes(self._used)}: its tier is full"
            )
            return None
        first = self._used
        self._used += -(-size // _ALIGNED) * _ALIGNED
        self._images += 1
        self._table[sample] = first, rows, columns, label
        return first

    def close(self) -> None:
        """Free the memory once the device has done its work."""
        with self._lock:
            self.is_full = self._is_closed = True
            self._table[:, _FIRST] = -1
            if self._last is not None:
                # Freed earlier, the memory could be given out while a kernel still reads it.
                self._last.synchronize()
            self._pixels = self._last = None

    def _allocate(self) -> torch.Tensor:
        try:
            return torch.empty(self.capacity, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"tier gpu:{format_bytes(self.capacity).replace(' ', '')}:decoded: {self.device} "
                "has no room for it: give it less, and leave room for the model"
            ) from error


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device that torch can still allocate; None if that is not known."""
    if device.type != "cuda":
        return None
    # Memory that torch has reserved and not given out is free to the tier, though not to the
    # driver.
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

"""The stream of an exchange next to the training's, and the time that the training waits for it."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch

_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams and events.


class SideStream:
    """A stream of a GPU. On the CPU the training's own order does for all.

    Memory that work here allocates is used again by work here alone, which `after_current` puts
    behind all that has read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Give the body's work to this stream, after all that the current stream was given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all that this stream was given."""
        event: torch.cuda.Event | None = self._stream and self._stream.record_event()
        return event

    def join(self, mark: torch.cuda.Event | None) -> None:
        """Have later work of the current stream wait for a `mark`."""
        if self._stream is not None and mark is not None:
            _cuda.current_stream(self._device).wait_event(mark)


class StreamWaits:
    """Seconds that a device's current stream has waited, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time the waits that the body gives to the current stream; nothing on the CPU."""
        if self._device.type != "cuda":
            yield
            return
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        stream = _cuda.current_stream(self._device)
        began.record(stream)
        yield
        ended.record(stream)
        self._pairs.append((began, ended))
        self._settle()

    @property
    def seconds(self) -> float:
        """Seconds of the waits that are over: all of them, once the device is synchronised."""
        self._settle()
        return self._seconds

    def _settle(self) -> None:
        while self._pairs and self._pairs[0][1].query():
            began, ended = self._pairs.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3

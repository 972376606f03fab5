"""Batches on a GPU ahead of their use: copied from page-locked memory on a stream of their own."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import torch

from dlio.loader.feed import Fed, Feed

_AHEAD: Final = 2
"""Batches that lie on the device and wait, at most."""
_POLL_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class _Copied:
    fed: Fed
    event: Any


def device_feed(feed: Feed, device: torch.device) -> Feed:
    """`feed`, with its batches on `device`.

    On CUDA a thread takes batches and copies them on a stream of its own, ahead of their use;
    elsewhere they are copied as they are handed out.
    """
    next(feed)
    if device.type != "cuda":
        yield None
        for fed in feed:
            assert fed is not None
            fed.data = moved(fed.data, device, non_blocking=False)
            yield fed
        return
    with _Copier(feed, device) as copier:
        yield None
        while (copied := copier.take()) is not None:
            fed = copied.fed
            if copied.event is not None:
                stream = torch.cuda.current_stream(device)
                stream.wait_event(copied.event)
                _each_tensor(fed.data, partial(_recorded, stream))
            del copied
            yield fed
            del fed


def transformed_feed(feed: Feed, transform: Callable[[torch.Tensor], Any] | None) -> Feed:
    """`feed`, with a transform done to the first tensor of each batch, where it lies."""
    if transform is None:
        yield from feed
        return
    next(feed)
    yield None
    for fed in feed:
        assert fed is not None
        if fed.error is None:
            images, labels = fed.data
            fed.data = transform(images), labels
            del images
        yield fed
        del fed


def moved(data: Any, device: torch.device, non_blocking: bool) -> Any:
    """A batch of any structure with its tensors on a device."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(moved(item, device, non_blocking) for item in data))
    if isinstance(data, tuple | list):
        return type(data)(moved(item, device, non_blocking) for item in data)
    if isinstance(data, dict):
        return {key: moved(item, device, non_blocking) for key, item in data.items()}
    if hasattr(data, "to") and callable(data.to):
        return data.to(device)
    return data


class _Copier:
    """The thread that copies. Owner: the feed."""

    def __init__(self, feed: Feed, device: torch.device) -> None:
        self._feed, self._device = feed, device
        self._ready: queue.Queue[_Copied | BaseException | None] = queue.Queue(_AHEAD)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlio-device", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        while self._thread.is_alive():
            # Whatever it waits to hand over is dropped.
            try:
                self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                self._thread.join(_POLL_S)

    def take(self) -> _Copied | None:
        while True:
            try:
                item = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                if not self._thread.is_alive():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for fed in self._feed:
                assert fed is not None
                event = None
                if fed.error is None:
                    with torch.cuda.stream(stream):
                        fed.data = moved(fed.data, self._device, non_blocking=True)
                        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        event.record(stream)
                if not self._hand(_Copied(fed, event)):
                    break
                del fed
        except BaseException as error:
            last = error
        finally:
            self._feed.close()
            self._hand(last)

    def _hand(self, item: _Copied | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


def _recorded(stream: Any, tensor: torch.Tensor) -> None:
    tensor.record_stream(stream)


def _each_tensor(data: Any, act: Callable[[torch.Tensor], object]) -> None:
    if isinstance(data, torch.Tensor):
        act(data)
    elif isinstance(data, tuple | list):
        for item in data:
            _each_tensor(item, act)
    elif isinstance(data, dict):
        for item in data.values():
            _each_tensor(item, act)

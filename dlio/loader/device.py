"""Batches on a GPU ahead of their use: copied from page-locked memory on a stream of their own."""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from dlio.image.fusion import Batchwise
from dlio.loader.contract import BatchData
from dlio.loader.feed import Fed, Feed
from dlio.loader.nested import map_leaves, tensors_in
from dlio.util.threads import Workers

__all__ = ["delivered", "moved"]

_AHEAD: Final = 2
"""Largest number of batches that wait on the device."""
_POLL_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class _Copied:
    fed: Fed
    event: torch.cuda.Event | None
    """Completes with the copy; None for an error, which has nothing to copy."""


def delivered(
    feed: Feed, device: torch.device | str | int | None, transform: Batchwise | None
) -> Feed:
    """Return the batches of `feed` on a device, transformed there.

    On CUDA a thread takes batches and copies them on a stream of its own, ahead of their use. On
    other devices they are copied when they are handed out.

    Args:
        device: where they are to be; where they are for None.
        transform: None to leave them as they are.
    """
    if device is not None:
        target = torch.device(device)
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        feed = _on_device(feed, target)
        next(feed)
    if transform is not None:
        feed = _transformed(feed, transform)
        next(feed)
    return feed


def _on_device(feed: Feed, device: torch.device) -> Feed:
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
                for tensor in tensors_in(fed.data):
                    tensor.record_stream(stream)
            del copied
            yield fed
            del fed


def _transformed(feed: Feed, transform: Batchwise) -> Feed:
    yield None
    for fed in feed:
        assert fed is not None
        if fed.error is None:
            fed.data = _transformed_batch(fed, transform)
        yield fed
        del fed


def _transformed_batch(fed: Fed, transform: Batchwise) -> BatchData:
    """Return (images, labels) or {"image": images}, transformed."""
    samples = fed.numbers()
    if isinstance(fed.data, dict):
        return {
            name: transform(images, None, fed.epoch, samples)[0]
            for name, images in fed.data.items()
        }
    images, labels, *pairs = fed.data  # Of samples that are mixed, also their partners.
    return transform(images, labels, fed.epoch, samples, *pairs)


def moved(data: BatchData, device: torch.device, non_blocking: bool) -> BatchData:
    """Return a batch of any structure with its tensors on a device."""

    def move(leaf: BatchData) -> BatchData:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        to: Callable[[torch.device], BatchData] | None = getattr(leaf, "to", None)
        return to(device) if callable(to) else leaf

    return map_leaves(move, data)


class _Copier:
    """The thread that copies. Owner: the feed."""

    def __init__(self, feed: Feed, device: torch.device) -> None:
        self._feed, self._device = feed, device
        self._ready: queue.Queue[_Copied | BaseException | None] = queue.Queue(_AHEAD)
        self._workers = Workers("dlio-device", self._run, stop_timeout_s=_JOIN_TIMEOUT_S)
        self._workers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def take(self) -> _Copied | None:
        """Return the next batch; None after the last. Raises the error that ended the thread."""
        while True:
            try:
                item = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                if not self._workers.alive():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _run(self, _: int) -> None:
        last: BaseException | None = None
        try:
            torch.cuda.set_device(self._device)
            cuda: Any = torch.cuda  # torch gives these constructors no types.
            stream = cuda.Stream(self._device)
            for fed in self._feed:
                assert fed is not None
                event = None
                if fed.error is None:
                    with torch.cuda.stream(stream):
                        fed.data = moved(fed.data, self._device, non_blocking=True)
                        event = cuda.Event()
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
        """Queue an item once the queue has room; False if the loader is being closed."""
        while not self._workers.stopping.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

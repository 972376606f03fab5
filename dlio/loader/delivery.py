"""Batches on a device ahead of their use, transformed there."""

from collections.abc import Callable

import torch

from dlio.image.fusion import BatchTransform
from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.contract import BatchData
from dlio.loader.handover import DeviceBatchPart, StagingBuffers, handed_over
from dlio.loader.nested_batches import map_leaves
from dlio.loader.streams import streams_of
from dlio.storage.device_tier import CopyEvent


class DeviceDelivery:
    """Brings batches to a device. Owner: the loader, which uses it for all passes: page-locked
    memory and the copy stream are made once."""

    def __init__(self) -> None:
        self._staging: dict[torch.device, StagingBuffers | None] = {}

    def __call__(
        self,
        feed: BatchStream,
        device: torch.device | str | int | None,
        transform: BatchTransform | None,
    ) -> BatchStream:
        """Return the batches of `feed` on a device, transformed there.

        On CUDA a thread copies them on a stream of its own, ahead of their use. On other devices
        they are copied when they are handed out.

        Args:
            device: where they are to be; where they are for None.
            transform: None to leave them as they are.
        """
        if device is not None:
            target = target_of(device)
            staging = self.staging(target)
            feed = _in_place(feed, target) if staging is None else handed_over(feed, staging)
            next(feed)
        if transform is not None:
            feed = _transformed(feed, transform)
            next(feed)
        return feed

    def staging(self, device: torch.device) -> StagingBuffers | None:
        """Return the streams and the memory for copies; None if copies are made in place."""
        if device not in self._staging:
            streams = streams_of(device)
            self._staging[device] = None if streams is None else StagingBuffers(streams)
        return self._staging[device]


def target_of(device: torch.device | str | int) -> torch.device:
    """Return a device with its number: the current one for "cuda"."""
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    return target


def _in_place(feed: BatchStream, device: torch.device) -> BatchStream:
    yield None
    for fed in feed:
        assert fed is not None
        if fed.error is None:
            fed.data = moved(fed.data, device)
        yield fed
        del fed


def _transformed(feed: BatchStream, transform: BatchTransform) -> BatchStream:
    yield None
    for fed in feed:
        assert fed is not None
        if fed.error is None:
            fed.data = _transformed_batch(fed, transform)
        yield fed
        del fed


def _transformed_batch(fed: BatchResult, transform: BatchTransform) -> BatchData:
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

    def record(self) -> CopyEvent:
        return _CompletedEvent()

    def wait(self, event: CopyEvent) -> None:
        pass


class _CompletedEvent:
    """An event of work that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

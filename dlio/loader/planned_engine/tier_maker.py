"""Batches of images that a device keeps decoded: their crops are cut out there, by one kernel.

A batch has three kinds of rows, in any order. Images in the tier are cropped there. New ones that
the tier has room for are copied into it first; whether it has is found out when the batch is handed
over, in the order of batches, so that threads do not decide which images are kept. All others are
cropped on the host, copied, and put in their rows.
"""

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import Buffer
from dlio.errors import UsageError
from dlio.image.boxes import NUMBERS, boxes_of
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.loader.contract import BatchData
from dlio.loader.planned_engine.batch_builders import BatchMemory
from dlio.loader.planned_engine.mixup_partners import BatchPartners, decode_partners
from dlio.loader.planned_engine.slots import Slots
from dlio.loader.recipe import Recipe
from dlio.loader.streams import HostMemoryKind, pinned_memory
from dlio.storage.decoded_tier import DecodedTier
from dlio.storage.device_tier import DeviceCopies, DeviceTier
from dlio.util.buffer_pool import BufferPool

_U8 = npt.NDArray[np.uint8]
_I64 = npt.NDArray[np.int64]
_MOST_SPARE: Final = 64
_FIRST: Final = 0
"""Column of an image's first byte."""


class DeviceTierBuilder:
    """Batches of images, some of which are in a tier on the device.

    A batch is as `CropBatchBuilder` makes it, with a part in place of its images that the
    hand-over makes on the device.

    Args:
        pinned: kind of the batches' memory on the host.
        tier: on the device.
        decoded: tier of decoded images in RAM, for those that the device has no room for.

    Raises UsageError for data sets with transforms of single samples.
    """

    owns_payloads = False

    def __init__(
        self,
        recipe: Recipe,
        batch_size: int,
        pinned: HostMemoryKind,
        tier: DeviceTier,
        decoded: DecodedTier | None,
    ) -> None:
        if recipe.transforms:
            raise UsageError(
                f"{recipe.reader.path}: transform= changes single images on the host, and the tier "
                "gpu:...:decoded has them on the device: use transforms of whole batches "
                "(Normalize, ToDtype, MixUp and CutMix), or ram:...:decoded"
            )
        self.recipe, self.tier, self.decoded = recipe, tier, decoded
        steps = recipe.batch_transform
        self.normal = None if steps is None else steps.normal
        """Done by the kernel that crops; the other steps of a whole batch follow."""
        self.keeps: Callable[[_I64], npt.NDArray[np.bool_]] = _all
        """True for the samples that this rank keeps, as the plan of a pass says."""
        shape = recipe.crop.shape
        rows = 2 * batch_size if recipe.pairs else batch_size
        self.memory = BatchMemory((rows, *shape), np.uint8, pinned)
        self.batch_bytes = rows * math.prod(shape)
        in_pool = pinned is HostMemoryKind.IN_POOL
        self.pool = BufferPool(
            _MOST_SPARE,
            slack=4.0,
            headroom=0.25,
            allocate=pinned_memory if in_pool else None,
        )

    def begin(self, epoch: int, samples: _I64, pairs: BatchPartners | None = None) -> Slots:
        return _TierSlots(self, epoch, samples, pairs)


def _all(samples: _I64) -> npt.NDArray[np.bool_]:
    return np.ones(len(samples), np.bool_)


class _TierSlots:
    whole = True

    def __init__(
        self, maker: DeviceTierBuilder, epoch: int, samples: _I64, pairs: BatchPartners | None
    ) -> None:
        self._maker, self._epoch, self._samples, self._pairs = maker, epoch, samples, pairs
        self._uniforms = maker.recipe.decoder.draw(epoch, samples)
        self._keeps = maker.keeps(samples)
        self._labels = np.zeros(len(samples), np.int64)
        self._images = np.full((len(samples), 3), -1, np.int64)
        """(first byte, rows, columns) of images in the tier; -1 for the others."""
        self._new: dict[int, _U8] = {}
        """By slot, images that the tier may keep."""
        self._crops = _HostCrops(maker.memory)
        self._crop_of: dict[int, int] = {}
        """By slot, the row of `_crops` of an image that was cropped on the host."""

    def take_cached_many(self, slots: list[int]) -> tuple[list[int], float]:
        entries = self._maker.tier.find(self._samples[slots])
        there = entries[:, _FIRST] >= 0
        mine = np.array(slots, np.intp)[there]
        self._images[mine], self._labels[mine] = entries[there, :3], entries[there, 3]
        rest = [slot for slot, is_there in zip(slots, there.tolist(), strict=True) if not is_there]
        return rest, len(mine) * self._maker.tier.saves_s

    def take_cached(self, slot: int, sample: int) -> float | None:
        decoded = self._maker.decoded
        kept = None if decoded is None else decoded.get(sample)
        if decoded is None or kept is None:
            return None
        self._take(slot, *kept)
        return decoded.saves_s

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        maker = self._maker
        pixels, label, seconds = maker.recipe.prepared(sample, payload)
        maker.tier.count(seconds)
        if maker.decoded is not None and not self._may_keep(slot):
            maker.decoded.put(sample, pixels, label, seconds)
        self._take(slot, pixels, label)
        return 0.0

    def _take(self, slot: int, pixels: _U8, label: int) -> None:
        self._labels[slot] = label
        if self._may_keep(slot):
            self._new[slot] = pixels
        else:
            self._crop(slot, pixels, self._uniforms[slot])

    def _may_keep(self, slot: int) -> bool:
        return bool(self._keeps[slot]) and not self._maker.tier.is_full

    def _crop(self, slot: int, pixels: _U8, uniforms: npt.NDArray[np.float64]) -> None:
        row, out = self._crops.new()
        self._maker.recipe.decoder.finish(pixels, uniforms, out)
        self._crop_of[slot] = row

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        recipe = self._maker.recipe
        chosen = list(range(len(self._samples))) if slots is None else list(slots)
        samples, labels = self._samples[chosen], self._labels[chosen]
        crop_of = {row: self._crop_of[k] for row, k in enumerate(chosen) if k in self._crop_of}
        mixed: tuple[_I64, ...] = ()
        if self._pairs is not None:
            pairs = self._pairs if slots is None else self._pairs.of(slots)

            def partner(row: int, sample: int, uniforms: npt.NDArray[np.float64]) -> int:
                pixels, label, _ = recipe.prepared(sample, pairs.fetch(sample))
                self._crop(-1, pixels, uniforms)
                crop_of[row] = self._crop_of.pop(-1)
                return int(label)

            labels, *rest = decode_partners(pairs, recipe, self._epoch, samples, partner, labels)
            mixed = tuple(rest)
        images = np.full((len(labels), 3), -1, np.int64)
        images[: len(chosen)] = self._images[chosen]
        new = [(row, self._new[k]) for row, k in enumerate(chosen) if k in self._new]
        part = _TierBatchPart(
            maker=self._maker,
            samples=samples,
            labels=labels,
            uniforms=self._uniforms[chosen],
            images=images,
            new=_side_by_side(new, self._maker.pool),
            crops=self._crops,
            crop_of=crop_of,
        )
        assert recipe.companion is not None
        made = recipe.companion.batch(part, labels.tolist())
        return (*made, *mixed) if mixed else made


class _HostCrops:
    """Crops of a batch that are made on the host. Their memory is taken with the first: a batch of
    which the tier has all images needs none. Thread-safe."""

    def __init__(self, memory: BatchMemory) -> None:
        self._memory = memory
        self._rows = itertools.count()
        self._lock = threading.Lock()
        self._array: _U8 | None = None

    def new(self) -> tuple[int, _U8]:
        """Return (number, memory) of a crop that is to be made."""
        row = next(self._rows)
        return row, self._whole()[row]

    def first(self, count: int) -> _U8:
        """Return the crops of the first numbers."""
        return self._whole()[:count]

    def _whole(self) -> _U8:
        with self._lock:
            if self._array is None:
                self._array = self._memory.take()
            return self._array


def _side_by_side(images: list[tuple[int, _U8]], pool: BufferPool) -> list[tuple[int, _U8]]:
    """Copy images into one piece of memory, which copies to a device start from."""
    memory = pool.lend(sum(pixels.nbytes for _, pixels in images)) if images else None
    copied, at = [], 0
    for row, pixels in images:
        assert memory is not None
        copy = memory[at : at + pixels.nbytes].reshape(pixels.shape)
        copy[:] = pixels
        copied.append((row, copy))
        at += pixels.nbytes
    return copied


@dataclass(frozen=True, slots=True, eq=False)
class _TierBatchPart:
    """The images of a batch, until it is handed over."""

    maker: DeviceTierBuilder
    samples: _I64
    labels: _I64
    """Of the samples, and of partners behind them."""
    uniforms: npt.NDArray[np.float64]
    """Of the samples."""
    images: _I64
    """(first byte in the tier, rows, columns) of each row; -1 for those that are not there."""
    new: list[tuple[int, _U8]]
    """(row, pixels) of images that the tier may keep."""
    crops: "_HostCrops"
    crop_of: dict[int, int]
    """By row, the row of `crops` that was made on the host."""

    def made_on_device(self, copies: DeviceCopies) -> torch.Tensor:
        """Return the crops: uint8, or float32 if they are normalised; shape (n, 3, height, width),
        or (n, crops, 3, height, width); in channels-last memory."""
        made = None
        with self.maker.tier.turn(copies) as pixels:
            self._keep_new(pixels, copies)
            if len(self.crop_of) < len(self.images):
                images, boxes = map(copies.to_device, self._descriptors())
                made = self._cropped(pixels, images, boxes)
        if self.crop_of or made is None:
            made = self._with_crops(made, copies)
        return made.movedim(-1, -3)

    def _cropped(
        self, pixels: torch.Tensor, images: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        """Crop, and normalise if that comes next; shape (n, height, width, 3), or of several crops
        (n, crops, height, width, 3)."""
        crop = self.maker.recipe.crop
        size, normal = (crop.size, crop.width), self.maker.normal
        made = crop_batch(pixels, images, boxes, size, normal=normal)
        return made.permute(0, 2, 3, 1).view(-1, *crop.shape)

    def _keep_new(self, pixels: torch.Tensor, copies: DeviceCopies) -> None:
        """Copy new images into the tier; crop those on the host that it has no room for."""
        for row, image in self.new:
            height, width = image.shape[:2]
            sample, label = int(self.samples[row]), int(self.labels[row])
            first = self.maker.tier.place(sample, height, width, label)
            if first is None:
                free, out = self.crops.new()
                self.maker.recipe.decoder.finish(image, self.uniforms[row], out)
                self.crop_of[row] = free
            else:
                copies.into(pixels[first : first + image.nbytes], torch.from_numpy(image).view(-1))
                self.images[row] = first, height, width

    def _descriptors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and boxes that `crop_batch` takes; rows that are cropped on the host
        have empty boxes."""
        crop = self.maker.recipe.crop
        rows = np.flatnonzero(self.images[:, _FIRST] >= 0)
        boxes = np.zeros((len(self.images), crop.crops, NUMBERS), np.int32)
        heights, widths = self.images[rows, 1], self.images[rows, 2]
        if crop.train:
            boxes[rows] = boxes_of(crop, heights, widths, self.uniforms[rows])
        else:  # The images are the crops.
            boxes[rows, 0, 2], boxes[rows, 0, 3] = heights, widths
        images = np.repeat(np.maximum(self.images, 0), crop.crops, axis=0)
        return torch.from_numpy(images), torch.from_numpy(boxes.reshape(-1, NUMBERS))

    def _whole(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and boxes that leave `count` rows of `crops` as they are."""
        crop = self.maker.recipe.crop
        height, width, count = crop.size, crop.width, count * crop.crops
        images = torch.tensor([0, height, width]).repeat(count, 1)
        images[:, _FIRST] = 3 * height * width * torch.arange(count)
        boxes = torch.tensor([0, 0, height, width, 0, 0], dtype=torch.int32).repeat(count, 1)
        return images, boxes

    def _with_crops(self, made: torch.Tensor | None, copies: DeviceCopies) -> torch.Tensor:
        """Put the crops that were made on the host in their rows.

        Args:
            made: the other rows; None if there are none.
        """
        used = 1 + max(self.crop_of.values(), default=-1)
        crops = copies.to_device(torch.from_numpy(self.crops.first(used)))
        if self.maker.normal is not None:
            whole = map(copies.to_device, self._whole(used))
            crops = self._cropped(crops.view(-1), *whole)
        if made is None and all(row == crop for row, crop in self.crop_of.items()):
            return crops[: len(self.crop_of)]
        rows, source = (
            copies.to_device(torch.tensor(list(each), dtype=torch.int64))
            for each in (self.crop_of.keys(), self.crop_of.values())
        )
        if made is None:
            made = torch.empty_like(crops[: len(self.images)])
        return made.index_copy_(0, rows, crops.index_select(0, source))

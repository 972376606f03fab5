"""Batches whose crops a device makes: of JPEGs that it decodes, or of images that it keeps decoded.

*Decoding on a device* (`decode="device"`). The loader's threads only read headers, draw crops, and
copy the bytes that the crops need. A batch is decoded when all its samples are there. Order, labels
and the parts that crops show are those of `CropBatchBuilder`, and so are its errors where the
damage shows in a file's structure. Images that the device does not take are decoded by those
threads, as `CropBatchBuilder` does it.

*A tier on the device* (`gpu:SIZE:decoded`). A batch has three kinds of rows, in any order. Images
in the tier are cropped there. New ones that the tier has room for are copied into it first; whether
it has is found out when the batch is handed over, in the order of batches, so that threads do not
decide which images are kept. All others are cropped on the host, copied, and put in their rows.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm.deadlines import default_timeout_s
from dlio.data.reader_contract import SampleName
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.image.crop import NUMBERS, boxes_of
from dlio.image.crop_geometry import CropGeometry
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.image.device_decode.encoded_image import EncodedImage, encoded, header_of
from dlio.image.device_decode.jpeg_codec import JpegCodec
from dlio.loader.contract import BatchData, CollateFn
from dlio.loader.delivery import HostMemoryKind, pinned_memory
from dlio.loader.loader_options import check_recipe
from dlio.loader.planned_engine.batch_builders import BatchBuilder, BatchFactory
from dlio.loader.planned_engine.batch_memory import BatchMemory
from dlio.loader.planned_engine.mixup_partners import BatchPartners, decode_partners
from dlio.loader.recipe import CropRecipe, Recipe
from dlio.plan.epoch import EpochPlan
from dlio.storage.counters import Counters
from dlio.storage.decoded_tier import DecodedTier
from dlio.storage.device_tier import DeviceCopies, DeviceTier
from dlio.util.buffer_pool import BufferPool
from dlio.util.printable import log_warning

_U8 = npt.NDArray[np.uint8]
_I64 = npt.NDArray[np.int64]
_MOST_SPARE: Final = 64
_MOST_SLOTS: Final = 3
"""Batches that a device decodes at a time: one is copied, one decoded, one cropped."""
_FIRST: Final = 0
"""Column of an image's first byte."""


# Crops of images that a device decodes


class DeviceDecoder:
    """The shared part of batches that a device decodes, "cpu" or a CUDA device; a user's collate
    function gets crops on it. Owner of `codec`: the factory.

    Raises UsageError for samples that a device cannot make.
    """

    def __init__(
        self,
        recipe: Recipe,
        collate: CollateFn | None,
        device: torch.device,
        threads: int,
        counters: Counters,
    ) -> None:
        self.recipe, self.collate, self.counters = check_recipe(recipe), collate, counters
        steps = recipe.batch_transform
        self.normal = None if steps is None else steps.normal
        """Done by the kernel that crops; the other steps of a whole batch follow."""
        slots = min(_MOST_SLOTS, threads)
        each = max(1, threads // slots)
        self.codec = JpegCodec(device, slots, each, default_timeout_s())
        self.coded = BufferPool(_MOST_SPARE)
        """Memory for the bytes of batches: with fresh memory, threads would wait for its pages."""
        self._to_say = threading.Lock()
        """Held from the first word about the CPU's part on."""

    def factory(self, batch_size: int) -> BatchFactory:
        """Return the factory of batches of so many samples at most."""
        batch_bytes = batch_size * math.prod(self.recipe.crop.shape)
        begin = functools.partial(DeviceDecodeBuilder, self)
        return BatchFactory(begin, batch_bytes, close=self.codec.close)

    def by_cpu(self, names: Sequence[object]) -> None:
        """Count images that the CPU decodes in place of the device, and say so once."""
        self.counters.add("fallbacks", len(names))
        if names and self._to_say.acquire(blocking=False):
            log_warning(
                "%s is decoded by the CPU, as nvImageCodec does not take it: baseline JPEGs alone "
                "are decoded on the device (stats()['fallbacks'] counts the others)",
                names[0],
            )


class DeviceDecodeBuilder(BatchBuilder):
    """Images as crops on a device. Slots are rows of images, in order; partners that are mixed in
    come behind."""

    decodes_whole = True

    def __init__(
        self,
        decoder: DeviceDecoder,
        epoch: int,
        samples: _I64,
        _: Sequence[int],
        partners: BatchPartners | None,
    ) -> None:
        super().__init__(samples)
        self._decoder, self._recipe, self._pairs = decoder, decoder.recipe, partners
        self._epoch = epoch
        self._uniforms = decoder.recipe.decoder.draw(epoch, samples)
        sizes = decoder.recipe.reader.sizes[samples]
        self._ends = np.cumsum(sizes).tolist()
        self._coded = decoder.coded.lend(int(sizes.sum())).data
        """Memory for the bytes of all samples, one behind another."""
        self._encoded: dict[int, EncodedImage] = {}
        self._ready: dict[int, _U8] = {}
        """Crops of images that the CPU has decoded."""
        self._companions: dict[int, Any] = {}
        self._crops: torch.Tensor | None = None
        self._partners: dict[int, int] = {}
        """Row of each partner that is not among the samples."""

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        for slot, payload in zip(slots, payloads, strict=True):
            try:
                self._gather(slot, int(self.samples[slot]), payload, self._uniforms[slot])
            except Exception as error:
                self.failed[slot] = error
        return 0.0

    def _gather(
        self, row: int, sample: int, payload: Buffer, uniforms: npt.NDArray[np.float64]
    ) -> None:
        recipe = self._recipe
        values, name = recipe.fields(sample, payload), SampleName(recipe.reader, sample)
        image = values[recipe.companion.image]
        # Read here, by many threads: nvImageCodec reads headers in the thread that decodes, which
        # waited for the interpreter's lock with each of them, 512 times behind 15 others.
        header = header_of(image)
        if header is None:
            crop = np.empty(recipe.crop.shape, np.uint8)
            self._companions[row] = recipe.decode(crop, sample, payload, uniforms)
            self._ready[row] = crop
            self._decoder.by_cpu([name])
            return
        room = self._room(row, len(image))
        made = encoded(image, header, recipe.decoder, uniforms.tolist(), name, room)
        self._decoder.codec.prepare(made)
        move = CropGeometry(made.shown, recipe.crop.size, recipe.crop.width)
        self._companions[row] = recipe.accompanying(values, move, sample)
        self._encoded[row] = made

    def _room(self, row: int, size: int) -> memoryview | None:
        """Return memory for the bytes of a sample; None for partners, and for a sample that has
        become larger in its source."""
        if row >= len(self._ends):
            return None
        room = self._coded[self._ends[row - 1] if row else 0 : self._ends[row]]
        return room if len(room) >= size else None

    def decode_whole(self, slots: Sequence[int]) -> None:
        rows = list(slots)
        count = len(self.samples)
        if self._pairs is not None:
            rows += self._gather_partners(rows)
            count += len(self._partners)
        coded = [row for row in rows if row in self._encoded]
        crops, shape = self._recipe.crop.crops, self._recipe.crop.shape[-3:]
        made = self._decoder.codec.crops(
            [self._encoded[row] for row in coded],
            [range(row * crops, (row + 1) * crops) for row in coded],
            (self._recipe.crop.size, self._recipe.crop.width),
            {
                row * crops + k: part
                for row in rows
                if row in self._ready
                for k, part in enumerate(self._ready[row].reshape(-1, *shape))
            },
            count * crops,
            self._decoder.normal,
        )
        self._crops = made.crops
        counters = self._decoder.counters
        counters.add("device_images", len(coded) - len(made.by_cpu))
        counters.add("device_bytes", made.sent)
        self._decoder.by_cpu([self._encoded[coded[k]].name for k in made.by_cpu])
        failed: dict[int, Exception] = {coded[k]: error for k, error in made.failed.items()}
        self._encoded.clear()
        self._ready.clear()
        self._coded = memoryview(b"")
        for sample, row in list(self._partners.items()):
            error = failed.pop(row, None)
            if error is not None:
                assert self._pairs is not None
                if not self._pairs.skip:
                    raise error
                del self._partners[sample]  # Its sample is mixed with itself.
        self.failed.update(failed)

    def _gather_partners(self, slots: Sequence[int]) -> list[int]:
        """Gather partners that are not among the samples; return their rows."""
        assert self._pairs is not None
        pairs = self._pairs.of(slots)
        own = set(self.samples[list(slots)].tolist())
        missing = [each for each in dict.fromkeys(pairs.partners.tolist()) if each not in own]
        uniforms = self._recipe.decoder.draw(self._epoch, np.array(missing, np.int64))
        for sample, drawn in zip(missing, uniforms, strict=True):
            row = len(self.samples) + len(self._partners)
            try:
                self._gather(row, sample, pairs.fetch(sample), drawn)
            except (SourceError, CorruptBlock):
                if not pairs.skip:
                    raise
                continue
            self._partners[sample] = row
        return list(self._partners.values())

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        recipe, crops, samples = self._recipe, self._crops, self.samples
        assert crops is not None
        chosen = range(len(samples)) if slots is None else slots
        companions = [self._companions[slot] for slot in chosen]
        samples = samples[list(chosen)]
        mixed: tuple[_I64, ...] = ()  # Samples behind the others, and partners.
        rows = list(chosen)
        if self._pairs is not None:
            wanted = self._pairs.of(chosen).partners.tolist()
            places = {sample: k for k, sample in reversed(list(enumerate(samples.tolist())))}
            extra = list(self._partners)
            for sample in extra:
                places[sample] = len(rows)
                rows.append(self._partners[sample])
                companions.append(self._companions[self._partners[sample]])
            partners = [places.get(sample, k) for k, sample in enumerate(wanted)]
            mixed = np.array(extra, np.int64), np.array(partners, np.int64)
        made = crops
        if recipe.crop.crops > 1:
            made = crops.view(-1, recipe.crop.crops, *crops.shape[1:])
        if rows != list(range(len(made))):
            # In channels-last memory, as selecting rows would not leave it.
            last = made.movedim(-3, -1)
            made = last[torch.tensor(rows, dtype=torch.int64, device=last.device)].movedim(-1, -3)
            _wait(made)
        collate, companion = self._decoder.collate, recipe.companion
        if collate is None:
            batch = companion.batch(made, companions)
            return (*batch, *mixed) if mixed else batch
        firsts: BatchData = made
        if recipe.batch_transform is not None:
            targets: Any = companions
            if recipe.mixes:
                targets = torch.tensor(companions, device=made.device)
            firsts, companions = recipe.batch_transform(made, targets, self._epoch, samples, *mixed)
        collated = collate(list(map(companion.sample, firsts, companions)))
        _wait(made)
        return collated


def _wait(tensor: torch.Tensor) -> None:
    """Wait for this thread's work on a CUDA device: other streams use its result."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


# Crops of images that a device keeps decoded


class DeviceTierCrops:
    """The shared part of batches of images, some of which are in a tier on the device.

    A batch is as `CropBatchBuilder` makes it, with a part in place of its images that the hand-over
    makes on the device. `decoded` is a tier in RAM for images that the device has no room for.

    Raises UsageError for data sets with transforms of single samples.
    """

    def __init__(
        self,
        recipe: Recipe,
        batch_size: int,
        kind: HostMemoryKind,
        tier: DeviceTier,
        decoded: DecodedTier | None,
    ) -> None:
        assert isinstance(recipe, CropRecipe)
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
        self.keeps: Callable[[_I64], npt.NDArray[np.bool_]]
        """True for the samples that this rank keeps, as the plan of a pass says."""
        shape = recipe.crop.shape
        rows = 2 * batch_size if recipe.pairs else batch_size
        self.memory = BatchMemory((rows, *shape), np.uint8, kind)
        self.batch_bytes = rows * math.prod(shape)
        in_pool = kind is HostMemoryKind.IN_POOL
        self.pool = BufferPool(
            _MOST_SPARE,
            slack=4.0,
            headroom=0.25,
            allocate=pinned_memory if in_pool else None,
        )

    def factory(self) -> BatchFactory:
        """Return the factory of the batches."""
        begin = functools.partial(DeviceTierBuilder, self)
        return BatchFactory(begin, self.batch_bytes, follow_plan=self.follow_plan)

    def follow_plan(self, plan: EpochPlan) -> None:
        """Note the plan of a pass, before its first batch."""
        self.keeps = plan.keeps


class DeviceTierBuilder(BatchBuilder):
    """Images as crops that the hand-over makes on the device; some are in a tier there."""

    may_be_decoded = True
    finds_whole = True

    def __init__(
        self,
        shared: DeviceTierCrops,
        epoch: int,
        samples: _I64,
        _: Sequence[int],
        partners: BatchPartners | None,
    ) -> None:
        super().__init__(samples)
        self._shared, self._epoch, self._pairs = shared, epoch, partners
        self._uniforms = shared.recipe.decoder.draw(epoch, samples)
        # Places on the device are given at the hand-over: one that is given here would be lost if
        # the batch is never taken, and threads would decide which images are kept.
        self._keeps = shared.keeps(samples)
        self._labels = np.zeros(len(samples), np.int64)
        self._images = np.full((len(samples), 3), -1, np.int64)
        """(first byte, rows, columns) of images in the tier; -1 for the others."""
        self._new: dict[int, _U8] = {}
        """By slot, images that the tier may keep."""
        # Without memory as long as the tier has all images: taking 38 MB of page-locked memory for
        # each batch made passes of 4,000/s out of 75,000/s.
        self._crops = _HostCrops(shared.memory)
        self._crop_of: dict[int, int] = {}
        """By slot, the row of `_crops` of an image that was cropped on the host."""

    def find(self, slots: list[int]) -> tuple[list[int], float]:
        entries = self._shared.tier.find(self.samples[slots])
        # All of a batch at once: 0.5 us a sample of the interpreter's lock, in place of 2.6.
        there = entries[:, _FIRST] >= 0
        mine = np.array(slots, np.intp)[there]
        self._images[mine], self._labels[mine] = entries[there, :3], entries[there, 3]
        rest = [slot for slot, is_there in zip(slots, there.tolist(), strict=True) if not is_there]
        return rest, len(mine) * self._shared.tier.saves_s

    def take_decoded(self, slots: list[int]) -> tuple[list[int], float]:
        decoded = self._shared.decoded
        if decoded is None:
            return slots, 0.0
        rest = []
        for slot in slots:
            kept = decoded.get(int(self.samples[slot]))
            if kept is None:
                rest.append(slot)
            else:
                self._take(slot, *kept)
        return rest, (len(slots) - len(rest)) * decoded.saves_s

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        shared = self._shared
        for slot, payload in zip(slots, payloads, strict=True):
            sample = int(self.samples[slot])
            try:
                pixels, label, seconds = shared.recipe.prepare(sample, payload)
                shared.tier.count(seconds)
                if shared.decoded is not None and not self._may_keep(slot):
                    shared.decoded.put(sample, pixels, label, seconds)
                self._take(slot, pixels, label)
            except Exception as error:
                self.failed[slot] = error
        return 0.0

    def _take(self, slot: int, pixels: _U8, label: int) -> None:
        self._labels[slot] = label
        if self._may_keep(slot):
            self._new[slot] = pixels
        else:
            self._crop(slot, pixels, self._uniforms[slot])

    def _may_keep(self, slot: int) -> bool:
        return bool(self._keeps[slot]) and not self._shared.tier.is_full

    def _crop(self, slot: int, pixels: _U8, uniforms: npt.NDArray[np.float64]) -> None:
        row, out = self._crops.new()
        self._shared.recipe.decoder.finish(pixels, uniforms, out)
        self._crop_of[slot] = row

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        recipe = self._shared.recipe
        chosen = list(range(len(self.samples))) if slots is None else list(slots)
        samples, labels = self.samples[chosen], self._labels[chosen]
        crop_of = {row: self._crop_of[k] for row, k in enumerate(chosen) if k in self._crop_of}
        mixed: tuple[_I64, ...] = ()
        if self._pairs is not None:
            pairs = self._pairs if slots is None else self._pairs.of(slots)

            def partner(row: int, sample: int, uniforms: npt.NDArray[np.float64]) -> int:
                pixels, label, _ = recipe.prepare(sample, pairs.fetch(sample))
                self._crop(-1, pixels, uniforms)
                crop_of[row] = self._crop_of.pop(-1)
                return int(label)

            labels, *rest = decode_partners(pairs, recipe, self._epoch, samples, partner, labels)
            mixed = tuple(rest)
        images = np.full((len(labels), 3), -1, np.int64)
        images[: len(chosen)] = self._images[chosen]
        new = [(row, self._new[k]) for row, k in enumerate(chosen) if k in self._new]
        part = _TierBatchPart(
            shared=self._shared,
            samples=samples,
            labels=labels,
            uniforms=self._uniforms[chosen],
            images=images,
            new=_side_by_side(new, self._shared.pool),
            crops=self._crops,
            crop_of=crop_of,
        )
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
    if not images:
        return []
    memory = pool.lend(sum(pixels.nbytes for _, pixels in images))
    copied, at = [], 0
    for row, pixels in images:
        copy = memory[at : at + pixels.nbytes].reshape(pixels.shape)
        copy[:] = pixels
        copied.append((row, copy))
        at += pixels.nbytes
    return copied


@dataclass(frozen=True, slots=True, eq=False)
class _TierBatchPart:
    """The images of a batch, until it is handed over."""

    shared: DeviceTierCrops
    samples: _I64
    labels: _I64
    """Of the samples, and of partners behind them."""
    uniforms: npt.NDArray[np.float64]
    """Of the samples."""
    images: _I64
    """(first byte in the tier, rows, columns) of each row; -1 for those that are not there."""
    new: list[tuple[int, _U8]]
    """(row, pixels) of images that the tier may keep."""
    crops: _HostCrops
    crop_of: dict[int, int]
    """By row, the row of `crops` that was made on the host."""

    def made_on_device(self, copies: DeviceCopies) -> torch.Tensor:
        """Return the crops: uint8, or float32 if they are normalised; shape (n, 3, height, width),
        or (n, crops, 3, height, width); in channels-last memory."""
        made = None
        with self.shared.tier.turn(copies) as pixels:
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
        crop = self.shared.recipe.crop
        size, normal = (crop.size, crop.width), self.shared.normal
        made = crop_batch(pixels, images, boxes, size, normal=normal)
        return made.permute(0, 2, 3, 1).view(-1, *crop.shape)

    def _keep_new(self, pixels: torch.Tensor, copies: DeviceCopies) -> None:
        """Copy new images into the tier; crop those on the host that it has no room for."""
        for row, image in self.new:
            height, width = image.shape[:2]
            sample, label = int(self.samples[row]), int(self.labels[row])
            first = self.shared.tier.place(sample, height, width, label)
            if first is None:
                free, out = self.crops.new()
                self.shared.recipe.decoder.finish(image, self.uniforms[row], out)
                self.crop_of[row] = free
            else:
                copies.into(pixels[first : first + image.nbytes], torch.from_numpy(image).view(-1))
                self.images[row] = first, height, width

    def _descriptors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and boxes that `crop_batch` takes; rows that are cropped on the host
        have empty boxes."""
        crop = self.shared.recipe.crop
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
        crop = self.shared.recipe.crop
        height, width, count = crop.size, crop.width, count * crop.crops
        images = torch.tensor([0, height, width]).repeat(count, 1)
        images[:, _FIRST] = 3 * height * width * torch.arange(count)
        boxes = torch.tensor([0, 0, height, width, 0, 0], dtype=torch.int32).repeat(count, 1)
        return images, boxes

    def _with_crops(self, made: torch.Tensor | None, copies: DeviceCopies) -> torch.Tensor:
        """Put the crops that were made on the host in their rows; `made` has the other rows, if
        any."""
        used = 1 + max(self.crop_of.values(), default=-1)
        crops = copies.to_device(torch.from_numpy(self.crops.first(used)))
        if self.shared.normal is not None:
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

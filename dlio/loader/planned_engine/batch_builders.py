"""Batches of images, as crops that the loader's threads decode, and the memory of batches."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import Buffer
from dlio.image.together import finish_all
from dlio.loader.contract import BatchData, CollateFn, Sample
from dlio.loader.planned_engine.mixup_partners import BatchPartners, decode_partners
from dlio.loader.planned_engine.slots import Slots
from dlio.loader.recipe import Recipe
from dlio.loader.streams import HostMemoryKind, pinned_memory
from dlio.storage.decoded_tier import DecodedTier
from dlio.util.buffer_pool import BufferPool

_MOST_SPARE: Final = 64
"""Spare batches that are kept, more than are ever under way together."""


class BatchMemory:
    """Arrays for batches, used again as soon as nothing refers to them. Thread-safe.

    Args:
        shape: of one batch.
        pinned: page-locked or not, and whose copies to a GPU they wait for.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, pinned: HostMemoryKind
    ) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._bytes = math.prod(shape) * self._dtype.itemsize
        self._pinned = pinned
        in_pool = pinned is HostMemoryKind.IN_POOL
        self._pool = BufferPool(_MOST_SPARE, allocate=pinned_memory if in_pool else None)

    def take(self) -> npt.NDArray[Any]:
        """Return an uninitialised array; its memory comes back with its last tensor or view."""
        if self._pinned is HostMemoryKind.BY_TORCH:
            kind = torch.from_numpy(np.empty(0, self._dtype)).dtype
            return torch.empty(self._shape, dtype=kind, pin_memory=True).numpy()
        return self._pool.lend(self._bytes).view(self._dtype).reshape(self._shape)


class CropBatchBuilder:
    """Images as crops in the batch's own memory.

    A batch is (uint8 tensor of shape (n, 3, size, size) in channels-last memory, int64 tensor of
    shape (n,)); with a transform the first is default_collate's result for the transformed crops.
    Several crops of each image have shape (n, crops, 3, size, size).
    In place of the labels it has masks of shape (n, size, size), or a list of targets. Unlabelled
    images are {name of the field: images}.

    Args:
        collate: a collate function of the user; None for torch's own.
    """

    owns_payloads = False

    def __init__(
        self,
        recipe: Recipe,
        batch_size: int,
        collate: CollateFn | None,
        pinned: HostMemoryKind,
        decoded: DecodedTier | None,
    ) -> None:
        self.recipe = recipe
        self.decoded = decoded
        self.collate = collate
        shape = (batch_size, *recipe.crop.shape)
        self.batch_bytes = math.prod(shape)
        if recipe.pairs:  # With room for a partner of each.
            shape = (2 * batch_size, *shape[1:])
        self.memory = BatchMemory(shape, np.uint8, pinned)

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: BatchPartners | None = None
    ) -> Slots:
        if self.decoded is not None:
            kind = _CachedCrops if self.recipe.transforms else _ManyCachedCrops
            return kind(self, self.decoded, epoch, samples, pairs)
        return _ManyCrops(self, epoch, samples, pairs)


class _Crops:
    def __init__(
        self,
        maker: CropBatchBuilder,
        epoch: int,
        samples: npt.NDArray[np.int64],
        pairs: BatchPartners | None,
    ) -> None:
        self._maker = maker
        self._pairs = pairs
        self._recipe = maker.recipe
        self._tier: DecodedTier | None = None
        self._images = maker.memory.take()
        self._companions: list[Any] = [0] * len(samples)
        self._epoch, self._samples = epoch, samples
        self._uniforms = maker.recipe.decoder.draw(epoch, samples)
        self._transformed: list[Sample] = []
        if maker.recipe.transforms:
            self._transformed = [None] * len(samples)

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        image = self._images[slot]
        self._companions[slot] = self._recipe.into(
            image, sample, payload, self._uniforms[slot], self._tier
        )
        return self._transform(slot, sample) if self._transformed else 0.0

    def _transform(self, slot: int, sample: int) -> float:
        self._transformed[slot], seconds = self._recipe.transformed(
            self._images[slot], self._epoch, sample
        )
        return seconds

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        images, companions, transformed = self._images, self._companions, self._transformed
        count, samples = len(companions), self._samples
        if slots is not None:
            for k, slot in enumerate(slots):
                if k != slot:
                    images[k] = images[slot]
            companions, count = [companions[slot] for slot in slots], len(slots)
            samples = samples[list(slots)]
            transformed = [transformed[slot] for slot in slots] if transformed else []
        recipe, collate, companion = self._recipe, self._maker.collate, self._recipe.companion
        assert companion is not None
        mixed: tuple[npt.NDArray[np.int64], ...] = ()  # Samples behind the others, and partners.
        if self._pairs is not None:
            pairs = self._pairs if slots is None else self._pairs.of(slots)
            labels = np.array(companions, np.int64)

            def partner(row: int, sample: int, uniforms: npt.NDArray[np.float64]) -> int:
                label: int = recipe.into(images[row], sample, pairs.fetch(sample), uniforms)
                recipe.transformed(images[row], self._epoch, sample)
                return label

            labels, *rest = decode_partners(pairs, recipe, self._epoch, samples, partner, labels)
            companions, mixed, count = labels.tolist(), tuple(rest), len(labels)
        crops = torch.from_numpy(images[:count]).movedim(-1, -3)
        if collate is not None:
            firsts: BatchData = transformed
            if recipe.transform is None:
                firsts, batchwise = crops, recipe.batch_transform
                if batchwise is not None:
                    targets = torch.tensor(companions) if batchwise.mixes else companions
                    firsts, companions = batchwise(crops, targets, self._epoch, samples, *mixed)
            return collate(list(map(companion.sample, firsts, companions)))
        if recipe.transform is None:
            made = companion.batch(crops, companions)
            return (*made, *mixed) if mixed else made
        whole = torch.utils.data.default_collate(transformed) if transformed else torch.empty(0)
        return companion.batch(whole, companions)


class _ManyCrops(_Crops):
    """Crops of images that no tier keeps decoded."""

    def make_many(
        self, slots: Sequence[int], samples: Sequence[int], payloads: Sequence[Buffer]
    ) -> tuple[dict[int, Exception], float]:
        companions = self._recipe.into_all(
            [self._images[slot] for slot in slots],
            samples,
            payloads,
            [self._uniforms[slot] for slot in slots],
        )
        failed, seconds = {}, 0.0
        for slot, sample, companion in zip(slots, samples, companions, strict=True):
            try:
                if isinstance(companion, Exception):
                    raise companion
                self._companions[slot] = companion
                seconds += self._transform(slot, sample) if self._transformed else 0.0
            except Exception as error:
                failed[slot] = error
        return failed, seconds


class _CachedCrops(_Crops):
    """Crops of images that a tier keeps decoded."""

    def __init__(
        self,
        maker: CropBatchBuilder,
        tier: DecodedTier,
        epoch: int,
        samples: npt.NDArray[np.int64],
        pairs: BatchPartners | None,
    ) -> None:
        super().__init__(maker, epoch, samples, pairs)
        self._tier = self._cache = tier

    def take_cached(self, slot: int, sample: int) -> float | None:
        decoded = self._cache.get(sample)
        if decoded is None:
            return None
        pixels, label = decoded
        self._recipe.decoder.finish(pixels, self._uniforms[slot], self._images[slot])
        self._companions[slot] = label
        if self._transformed:
            self._transform(slot, sample)
        return self._cache.saves_s


class _ManyCachedCrops(_CachedCrops):
    """Crops of images that a tier keeps decoded, and that no function of the user's changes."""

    whole = False

    def take_cached_many(self, slots: list[int]) -> tuple[list[int], float]:
        rest, there, images = [], [], []
        for slot in slots:
            decoded = self._cache.get(int(self._samples[slot]))
            if decoded is None:
                rest.append(slot)
                continue
            there.append(slot)
            images.append(decoded[0])
            self._companions[slot] = decoded[1]
        finish_all(
            self._recipe.decoder,
            images,
            [self._uniforms[slot] for slot in there],
            [self._images[slot] for slot in there],
        )
        return rest, len(there) * self._cache.saves_s

"""Makers of batches: payloads are decoded into the slots of a batch, and the batch is finished.

There are four makers (`DeviceMaker` in a file of its own), and optional abilities of a batch's
slots, which the pipeline uses where they are there: `ManySlots` make several samples at a time,
`CachedSlots` and `ManyCachedSlots` take samples from a tier of decoded images, `DirectSlots` have a
payload's bytes read into the batch itself, `SettledSlots` decode all samples together.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

from dlio.data.schema import Buffer, Schema
from dlio.errors import UsageError
from dlio.image.together import finish_all
from dlio.loader.contract import BatchData, CollateFn, Sample
from dlio.loader.planned.pairs import Pairs, decode_partners
from dlio.loader.recipe import Recipe
from dlio.loader.streams import Pinned, pinned_memory
from dlio.storage.decoded import DecodedTier
from dlio.util.pool import Pool

__all__ = [
    "ArrayMaker",
    "BatchMemory",
    "CachedSlots",
    "CropMaker",
    "DirectSlots",
    "Maker",
    "ManyCachedSlots",
    "ManySlots",
    "SampleMaker",
    "SettledSlots",
    "Slots",
    "maker_for",
]

_DIRECT_BYTES: Final = 1 << 16
"""Least bytes of a sample of arrays that is read into the batch itself, without another copy."""

_MOST_SPARE: Final = 64
"""Spare batches that are kept, more than are ever under way together."""


class BatchMemory:
    """Arrays for batches, used again as soon as nothing refers to them. Thread-safe.

    Args:
        shape: of one batch.
        pinned: page-locked or not, and whose copies to a GPU they wait for.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, pinned: Pinned) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._bytes = math.prod(shape) * self._dtype.itemsize
        self._pinned = pinned
        in_pool = pinned is Pinned.IN_POOL
        self._pool = Pool(_MOST_SPARE, allocate=pinned_memory if in_pool else None)

    def take(self) -> npt.NDArray[Any]:
        """Return an uninitialised array; its memory comes back with its last tensor or view."""
        if self._pinned is Pinned.BY_TORCH:
            kind = torch.from_numpy(np.empty(0, self._dtype)).dtype
            return torch.empty(self._shape, dtype=kind, pin_memory=True).numpy()
        return self._pool.lend(self._bytes).view(self._dtype).reshape(self._shape)


class Slots(Protocol):
    """One batch in the making. `make` is called once a slot, from any thread; `finish` once, after
    all slots are made."""

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        """Decode a sample into its slot; return the seconds spent in the user's transform."""

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        """Return the batch of the slots given; of all slots for None."""


@runtime_checkable
class CachedSlots(Slots, Protocol):
    """Slots whose samples may be in a tier of decoded images."""

    def take_cached(self, slot: int, sample: int) -> float | None:
        """Make a sample of its decoded image; return the seconds of decoding that this saved.

        None if the tier does not have the image; then `make` is called.
        """


@runtime_checkable
class ManyCachedSlots(CachedSlots, Protocol):
    """Slots whose samples are looked up many at a time, which costs a tenth as much."""

    whole: bool
    """True if one thread looks up all samples of a batch, which takes as long as looking up one;
    False if it makes them, so that many threads share the work."""

    def take_cached_many(self, slots: list[int]) -> tuple[list[int], float]:
        """Make those of the samples that a tier has; return (the other slots, the seconds of
        decoding that this saved)."""


@runtime_checkable
class ManySlots(Slots, Protocol):
    """Slots that are made several at a time, which takes the interpreter's lock less often."""

    def make_many(
        self, slots: Sequence[int], samples: Sequence[int], payloads: Sequence[Buffer]
    ) -> tuple[dict[int, Exception], float]:
        """Do `make` for several slots.

        Returns: (the error of each slot that failed, seconds spent in the user's transform).
        """


@runtime_checkable
class DirectSlots(Slots, Protocol):
    """Slots that a payload's bytes can be read into, without decoding."""

    def pieces(self, slot: int) -> list[memoryview]:
        """Return the memory for consecutive parts of a payload."""

    def filled(self, slot: int, pieces: list[memoryview]) -> None:
        """Finish a slot whose pieces have been read; called in place of `make`."""


@runtime_checkable
class SettledSlots(Slots, Protocol):
    """Slots whose samples are decoded together: `make` only gathers their bytes."""

    def settle(self, intact: Sequence[int]) -> dict[int, Exception]:
        """Decode the slots that have been made; called once, before `finish`.

        Returns: the error of each slot that failed.
        """


class Maker(Protocol):
    """Makes batches of one data set."""

    owns_payloads: bool
    """True if samples share the memory of their payloads, which must not be used again then."""
    batch_bytes: int
    """Approximate bytes of a batch."""

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: Pairs | None = None
    ) -> Slots:
        """Begin a batch of these samples, mixed with these partners."""


def maker_for(
    recipe: Recipe,
    batch_size: int,
    collate: CollateFn,
    default: bool,
    pinned: Pinned,
    decoded: DecodedTier | None = None,
) -> Maker:
    """Choose the maker for a data set.

    Args:
        collate: of the loader; `default` is True if it is torch's own.
        pinned: kind of the batches' memory.
        decoded: tier of decoded images.
    """
    if recipe.crops:
        return CropMaker(recipe, batch_size, None if default else collate, pinned, decoded)
    if default and recipe.is_plain and _is_arrays(recipe.reader.schema):
        return ArrayMaker(recipe, batch_size, pinned)
    if default and recipe.ragged:
        return SampleMaker(recipe, batch_size, _as_lists)
    return SampleMaker(recipe, batch_size, collate)


class CropMaker:
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
        pinned: Pinned,
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
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: Pairs | None = None
    ) -> Slots:
        if self.decoded is not None:
            kind = _CachedCrops if self.recipe.transforms else _ManyCachedCrops
            return kind(self, self.decoded, epoch, samples, pairs)
        return _ManyCrops(self, epoch, samples, pairs)


class _Crops:
    def __init__(
        self,
        maker: CropMaker,
        epoch: int,
        samples: npt.NDArray[np.int64],
        pairs: Pairs | None,
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
        maker: CropMaker,
        tier: DecodedTier,
        epoch: int,
        samples: npt.NDArray[np.int64],
        pairs: Pairs | None,
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
        rest, found, images = [], [], []
        for slot in slots:
            decoded = self._cache.get(int(self._samples[slot]))
            if decoded is None:
                rest.append(slot)
                continue
            found.append(slot)
            images.append(decoded[0])
            self._companions[slot] = decoded[1]
        finish_all(
            self._recipe.decoder,
            images,
            [self._uniforms[slot] for slot in found],
            [self._images[slot] for slot in found],
        )
        return rest, len(found) * self._cache.saves_s


class ArrayMaker:
    """Samples of arrays and numbers of fixed shapes, each field in a batch array of its own."""

    owns_payloads = False

    def __init__(self, recipe: Recipe, batch_size: int, pinned: Pinned) -> None:
        self.recipe = recipe
        self.schema = schema = recipe.reader.schema
        self.memories = {
            name: BatchMemory((batch_size, *_shape(schema, name)), _dtype(schema, name), pinned)
            for name, _ in schema.fields
        }
        self.batch_bytes = batch_size * schema.overhead
        self.parts = _parts(schema)
        """Arrays of a payload, in its order, and the stretches between them, which have no name:
        (name or None, first byte, end)."""
        self.direct = schema.overhead >= _DIRECT_BYTES

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: Pairs | None = None
    ) -> Slots:
        return (_DirectArrays if self.direct else _Arrays)(self, len(samples))


class _Arrays:
    def __init__(self, maker: ArrayMaker, count: int) -> None:
        self._maker = maker
        self._count = count
        self._arrays = {name: memory.take() for name, memory in maker.memories.items()}

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        for name, value in self._maker.recipe.fields(sample, payload).items():
            self._arrays[name][slot] = value
        return 0.0

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        tensors = {
            name: torch.from_numpy(array[: self._count] if slots is None else array[list(slots)])
            for name, array in self._arrays.items()
        }
        structure = self._maker.schema.structure
        # Lists where a sample has tuples, as default_collate has them.
        return tensors if structure is None else tree_map(tensors.__getitem__, structure)


class _DirectArrays(_Arrays):
    """A batch of large arrays, whose payloads are read directly into the batch's memory."""

    def pieces(self, slot: int) -> list[memoryview]:
        return [
            memoryview(bytearray(end - begin))
            if name is None
            else memoryview(self._arrays[name][slot].reshape(-1).view(np.uint8))
            for name, begin, end in self._maker.parts
        ]

    def filled(self, slot: int, pieces: list[memoryview]) -> None:
        schema = self._maker.schema
        for piece, (name, begin, end) in zip(pieces, self._maker.parts, strict=True):
            if name is None:
                for scalar, value in schema.scalars_in(piece, begin, end):
                    self._arrays[scalar][slot] = value


class SampleMaker:
    """Samples of any kind, made one by one, then collated by the loader's collate_fn."""

    owns_payloads = True

    def __init__(self, recipe: Recipe, batch_size: int, collate: CollateFn) -> None:
        self.recipe = recipe
        self.collate = collate
        self.batch_bytes = batch_size * recipe.sample_bytes

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: Pairs | None = None
    ) -> Slots:
        return _Samples(self, epoch, len(samples))


class _Samples:
    def __init__(self, maker: SampleMaker, epoch: int, count: int) -> None:
        self._maker, self._epoch = maker, epoch
        self._samples: list[Sample] = [None] * count

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        recipe = self._maker.recipe
        self._samples[slot], seconds = recipe.mapped(self._epoch, sample, payload)
        return seconds

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        samples = self._samples if slots is None else [self._samples[slot] for slot in slots]
        if not samples:
            return torch.empty(0)
        try:
            return self._maker.collate(samples)
        except RuntimeError as error:
            if self._maker.collate is torch.utils.data.default_collate:
                _check_shapes(samples, self._maker.recipe.reader.path, error)
            raise


def _as_lists(samples: Sequence[Sample]) -> BatchData:
    """Collate whole pictures, which differ in size, as torchvision's detectors take them."""
    if not all(isinstance(each, tuple) and len(each) == 2 for each in samples):
        return torch.utils.data.default_collate(list(samples))
    return [picture for picture, _ in samples], [target for _, target in samples]


def _check_shapes(samples: Sequence[Sample], path: str, error: RuntimeError) -> None:
    """Raise UsageError if a field's tensors have several shapes, so that they cannot be stacked."""
    for name in samples[0] if isinstance(samples[0], dict) else ():
        values = [each[name] for each in samples if isinstance(each, dict) and name in each]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        shapes = sorted({tuple(each.shape) for each in tensors})
        if len(shapes) > 1:
            raise UsageError(
                f"{path}: {name!r} has shapes such as {shapes[0]} and {shapes[-1]}, which cannot "
                "be stacked into a batch: give image_size= or a transform= that makes shapes "
                "alike, or collate_fn=list"
            ) from error


def _is_arrays(schema: Schema) -> bool:
    """True if all fields are numbers and arrays of fixed shapes, which collating only stacks."""
    return schema.is_fixed and all(
        schema.kinds[name].dtype is not None for name, _ in schema.fields
    )


def _parts(schema: Schema) -> list[tuple[str | None, int, int]]:
    parts: list[tuple[str | None, int, int]] = []
    at = 0
    for name, kind, begin in sorted(schema.places(), key=lambda field: field[2]):
        if kind.scalar or not kind.bytes:
            continue
        if begin > at:
            parts.append((None, at, begin))
        parts.append((name, begin, begin + kind.bytes))
        at = begin + kind.bytes
    if at < schema.overhead:
        parts.append((None, at, schema.overhead))
    return parts


def _shape(schema: Schema, name: str) -> tuple[int, ...]:
    return tuple(size or 0 for size in schema.kinds[name].shape)


def _dtype(schema: Schema, name: str) -> np.dtype[Any]:
    """The type that default_collate gives: Python's numbers become int64 and float64."""
    kind = schema.kinds[name]
    assert kind.dtype is not None
    if kind.shape or kind.dtype == np.bool_:
        return kind.dtype
    return np.dtype(np.int64 if np.issubdtype(kind.dtype, np.integer) else np.float64)

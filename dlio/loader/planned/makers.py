"""From payloads to a batch: what is made of each sample, and of all of them together."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.reader import data_bytes
from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock, SourceError
from dlio.loader.dataset import Dataset
from dlio.loader.planned.memory import BatchMemory
from dlio.loader.sample import decode_sample
from dlio.storage.decoded import DecodedTier

_DIRECT_BYTES: Final = 1 << 16
"""Of a sample of arrays that is read into the batch itself, without another copy."""
Collate = Callable[[list[Any]], Any]


class Slots(Protocol):
    """One batch in the making. `make` is called once a slot, from any thread; `finish` after all
    of them."""

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        """Decode a sample into its slot; the seconds that the user's transform took of it."""

    def pieces(self, slot: int) -> list[memoryview] | None:
        """Where a payload's bytes are to go, one after another, where that is all that has to be
        done; then `filled` is called in `make`'s place."""

    def filled(self, slot: int, pieces: list[memoryview]) -> None: ...

    def kept(self, slot: int, sample: int) -> float | None:
        """Make a sample of what a tier keeps of it decoded; the seconds that saved, None where
        there is no such thing."""

    def finish(self, kept: Sequence[int] | None) -> Any:
        """The batch, of the slots in `kept`; of all for None."""


class _Decoded:
    """Slots whose samples are made of payloads that are read elsewhere."""

    def pieces(self, slot: int) -> list[memoryview] | None:
        return None

    def filled(self, slot: int, pieces: list[memoryview]) -> None:
        raise AssertionError("it gave no pieces")

    def kept(self, slot: int, sample: int) -> float | None:
        return None


class Maker(Protocol):
    """Makes batches of one data set."""

    owns_payloads: bool
    """Whether samples share their payload's memory, which must not be used again then."""
    batch_bytes: int
    """Of a batch, about."""

    def begin(self, epoch: int, samples: npt.NDArray[np.int64]) -> Slots: ...


def maker_for(
    data: Dataset,
    batch_size: int,
    collate: Collate,
    default: bool,
    pinned: bool,
    decoded: DecodedTier | None = None,
) -> Maker:
    """What suits the data set.

    Args:
        collate: the loader's; `default` tells whether it is torch's own.
        pinned: page-locked memory.
        decoded: tier of decoded images.
    """
    if data.crops:
        return CropMaker(data, batch_size, None if default else collate, pinned, decoded)
    if default and data.transform is None and data.finish is None and _is_arrays(data):
        return ArrayMaker(data, batch_size, pinned)
    return SampleMaker(data, batch_size, collate)


class CropMaker:
    """Labelled images to crops, in the batch's own memory: (n, 3, size, size) uint8 in
    channels-last memory, labels int64. With a transform the first is what collating makes of its
    results."""

    owns_payloads = False

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        collate: Collate | None,
        pinned: bool,
        decoded: DecodedTier | None,
    ) -> None:
        self.data = data
        self.decoded = decoded
        self.collate = collate
        shape = (batch_size, data.crop.size, data.crop.width, 3)
        self.memory = BatchMemory(shape, np.uint8, pinned)
        self.batch_bytes = math.prod(shape)

    def begin(self, epoch: int, samples: npt.NDArray[np.int64]) -> Slots:
        return _Crops(self, epoch, samples)


class _Crops(_Decoded):
    def __init__(self, maker: CropMaker, epoch: int, samples: npt.NDArray[np.int64]) -> None:
        self._maker = maker
        self._images = maker.memory.take()
        self._labels = np.zeros(len(samples), np.int64)
        self._uniforms = maker.data.decoder.draw(epoch, samples)
        self._made: list[Any] = [None] * len(samples) if maker.data.transform else []

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        data, tier = self._maker.data, self._maker.decoded
        values = _split(data, sample, payload)
        image, uniforms = self._images[slot], self._uniforms[slot]
        encoded, name = values[data.image_field], data.reader.name(sample)
        label = int(values[data.label_field])
        if tier is None:
            data.decoder.decode(encoded, name, uniforms, image)
        else:
            began = time.thread_time()  # What others do meanwhile is not its cost.
            pixels = data.decoder.prepare(encoded, name)
            tier.put(sample, pixels, label, time.thread_time() - began)
            data.decoder.finish(pixels, uniforms, image)
        return self._made_of(slot, label)

    def kept(self, slot: int, sample: int) -> float | None:
        tier = self._maker.decoded
        found = None if tier is None else tier.get(sample)
        if tier is None or found is None:
            return None
        pixels, label = found
        self._maker.data.decoder.finish(pixels, self._uniforms[slot], self._images[slot])
        self._made_of(slot, label)
        return tier.saves_s

    def _made_of(self, slot: int, label: int) -> float:
        """What is made of a crop that is in its slot; seconds of the user's transform."""
        data, image = self._maker.data, self._images[slot]
        self._labels[slot] = label
        if data.transform is None:
            return 0.0
        started = time.perf_counter()
        self._made[slot] = data.transform(torch.from_numpy(image).permute(2, 0, 1))
        return time.perf_counter() - started

    def finish(self, kept: Sequence[int] | None) -> Any:
        images, labels, made = self._images, self._labels, self._made
        count = len(labels)
        if kept is not None:
            for k, slot in enumerate(kept):
                if k != slot:
                    images[k] = images[slot]
            labels, count = labels[list(kept)], len(kept)
            made = [made[slot] for slot in kept] if made else made
        maker = self._maker
        if maker.collate is not None:
            plain: Any = torch.from_numpy(images[:count]).permute(0, 3, 1, 2)
            if maker.data.batch_transform is not None:
                plain = maker.data.batch_transform(plain)
            firsts = made if maker.data.transform is not None else plain
            return maker.collate(list(zip(firsts, labels.tolist(), strict=True)))
        numbers = torch.from_numpy(labels)
        if maker.data.transform is None:
            return torch.from_numpy(images[:count]).permute(0, 3, 1, 2), numbers
        collated = torch.utils.data.default_collate(made) if made else torch.empty(0)
        return collated, numbers


class ArrayMaker:
    """Samples of arrays and numbers of fixed shapes: each field into its own batch array."""

    owns_payloads = False

    def __init__(self, data: Dataset, batch_size: int, pinned: bool) -> None:
        self.data = data
        schema = data.reader.schema
        self.memories = {
            name: BatchMemory((batch_size, *_shape(schema, name)), _dtype(schema, name), pinned)
            for name, _ in schema.fields
        }
        self.batch_bytes = batch_size * schema.overhead
        # A payload is its fields, at their places: arrays, and what is between them.
        self.parts: list[tuple[str | None, int, int]] = []
        at = 0
        for name, kind, begin in sorted(schema.places(), key=lambda field: field[2]):
            if kind.scalar or not kind.bytes:
                continue
            if begin > at:
                self.parts.append((None, at, begin))
            self.parts.append((name, begin, begin + kind.bytes))
            at = begin + kind.bytes
        if at < schema.overhead:
            self.parts.append((None, at, schema.overhead))
        self.direct = schema.overhead >= _DIRECT_BYTES

    def begin(self, epoch: int, samples: npt.NDArray[np.int64]) -> Slots:
        return _Arrays(self, len(samples))


class _Arrays:
    def __init__(self, maker: ArrayMaker, count: int) -> None:
        self._maker = maker
        self._count = count
        self._arrays = {name: memory.take() for name, memory in maker.memories.items()}

    def pieces(self, slot: int) -> list[memoryview] | None:
        if not self._maker.direct:
            return None
        return [
            memoryview(bytearray(end - begin))
            if name is None
            else memoryview(self._arrays[name][slot].reshape(-1).view(np.uint8))
            for name, begin, end in self._maker.parts
        ]

    def kept(self, slot: int, sample: int) -> float | None:
        return None

    def filled(self, slot: int, pieces: list[memoryview]) -> None:
        schema = self._maker.data.reader.schema
        for piece, (name, begin, end) in zip(pieces, self._maker.parts, strict=True):
            if name is None:
                for scalar, value in schema.scalars_in(piece, begin, end):
                    self._arrays[scalar][slot] = value

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        for name, value in _split(self._maker.data, sample, payload).items():
            self._arrays[name][slot] = value
        return 0.0

    def finish(self, kept: Sequence[int] | None) -> Any:
        made = {}
        for name, array in self._arrays.items():
            made[name] = torch.from_numpy(
                array[: self._count] if kept is None else array[list(kept)]
            )
        return _listed(self._maker.data.reader.schema.arrange(made))


class SampleMaker:
    """Anything else: samples one by one, then the loader's collate_fn."""

    owns_payloads = True

    def __init__(self, data: Dataset, batch_size: int, collate: Collate) -> None:
        self.data = data
        self.collate = collate
        self.batch_bytes = batch_size * data_bytes(data.reader) // max(1, len(data))

    def begin(self, epoch: int, samples: npt.NDArray[np.int64]) -> Slots:
        return _Samples(self, len(samples))


class _Samples(_Decoded):
    def __init__(self, maker: SampleMaker, count: int) -> None:
        self._maker = maker
        self._made: list[Any] = [None] * count

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        data = self._maker.data
        if data.finish is not None:
            self._made[slot] = data.finish(payload, sample)
            return 0.0
        whole = decode_sample(data.reader.schema, payload, data.reader.name(sample))
        if data.transform is None:
            self._made[slot] = whole
            return 0.0
        started = time.perf_counter()
        self._made[slot] = data.transform(whole)
        return time.perf_counter() - started

    def finish(self, kept: Sequence[int] | None) -> Any:
        made = self._made if kept is None else [self._made[slot] for slot in kept]
        return self._maker.collate(made) if made else torch.empty(0)


def _split(data: Dataset, sample: int, payload: Buffer) -> dict[str, Any]:
    reader = data.reader
    try:
        return reader.schema.split(payload)
    except CorruptBlock as error:
        raise SourceError(f"{reader.path}: sample {reader.name(sample)!r}: {error}") from error


def _listed(tree: Any) -> Any:
    """Tuples as lists, as default_collate gives them."""
    if isinstance(tree, tuple):
        return [_listed(item) for item in tree]
    return {key: _listed(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _is_arrays(data: Dataset) -> bool:
    """Whether all fields are numbers and arrays of fixed shapes, to which collating adds
    nothing but a dimension."""
    schema = data.reader.schema
    return schema.is_fixed and all(
        schema.kinds[name].dtype is not None for name, _ in schema.fields
    )


def _shape(schema: Schema, name: str) -> tuple[int, ...]:
    return tuple(size or 0 for size in schema.kinds[name].shape)


def _dtype(schema: Schema, name: str) -> Any:
    """As default_collate has it: Python's numbers become int64 and float64."""
    kind = schema.kinds[name]
    assert kind.dtype is not None
    if kind.shape or kind.dtype == np.bool_:
        return kind.dtype
    return np.dtype(np.int64 if np.issubdtype(kind.dtype, np.integer) else np.float64)

"""Makers of batches: payloads are decoded into the slots of a batch, and the batch is finished.

Here are those of arrays and of samples of any kind, and the choice among them; `CropBatchBuilder`,
`DeviceDecodeBuilder` and `DeviceTierBuilder` have files of their own.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import Buffer, Schema
from dlio.errors import UsageError
from dlio.loader.contract import BatchData, CollateFn, Sample
from dlio.loader.planned_engine.batch_builders import BatchMemory
from dlio.loader.planned_engine.mixup_partners import BatchPartners
from dlio.loader.planned_engine.slots import BatchBuilder, Slots
from dlio.loader.recipe import Recipe
from dlio.loader.streams import HostMemoryKind
from dlio.loader.torch_private import tree_map

_DIRECT_BYTES: Final = 1 << 16
"""Least bytes of a sample of arrays that is read into the batch itself, without another copy."""


def maker_for(
    recipe: Recipe,
    batch_size: int,
    collate: CollateFn,
    default: bool,
    pinned: HostMemoryKind,
) -> BatchBuilder:
    """Choose the maker for a data set whose samples are not crops of images.

    Args:
        collate: of the loader; `default` is True if it is torch's own.
        pinned: kind of the batches' memory.
    """
    if default and recipe.is_plain and _is_arrays(recipe.reader.schema):
        return ArrayBatchBuilder(recipe, batch_size, pinned)
    if default and recipe.ragged:
        return SampleBatchBuilder(recipe, batch_size, _as_lists)
    return SampleBatchBuilder(recipe, batch_size, collate)


class ArrayBatchBuilder:
    """Samples of arrays and numbers of fixed shapes, each field in a batch array of its own."""

    owns_payloads = False

    def __init__(self, recipe: Recipe, batch_size: int, pinned: HostMemoryKind) -> None:
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
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: BatchPartners | None = None
    ) -> Slots:
        return (_DirectArrays if self.direct else _Arrays)(self, len(samples))


class _Arrays:
    def __init__(self, maker: ArrayBatchBuilder, count: int) -> None:
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


class SampleBatchBuilder:
    """Samples of any kind, made one by one, then collated by the loader's collate_fn."""

    owns_payloads = True

    def __init__(self, recipe: Recipe, batch_size: int, collate: CollateFn) -> None:
        self.recipe = recipe
        self.collate = collate
        self.batch_bytes = batch_size * recipe.sample_bytes

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: BatchPartners | None = None
    ) -> Slots:
        return _Samples(self, epoch, len(samples))


class _Samples:
    def __init__(self, maker: SampleBatchBuilder, epoch: int, count: int) -> None:
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

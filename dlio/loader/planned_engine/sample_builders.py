"""The kinds of batches in the host's memory, chosen by their recipe: crops of images (see
`batch_builders`), arrays of fixed shapes, and samples of any kind.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock, UsageError
from dlio.image.native import pool_library
from dlio.image.native.pool_library import address_of
from dlio.loader.contract import BatchData, CollateFn, Sample
from dlio.loader.delivery import HostMemoryKind
from dlio.loader.patch_source import PatchRecipe
from dlio.loader.planned_engine.batch_builders import (
    BatchBuilder,
    BatchFactory,
    CropBatchBuilder,
    PixelNumbers,
    rows_of,
)
from dlio.loader.planned_engine.batch_memory import (
    MOST_TOGETHER,
    BatchMemory,
    CropMemory,
    batches_together,
)
from dlio.loader.planned_engine.mixup_partners import BatchPartners
from dlio.loader.planned_engine.native_pool import NativeArrays, NativeInput, NativeRecipe
from dlio.loader.planned_engine.patch_builder import patch_batches
from dlio.loader.recipe import CropRecipe, Recipe
from dlio.loader.sample import no_samples
from dlio.loader.sample_recipes import FieldRecipe
from dlio.loader.torch_private import tree_map
from dlio.storage.block import aligned
from dlio.storage.decoded_tier import DecodedTier
from dlio.util.printable import tell_once

# For smaller ones the pieces of memory cost more than the copy that they save.
_DIRECT_BYTES: Final = 1 << 16
"""Least bytes of a sample of arrays that is read into the batch itself, without another copy."""
_PAYLOADS_BYTES: Final = 8 << 20
"""Most bytes of the payloads of a batch, about, that native threads read."""
_NUMBERS_BYTES: Final = 256 << 20
"""Most bytes of a batch of crops that is made of numbers in place of bytes from the start."""
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of numbers of so many bytes that numpy has, too."""


def host_batches(
    recipe: Recipe,
    batch_size: int,
    collate: CollateFn | None,
    kind: HostMemoryKind,
    decoded: DecodedTier | None,
    stays: bool,
) -> BatchFactory:
    """Return the factory of batches that are made in the host's memory, of `batch_size` samples at
    most; `collate` is None for torch's own. A batch that `stays` there is handed out as it is."""
    if isinstance(recipe, CropRecipe):
        return _crop_batches(recipe, batch_size, collate, kind, decoded, stays)
    if collate is None and isinstance(recipe, FieldRecipe) and recipe.is_plain_arrays:
        return _array_batches(recipe, batch_size, kind)
    if collate is None and isinstance(recipe, FieldRecipe) and recipe.is_of_texts:
        texts = _text_batches(recipe, batch_size, kind)
        if texts is not None:
            return texts
    if collate is None and isinstance(recipe, PatchRecipe):
        patches = patch_batches(recipe, batch_size, kind)
        if patches is not None:
            return patches
    if collate is None:
        collate = _as_lists if recipe.ragged else torch.utils.data.default_collate

    empty = _EmptyBatch(recipe, collate)

    def begin(
        epoch: int, samples: npt.NDArray[np.int64], _: Sequence[int], __: BatchPartners | None
    ) -> SampleBatchBuilder:
        return SampleBatchBuilder(recipe, collate, epoch, samples, empty, native is not None)

    size = batch_size * recipe.sample_bytes
    # Of large payloads the reading is the smaller part, and one batch would hold all of them.
    reads = size <= _PAYLOADS_BYTES and not isinstance(recipe, PatchRecipe)
    native = None
    if reads and pool_library.find() is not None:
        native = NativeRecipe(recipe.reader.schema, (), whole=True)
    # Arrays of samples share their payloads' memory: stacking them copies them anyway.
    return BatchFactory(begin, size, native, keeps_payloads=True)


def _crop_batches(
    recipe: CropRecipe,
    batch_size: int,
    collate: CollateFn | None,
    kind: HostMemoryKind,
    decoded: DecodedTier | None,
    stays: bool,
) -> BatchFactory:
    shape = recipe.crop.shape
    rows = 2 * batch_size if recipe.pairs else batch_size  # With room for a partner of each.
    images = BatchMemory((rows, *shape), np.uint8, kind)
    in_planes = (rows, *shape[:-3], shape[-1], *shape[-3:-1])
    planar = BatchMemory(in_planes, np.uint8, kind) if recipe.contiguous else None
    native, made = _native_crops(recipe, decoded), None
    if native is not None and stays and not recipe.transforms and recipe.batch_transform:
        made = recipe.batch_transform.values()
    # Batches of numbers wait in four times the memory, but converting them as they are handed out
    # takes as long as the decoding, in one thread: those of moderate size are made of them.
    if made is None or rows * math.prod(shape) * made.itemsize > _NUMBERS_BYTES:
        size, together = batch_size * math.prod(shape), 1
        is_plain = collate is None and decoded is None and not recipe.transforms
        # Of these a batch is the memory of its slots, as it is.
        if native is not None and is_plain and recipe.batch_transform is None:
            together = MOST_TOGETHER if planar is None else batches_together(size)

        def begin(
            epoch: int,
            samples: npt.NDArray[np.int64],
            sizes: Sequence[int],
            partners: BatchPartners | None,
        ) -> CropBatchBuilder:
            memory = CropMemory(images, sizes)
            return CropBatchBuilder(
                recipe, collate, decoded, memory, epoch, samples, partners, None, planar
            )

        return BatchFactory(begin, size, native, together)

    dtype, bits = made.dtype, made.view(_BITS[made.itemsize]).numpy()
    memories = BatchMemory((rows, *shape), bits.dtype, kind)
    planar = BatchMemory(in_planes, bits.dtype, kind) if recipe.contiguous else None

    def begin_numbers(
        epoch: int,
        samples: npt.NDArray[np.int64],
        sizes: Sequence[int],
        partners: BatchPartners | None,
    ) -> CropBatchBuilder:
        numbers = PixelNumbers(CropMemory(memories, sizes), bits, dtype)
        # Written where native threads leave a picture to Python's.
        memory = CropMemory(images, sizes)
        return CropBatchBuilder(
            recipe, collate, decoded, memory, epoch, samples, partners, numbers, planar
        )

    return BatchFactory(
        begin_numbers,
        batch_size * math.prod(shape) * bits.itemsize,
        _native_crops(recipe, decoded, bits),
    )


def _native_crops(
    recipe: CropRecipe, decoded: DecodedTier | None, values: npt.NDArray[Any] | None = None
) -> NativeRecipe | None:
    numbers, schema = recipe.companion.numbers, recipe.reader.schema
    if numbers is None:
        return None
    if recipe.decoder.kept and (decoded is None or not recipe.crop.train):
        return None
    if not NativeRecipe.knows(schema, numbers, recipe.crop):
        return None
    return NativeRecipe(schema, numbers, recipe.crop, values=values)


# Arrays and numbers of fixed shapes


def _array_batches(recipe: FieldRecipe, batch_size: int, kind: HostMemoryKind) -> BatchFactory:
    schema = recipe.reader.schema
    names = [name for name, _ in schema.fields]
    memories = _memories(schema, names, batch_size, kind)
    parts = _parts(schema) if schema.overhead >= _DIRECT_BYTES else []

    def begin(
        _: int, samples: npt.NDArray[np.int64], __: Sequence[int], ___: BatchPartners | None
    ) -> ArrayBatchBuilder:
        arrays = {name: memory.take(len(samples)) for name, memory in memories.items()}
        return ArrayBatchBuilder(recipe, arrays, parts, samples)

    native = NativeRecipe(schema, names) if NativeRecipe.knows(schema, names, None) else None
    size = batch_size * schema.overhead
    return BatchFactory(begin, size, native, together=batches_together(size) if native else 1)


def _memories(
    schema: Schema, names: Sequence[str], batch_size: int, kind: HostMemoryKind
) -> dict[str, BatchMemory]:
    shapes = {name: [size or 0 for size in schema.kinds[name].shape] for name in names}
    return {
        name: BatchMemory((batch_size, *shape), _dtype(schema, name), kind)
        for name, shape in shapes.items()
    }


class ArrayBatchBuilder(BatchBuilder):
    """Samples of arrays and numbers of fixed shapes, each field in a batch array of its own.

    `arrays` is uninitialised memory of each field. `parts` are the arrays of a payload, in its
    order, and the stretches between them, which have no name: (name or None, first byte, end); none
    for small samples.
    """

    def __init__(
        self,
        recipe: FieldRecipe,
        arrays: dict[str, npt.NDArray[Any]],
        parts: list[tuple[str | None, int, int]],
        samples: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(samples)
        self._recipe, self._arrays, self._parts = recipe, arrays, parts
        self.reads_directly = bool(parts)
        self.native = NativeArrays(arrays)

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        for slot, payload in zip(slots, payloads, strict=True):
            try:
                fields = self._recipe.fields(int(self.samples[slot]), payload)
                for name, value in fields.items():
                    self._arrays[name][slot] = value
            except Exception as error:
                self.failed[slot] = error
        return 0.0

    def read_directly(
        self, slot: int, read: Callable[[Sequence[memoryview]], str]
    ) -> tuple[str, int]:
        pieces = [
            memoryview(bytearray(end - begin))
            if name is None
            else memoryview(self._arrays[name][slot].reshape(-1).view(np.uint8))
            for name, begin, end in self._parts
        ]
        place = read(pieces)
        schema = self._recipe.reader.schema
        for piece, (name, begin, end) in zip(pieces, self._parts, strict=True):
            if name is None:
                for scalar, value in schema.scalars_in(piece, begin, end):
                    self._arrays[scalar][slot] = value
        return place, sum(map(len, pieces))

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        rows = rows_of(slots)
        tensors = {name: torch.from_numpy(array[rows]) for name, array in self._arrays.items()}
        structure = self._recipe.reader.schema.structure
        # Lists where a sample has tuples, as default_collate has them.
        return tensors if structure is None else tree_map(tensors.__getitem__, structure)


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


def _dtype(schema: Schema, name: str) -> np.dtype[Any]:
    """The type that default_collate gives: Python's numbers become int64 and float64."""
    kind = schema.kinds[name]
    assert kind.dtype is not None
    if kind.shape or kind.dtype == np.bool_:
        return kind.dtype
    return np.dtype(np.int64 if np.issubdtype(kind.dtype, np.integer) else np.float64)


# Texts, and arrays of fixed shapes next to them


class PayloadBatchBuilder(BatchBuilder):
    """Samples that Python makes of their payloads, which native threads may read for it."""

    transforms = True

    def __init__(self, samples: npt.NDArray[np.int64]) -> None:
        super().__init__(samples)
        self._payloads: list[Buffer] = [b""] * len(samples)
        self._memories: list[npt.NDArray[np.uint8]] = []

    def read_natively(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Have native threads read the payloads, and their fields into `arrays`."""
        addresses = np.zeros(len(self.samples), np.int64)
        self.native = NativeArrays(arrays, addresses, crops=self._memories)

    def make_room(self, given: NativeInput, known: npt.NDArray[np.bool_]) -> None:
        assert self.native is not None
        assert self.native.images is not None
        slots, sizes = given.slots[known], given.locations.column("raw")[known]
        ends = np.cumsum(aligned(sizes))
        memory, starts = np.empty(int(ends[-1]), np.uint8), ends - aligned(sizes)
        self._memories.append(memory)  # A thread that hangs may write to it after the batch.
        self.native.images[slots] = address_of(memory) + starts
        rows = zip(slots.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
        data, payloads = memory.data, self._payloads
        for slot, start, end in rows:
            payloads[slot] = data[start:end]


def _text_batches(
    recipe: FieldRecipe, batch_size: int, kind: HostMemoryKind
) -> BatchFactory | None:
    """Return the factory of batches with texts; None where native threads do not read them."""
    schema = recipe.reader.schema
    names = [name for name, _ in schema.fields if schema.kinds[name].fixed]
    size = batch_size * recipe.sample_bytes
    if size > _PAYLOADS_BYTES or not NativeRecipe.knows(schema, names, None, whole=True):
        return None
    memories = _memories(schema, names, batch_size, kind)

    def begin(
        _: int, samples: npt.NDArray[np.int64], __: Sequence[int], ___: BatchPartners | None
    ) -> TextBatchBuilder:
        arrays = {name: memory.take(len(samples)) for name, memory in memories.items()}
        return TextBatchBuilder(recipe, arrays, samples)

    native = NativeRecipe(schema, names, whole=True)
    return BatchFactory(begin, size, native, together=batches_together(size))


class TextBatchBuilder(PayloadBatchBuilder):
    """Samples with texts or bytes: lists of them, next to a batch array of each other field."""

    def __init__(
        self,
        recipe: FieldRecipe,
        arrays: dict[str, npt.NDArray[Any]],
        samples: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(samples)
        self.read_natively(arrays)
        self._recipe, self._arrays = recipe, arrays
        fields, count = recipe.reader.schema.fields, len(samples)
        self._lists: dict[str, list[Any]] = {
            name: [None] * count for name, _ in fields if name not in arrays
        }

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        for slot, payload in zip(slots, payloads, strict=True):
            try:
                made = self._recipe.one(0, int(self.samples[slot]), payload)
                for name, value in made.items():
                    into = self._arrays[name] if name in self._arrays else self._lists[name]
                    into[slot] = value
            except Exception as error:
                self.failed[slot] = error
        return 0.0

    def transform(self, slots: Sequence[int]) -> float:
        schema, lists = self._recipe.reader.schema, self._lists
        for slot in slots:
            payload = memoryview(self._payloads[slot])
            try:
                for name, kind, body in schema.bodies(payload):
                    lists[name][slot] = str(body, "utf-8") if kind.text == "text" else bytes(body)
            except (CorruptBlock, UnicodeDecodeError):
                self.make_many([slot], [payload])  # With the error that names the sample.
        return 0.0

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        rows, made = rows_of(slots), dict[str, Any]()
        for name, _ in self._recipe.reader.schema.fields:
            if name in self._arrays:
                made[name] = torch.from_numpy(self._arrays[name][rows])
            else:
                values = self._lists[name]
                made[name] = values if slots is None else [values[slot] for slot in slots]
        return made


# Samples of any kind


class _EmptyBatch:
    """The batch of which all samples were skipped: it is not left out, as other ranks have theirs
    and would wait. Its fields are those of other batches, with no rows."""

    def __init__(self, recipe: Recipe, collate: CollateFn) -> None:
        self._recipe, self._collate = recipe, collate
        self._like: BatchData | None = None

    def note(self, made: BatchData) -> None:
        """Note the fields of a batch, where only the user's functions know them."""
        if self._like is None and not self._is_known:
            self._like = _without_rows(made)

    @property
    def _is_known(self) -> bool:
        recipe = self._recipe
        plain = isinstance(recipe, FieldRecipe) and recipe.transform is None
        return self._collate is torch.utils.data.default_collate and plain

    def made(self) -> BatchData:
        """Return the batch of no samples."""
        if self._is_known:
            return no_samples(self._recipe.reader.schema)
        if self._collate is _as_lists:
            return [], []
        if self._like is None:
            tell_once(
                f"{self._recipe.reader.path}: all samples of a batch were skipped before any other "
                "was made: the fields of batches are not known yet, and it is an empty tensor"
            )
            return torch.empty(0)
        return _without_rows(self._like)


def _without_rows(made: BatchData) -> BatchData:
    """Return a batch with no rows: empty tensors and lists in a dictionary or a tuple of them."""
    if isinstance(made, torch.Tensor):
        return made[:0].clone()
    if isinstance(made, dict):
        return {name: _without_rows(each) for name, each in made.items()}
    if isinstance(made, tuple):
        return tuple(_without_rows(each) for each in made)
    # As default_collate makes of tuples.
    is_of_fields = isinstance(made, list) and made and isinstance(made[0], torch.Tensor)
    return [_without_rows(each) for each in made] if is_of_fields else []


class SampleBatchBuilder(PayloadBatchBuilder):
    """Samples of any kind, made one by one, then collated by the loader's collate_fn."""

    def __init__(
        self,
        recipe: Recipe,
        collate: CollateFn,
        epoch: int,
        samples: npt.NDArray[np.int64],
        empty: _EmptyBatch,
        reads_natively: bool,
    ) -> None:
        super().__init__(samples)
        if reads_natively:
            self.read_natively({})
        self._empty = empty
        self._recipe, self._collate, self._epoch = recipe, collate, epoch
        self._made: list[Sample] = [None] * len(samples)

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        seconds = 0.0
        for slot, payload in zip(slots, payloads, strict=True):
            try:
                self._made[slot], more = self._recipe.make(
                    self._epoch, int(self.samples[slot]), payload
                )
                seconds += more
            except BaseException as error:
                self.failed[slot] = error
        return seconds

    def transform(self, slots: Sequence[int]) -> float:
        return self.make_many(slots, [self._payloads[slot] for slot in slots])

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        samples = self._made if slots is None else [self._made[slot] for slot in slots]
        if not samples:
            return self._empty.made()
        try:
            made = self._collate(samples)
        except RuntimeError as error:
            if self._collate is torch.utils.data.default_collate:
                _check_shapes(samples, self._recipe.reader.path, error)
            raise
        self._empty.note(made)
        return made


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

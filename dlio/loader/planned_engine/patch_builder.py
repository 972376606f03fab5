"""Batches of patches: parts of chunks, copied into the batch by native threads."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.patches import POSITION, VOLUME, PatchReader
from dlio.data.schema import Buffer
from dlio.image.native import pool_library
from dlio.image.native.pool_library import address_of
from dlio.loader.contract import BatchData
from dlio.loader.delivery import HostMemoryKind
from dlio.loader.patch_source import PatchRecipe
from dlio.loader.planned_engine.batch_builders import (
    BatchBuilder,
    BatchFactory,
    rows_of,
)
from dlio.loader.planned_engine.batch_memory import BatchMemory, batches_together
from dlio.loader.planned_engine.mixup_partners import BatchPartners
from dlio.loader.planned_engine.native_pool import (
    NativeArrays,
    NativeInput,
    NativeRecipe,
)
from dlio.loader.planned_engine.patch_tables import PatchTables, tables_of
from dlio.plan.epoch import EpochPlan

_LARGEST: Final = 8
"""Bytes of an element: larger ones are of types that torch lacks."""


class PatchBatches:
    """The batches of a loader of patches. Made by `patch_batches`."""

    def __init__(
        self, recipe: PatchRecipe, tables: PatchTables, batch_size: int, kind: HostMemoryKind
    ) -> None:
        self.recipe, self.tables = recipe, tables
        patches = recipe.source.patches
        shapes = {each.name: (each.shape, each.dtype) for each in tables.fields}
        beside: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        number = np.dtype(np.int64)
        if len(patches.classes):
            beside["label"] = (), number
        if patches.on_grid:
            beside |= {POSITION: ((len(patches.sides),), number), VOLUME: ((), number)}
        self.beside = [name for name in beside if name not in shapes]
        """Fields that the formula of patches gives."""
        self.memories = {
            name: BatchMemory((batch_size, *shape), dtype, kind)
            for name, (shape, dtype) in {**beside, **shapes}.items()
        }
        self.order = [*shapes, *self.beside]
        self.intact = np.zeros(len(recipe.source.chunks), np.uint8)

    def factory(self) -> BatchFactory:
        """Return the factory of a loader's batches."""
        bytes_of_batch = sum(memory.bytes for memory in self.memories.values())
        schema = self.recipe.reader.schema
        native = NativeRecipe(schema, ()) if pool_library.find() is not None else None
        together = 1 if native is None else batches_together(bytes_of_batch)
        return BatchFactory(
            *(self.begin, bytes_of_batch, native, together, self.recipe.source.hierarchy),
            follow_plan=self.follow_plan,
        )

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], _: Sequence[int], __: BatchPartners | None
    ) -> "PatchBatchBuilder":
        """Begin a batch."""
        arrays = {name: self.memories[name].take(len(samples)) for name in self.order}
        return PatchBatchBuilder(self, arrays, epoch, samples)

    def follow_plan(self, _: EpochPlan) -> None:
        """Begin a pass: chunks are compared with their checksums anew."""
        self.intact = np.zeros_like(self.intact)


class PatchBatchBuilder(BatchBuilder):
    """Patches, each field in a batch array of its own: a dictionary of tensors."""

    has_inputs = True

    def __init__(
        self,
        batches: PatchBatches,
        arrays: dict[str, npt.NDArray[Any]],
        epoch: int,
        samples: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(samples)
        self._batches, self._arrays, self._epoch = batches, arrays, epoch
        self._recipe = batches.recipe
        if self._recipe.source.hierarchy is not None:
            self.native = NativeArrays(arrays)

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        for slot, payload in zip(slots, payloads, strict=True):
            try:
                number = PatchReader.number_of(payload)
                for name, value in self._recipe.fields_of(self._epoch, number).items():
                    self._arrays[name][slot] = value
            except BaseException as error:
                self.failed[slot] = error
        return 0.0

    def native_input(self, slots: npt.NDArray[np.int64]) -> NativeInput:
        """Return the parts of chunks that make up the patches of slots, and write all else."""
        source, batches = self._recipe.source, self._batches
        patches, hierarchy = source.patches, source.hierarchy
        assert hierarchy is not None
        samples = self.samples[slots]
        numbers = patches.numbers(samples, self._recipe.reader)
        arrays = [self._arrays[field.name] for field in batches.tables.fields]
        fields, volumes, starts = batches.tables.pieces(
            *(numbers, slots, self._recipe.seed, self._epoch), list(map(address_of, arrays))
        )
        for field, array, parts in zip(batches.tables.fields, arrays, fields, strict=True):
            if parts.padded.any():
                array[slots[parts.padded]] = np.asarray(field.pad).astype(field.dtype)
        for name in batches.beside:
            if name == "label":
                self._arrays[name][slots] = np.asarray(patches.labels)[numbers]
            else:
                self._arrays[name][slots] = starts if name == POSITION else volumes
        chunks = _joined([parts.chunk for parts in fields])
        blocks, places = source.chunks.layout.locate(chunks)
        located = hierarchy.locate(chunks, blocks, places)
        # Python says what is wrong with a chunk of another size.
        located.known[:] &= located.column("raw") == source.chunks.sizes[chunks]
        return NativeInput(
            slots[_joined([parts.row for parts in fields])],
            located,
            blocks,
            hierarchy,
            _joined([parts.piece for parts in fields]),
            intact=batches.intact,
        )

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        made, wanted = {}, rows_of(slots)
        for name, array in self._arrays.items():
            rows = array[wanted]
            if rows.ndim == 1 and rows.dtype != np.bool_:
                # Python's numbers, as default_collate has them.
                rows = rows.astype(np.float64 if rows.dtype.kind == "f" else np.int64, copy=False)
            made[name] = torch.from_numpy(rows)
        return made


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays as one; without a copy if there is only one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def patch_batches(
    recipe: PatchRecipe, batch_size: int, kind: HostMemoryKind
) -> BatchFactory | None:
    """Return the factory of batches of patches whose fields have one shape each; None for others,
    and for those that go through a transform."""
    if recipe.transform is not None:
        return None
    tables = tables_of(recipe.source.patches)
    if tables is None or any(
        each.dtype.itemsize > _LARGEST or (not each.shape and each.dtype == np.uint64)
        for each in tables.fields
    ):
        return None
    return PatchBatches(recipe, tables, batch_size, kind).factory()

"""Patches as samples: chunks are read through tiers of their own, and patches cut out of them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator
from dlio.data.chunks import ChunkReader
from dlio.data.patches import POSITION, VOLUME, PatchOptions, PatchReader, PatchSlice
from dlio.data.reader_contract import Reader, abilities_of
from dlio.data.replicas import replicated
from dlio.data.schema import Buffer
from dlio.errors import SourceError
from dlio.loader.contract import Sample, Transform
from dlio.loader.recipe import Recipe
from dlio.storage.file_system_kind import file_system_of
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.mount import Mount, MountOptions, mount
from dlio.storage.tier_spec import Tiers
from dlio.util.forks import call_in_child
from dlio.util.parallel import each_of


class PatchSource:
    """The chunks that patches are cut out of, in tiers of their own. Thread-safe.

    Picklable: a copy in another process opens its own files, without tiers. Views of a data set
    share one; each of their data sets opens and closes it, and the last to close it closes its
    tiers.

    `patches` is the formula of places; `chunks` reads one copy of the data set, or several.
    """

    def __init__(self, patches: PatchReader, chunks: Reader) -> None:
        self.patches = patches
        self.chunks = chunks
        self._mount: Mount | None = None
        self._users = 0
        self._at_a_time = 1
        """Chunks of a patch that are read at a time: several where each is a request over a
        network."""
        call_in_child(self._lose_readers)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_mount": None, "_users": 0, "_at_a_time": 1}

    def mount(
        self, tiers: Tiers | None, comm: Communicator, nodes: int | None, requests: int | None
    ) -> Mount:
        """Open the tiers, once; each node keeps all chunks if it has room. Collective."""
        self._users += 1
        if self._mount is None:
            options = MountOptions(layout="auto", requests=requests)
            self._mount = mount(self.chunks, tiers, comm, nodes, options=options)
            if file_system_of(self.chunks.path).network:
                self._at_a_time = self._mount.requests
        return self._mount

    def _lose_readers(self) -> None:
        self._at_a_time = 1  # Alone, as all that a child reads.

    def unmount(self) -> None:
        """Close the tiers, if nobody else uses it."""
        self._users -= 1
        if self._users == 0 and self._mount is not None:
            self._at_a_time = 1
            self._mount.close()
            self._mount = None

    def close(self) -> None:
        """Close files."""
        self.chunks.close()

    @property
    def hierarchy(self) -> Hierarchy | None:
        """The tiers that have the chunks; None without a mount."""
        return None if self._mount is None else self._mount.hierarchy

    def cut(self, number: int, seed: int, epoch: int) -> dict[str, Any]:
        """Return the fields of a patch: arrays, and numbers where a field has no dimensions.

        Raises SourceError if a chunk cannot be read.
        """
        cuts, volume, position = self.patches.cuts(number, seed, epoch)
        values: dict[str, Any] = {}
        for cut in cuts:
            part = self._part(cut)
            values[cut.field] = part if part.ndim else part.item()
        if len(self.patches.classes) and "label" not in values:
            values["label"] = int(self.patches.labels[number])
        if self.patches.on_grid:
            values.setdefault(POSITION, position)
            values.setdefault(VOLUME, volume)
        return values

    def _part(self, cut: PatchSlice) -> npt.NDArray[Any]:
        """Read the chunks that a part touches, and return it with its padding."""
        array = cut.array
        inner = tuple(side.stop - side.start for side in cut.box)
        # Native order: torch has no other.
        dtype = array.dtype.newbyteorder("=")
        out: npt.NDArray[Any] = (
            np.empty(cut.shape, dtype) if inner == cut.shape else np.full(cut.shape, cut.pad, dtype)
        )
        touched = list(array.touched(cut.box))
        parts = self._chunks([cut.first + chunk for chunk, _ in touched])
        for (_, whole), data in zip(touched, parts, strict=True):
            shape = tuple(side.stop - side.start for side in whole)
            held = np.frombuffer(data, array.dtype.newbyteorder("<")).reshape(shape)
            taken, given = [], []
            for side, here, before in zip(cut.box, whole, cut.before, strict=True):
                low, high = max(side.start, here.start), min(side.stop, here.stop)
                taken.append(slice(low - here.start, high - here.start))
                given.append(slice(low - side.start + before, high - side.start + before))
            out[tuple(given)] = held[tuple(taken)]
        return out[0] if cut.row else out

    def _chunks(self, numbers: Sequence[int]) -> list[Buffer]:
        """Read chunks, and note the time by the place that was waited for."""
        if not numbers:
            return []
        counters = None if self._mount is None else self._mount.hierarchy.counters
        earlier = {} if counters is None else counters.take_waits()
        began = time.perf_counter()
        # Several at a time over a network alone: elsewhere a chunk is there before a thread wakes.
        threads = min(self._at_a_time, len(numbers))
        if threads > 1:
            parts = each_of(self._chunk, numbers, threads, self.chunks.path)
        else:
            parts = [self._chunk(number) for number in numbers]
        if counters is not None:
            places = [place for _, place in parts]
            now = "source" if "source" in places else places[0]
            for place, seconds in (*earlier.items(), (now, time.perf_counter() - began)):
                counters.waited(place, seconds)
        return [data for data, _ in parts]

    def _chunk(self, sample: int) -> tuple[Buffer, str]:
        """Read a chunk; return it and the place that was waited for."""
        place = "source"
        if self._mount is None:
            data: Buffer = self.chunks.read(np.array([sample], np.int64))[0]
        else:
            hierarchy = self._mount.hierarchy
            data, place = hierarchy.read_one(sample)
            if place != "source":  # Reads of the source are counted where they happen.
                hierarchy.counters.add_bytes(place, len(data))
            if hierarchy.counters.take_waits():
                place = "source"  # A tier was filled first.
        wanted = int(self.chunks.sizes[sample])
        if len(data) != wanted:
            raise SourceError(
                f"{self.chunks.path}: {self.chunks.name(sample)} has {len(data)} bytes instead of "
                f"{wanted}: the source has changed since it was opened; open it again"
            )
        return data, place


class PatchRecipe(Recipe):
    """Patches as samples: a dictionary of tensors and numbers. Thread-safe."""

    def __init__(
        self, reader: Reader, source: PatchSource, transform: Transform | None, seed: int
    ) -> None:
        super().__init__(reader, None, transform, seed, [transform])
        self.source = source

    @property
    def is_random(self) -> bool:
        return self.source.patches.is_random or super().is_random

    @property
    def sample_bytes(self) -> int:
        return self.source.patches.patch_bytes

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        values = self.fields_of(epoch, PatchReader.number_of(payload))
        made: Sample = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        return self._apply(self.transform, made, epoch, sample)

    def fields_of(self, epoch: int, number: int) -> dict[str, Any]:
        """Return the fields of a patch; see `PatchSource.cut`."""
        return self.source.cut(number, self.seed, epoch)


def open_patches(
    copies: Sequence[Sequence[Reader]], options: PatchOptions, given: Mapping[str, object]
) -> PatchSource:
    """Return the patches of a data set; `copies` has the readers that make up each copy of it.

    Raises UsageError if patches do not fit the arrays.
    """
    chunks = [ChunkReader(readers, options.covers_all) for readers in copies]
    files = given.get("samples") == "files" or all(
        abilities_of(reader).files_are_samples for reader in copies[0]
    )
    return PatchSource(PatchReader(chunks[0], options, files), replicated(chunks))

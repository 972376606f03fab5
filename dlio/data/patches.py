"""Patches of volumes and windows of time: which part of which array each sample is, as a formula.

A volume is a file, or a row of arrays that hold several. Sample i is a patch of a volume: at a
random place that belongs to (seed, epoch, i), in the middle, or on a grid. So every rank knows the
chunks that any sample needs, in any epoch, without a message.
"""

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray
from dlio.data.chunks import ChunkReader
from dlio.data.index import fingerprint_of
from dlio.data.reader_contract import Reader
from dlio.data.schema import Schema
from dlio.errors import UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order, keyed_uniforms
from dlio.util.arguments import named, whole_number
from dlio.util.units import counted

POSITION: Final = "position"
"""Field of a patch on a grid: its first index along each axis that is cut."""
VOLUME: Final = "volume"
"""Field of a patch on a grid: the number of its volume."""
_NUMBER: Final = struct.Struct("<q")
_STREAM: Final = 3
"""Of the keyed random numbers, those for the places of patches."""
_MOST: Final = 1 << 40
_Fill = float | Mapping[str, float] | None


@dataclass(frozen=True)
class PatchOptions:
    """The patches of every volume.

    Raises UsageError for sizes and combinations that cannot work.
    """

    sides: tuple[int | None, ...]
    """Size along each of an array's last dimensions; None for the whole extent. Of a window, that
    along the first dimension."""
    per_volume: int = 1
    """Patches of a volume in an epoch, if they are not on a grid."""
    stride: tuple[int, ...] | None = None
    """Distance of patches on a grid along each axis that is cut; None for random ones."""
    pad: _Fill = None
    """Value around a volume that is smaller than a patch, by field or for all; None: an error."""
    random: bool = True
    """Random places; otherwise the middle."""
    leading: bool = False
    """A window: the first axis is cut, and its grid ends with the last whole window."""

    @property
    def covers_all(self) -> bool:
        """True for patches on a grid that leave nothing out."""
        cut = [side for side in self.sides if side is not None]
        return self.stride is not None and all(map(operator.le, self.stride, cut))

    @classmethod
    def of(
        cls,
        patch: object,
        patches_per_volume: object,
        patch_stride: object,
        window: object,
        pad: object,
        train: bool,
    ) -> "PatchOptions | None":
        """Return the options that a user gave to `dlio.open`; None if samples are not patches."""
        per_volume = whole_number("patches_per_volume", patches_per_volume, 1, 2**31)
        for name, value in (("patch_stride", patch_stride), ("pad", pad)):
            if value is not None and patch is None:
                raise UsageError(f"{name}=: give patch=, such as patch=(64, 64, 64), too")
        if per_volume > 1 and (patch is None or patch_stride is not None):
            raise UsageError("patches_per_volume= is for random patches: give patch= alone with it")
        if window is not None:
            if patch is not None:
                raise UsageError(
                    "window= and patch= exclude each other: time is an axis of a patch as well, "
                    "as in patch=(8, None, 64, 64)"
                )
            length, step = _window(window)
            return cls((length,), stride=(step,), leading=True)
        if patch is None:
            return None
        sides = _sides(patch)
        cut = [side for side in sides if side is not None]
        if not cut:
            raise UsageError(f"{named('patch', patch)}: give a size for one axis at least")
        stride = None if patch_stride is None else _strides(patch_stride, sides)
        if stride is None and not train and per_volume > 1:
            raise UsageError(
                "patches_per_volume= with train=False: for evaluation, patch_stride= lays patches "
                "on a grid; without it, the middle of each volume is taken"
            )
        return cls(sides, per_volume, stride, _pad(pad), random=train)


@dataclass(frozen=True, slots=True)
class PatchSlice:
    """A field's part of one patch."""

    field: str
    array: ChunkedArray
    first: int
    """Number of the array's first chunk among all chunks."""
    box: Box
    """The part that the array has."""
    row: bool
    """True if the box's first dimension is a row, which samples do not have."""
    before: tuple[int, ...]
    """Elements of padding before the part, along each dimension of the box."""
    shape: tuple[int, ...]
    """Of the patch, with padding and the row."""
    pad: float
    """Value of the padding."""


@dataclass(frozen=True, slots=True)
class Volume:
    """An array, or a row of one, that patches are cut out of."""

    file: int
    row: int | None
    """Row of the file's arrays; None if the file is the volume."""
    extent: tuple[int, ...]
    """Along each axis that is cut."""


class PatchReader:
    """A reader of the numbers of patches, and the formula of their places.

    The payload of a sample is its number, so that views, mixtures and orders of patches know it;
    `cuts` says which parts of which arrays that patch is.

    The chunks are not owned. Arrays of more dimensions than a patch have channels first if
    `files_are_volumes`; otherwise their rows are volumes.

    Raises UsageError if patches do not fit the arrays.
    """

    objects = False

    def __init__(
        self, chunks: ChunkReader, options: PatchOptions, files_are_volumes: bool = False
    ) -> None:
        self._given = (chunks, options, files_are_volumes)
        self.chunks, self.options = chunks, options
        self.format, self.path = chunks.format, chunks.path
        self.classes: Sequence[str] = chunks.classes
        """Names of the classes of volumes that are files."""
        self.schema = Schema((("patch", "int64"),))
        arrays = chunks.arrays
        self._main = max(arrays, key=lambda name: len(arrays[name][0].shape))
        self._axes = self._cut_axes()
        self.volumes = self._find_volumes(files_are_volumes)
        self._check_fields()
        self._check_extents()
        self._extents = np.array([each.extent for each in self.volumes], np.int64)
        self._steps = self._count_steps()
        counts = self._steps.prod(1)
        if not counts.any():
            raise UsageError(
                f"{self.path}: no file holds a whole window of {self.sides[0]}: the longest has "
                f"{counted(int(self._extents[:, 0].max()), 'row')}; give a smaller window="
            )
        self._firsts = np.append(0, np.cumsum(counts))
        count = int(self._firsts[-1])
        self.sizes = np.broadcast_to(np.int64(_NUMBER.size), count)
        self.labels = np.broadcast_to(np.int64(0), count)
        if len(self.classes):
            files = [each.file for each in self.volumes]
            self.labels = np.repeat(chunks.labels_of_files[files], counts)
        self.layout = cut_blocks(self.sizes, Order(count, 0, shuffled=False))
        self.fingerprint = fingerprint_of("patches", 1, chunks.fingerprint, repr(options))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __reduce__(self) -> tuple[type["PatchReader"], tuple[object, ...]]:
        return PatchReader, self._given

    def name(self, sample: int) -> str:
        volume, place = self._locate(sample)
        here = self.volumes[volume]
        array = self.chunks.arrays[self._main][here.file]
        row = "" if here.row is None else f"[{here.row}]"
        return f"{array.where}{row} patch {place}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return [_NUMBER.pack(int(sample)) for sample in samples]

    def numbers(self, samples: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        """Return the numbers of the patches that are samples of a reader: this one, or a view."""
        if reader is self:
            return samples
        numbers = np.frombuffer(b"".join(reader.read(samples)), np.dtype("<i8"))
        return numbers.astype(np.int64)

    @staticmethod
    def number_of(payload: bytes | bytearray | memoryview) -> int:
        """Return the number of a patch from its payload."""
        return int(_NUMBER.unpack(payload)[0])

    def close(self) -> None:
        pass

    @property
    def on_grid(self) -> bool:
        """True if patches lie on a grid, so that users need to know where."""
        return self.options.stride is not None and not self.options.leading

    @property
    def is_random(self) -> bool:
        """True if patches are at other places in each epoch."""
        return self.options.stride is None and self.options.random

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch of the first volume."""
        volume = self.volumes[0]
        cuts = self._cuts(volume, [0] * len(self._axes))
        return sum(math.prod(cut.shape) * cut.array.dtype.itemsize for cut in cuts)

    def cuts(
        self, number: int, seed: int, epoch: int
    ) -> tuple[list[PatchSlice], int, npt.NDArray[np.int64]]:
        """Return (parts by field, number of the volume, first index along each axis cut)."""
        (index,), (starts,) = self.places(np.array([number], np.int64), seed, epoch)
        return self._cuts(self.volumes[index], starts.tolist()), int(index), starts

    def places(
        self, numbers: npt.NDArray[np.int64], seed: int, epoch: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where patches begin: (numbers of their volumes, shape (n,), first index along each
        axis that is cut, shape (n, axes)), which is negative before padding."""
        volumes = np.searchsorted(self._firsts, numbers, side="right") - 1
        room = self._extents[volumes] - np.array(self.sides, np.int64)
        left = np.maximum(room, 0)
        if self.options.stride is not None:
            rest = numbers - self._firsts[volumes]
            starts = np.empty_like(room)
            for axis in reversed(range(len(self.sides))):
                steps = self._steps[volumes, axis]
                starts[:, axis] = rest % steps * self.options.stride[axis]
                rest = rest // steps
            starts = np.minimum(starts, left)
        elif self.options.random:
            uniforms = keyed_uniforms(seed, epoch, numbers, len(self.sides), _STREAM)
            starts = (uniforms * (left + 1)).astype(np.int64)
        else:
            starts = left // 2
        # A volume that is smaller than the patch lies in its middle.
        return volumes, np.where(room >= 0, starts, -(-room // 2))

    @property
    def by_row(self) -> bool:
        """True if volumes are rows of the arrays."""
        return self.volumes[0].row is not None

    @property
    def sides(self) -> tuple[int, ...]:
        return tuple(side for side in self.options.sides if side is not None)

    def _cut_axes(self) -> list[int]:
        """Return the axes of the largest field that are cut, counted from its end or its begin."""
        sides = self.options.sides
        if self.options.leading:
            return [0]
        return [k - len(sides) for k, side in enumerate(sides) if side is not None]

    def _find_volumes(self, files_are_volumes: bool) -> list[Volume]:
        volumes = []
        sides, arrays = self.options.sides, self.chunks.arrays[self._main]
        dimensions = {len(each.shape) for each in arrays}
        shortest = min(dimensions)
        if shortest < len(sides) or len(dimensions) > 1:
            raise UsageError(
                f"{self.path}: patches of {counted(len(sides), 'dimension')}, and {self._main} has "
                f"{' or '.join(map(str, sorted(dimensions)))}: give patch= a size for each of the "
                "last dimensions, None for a whole one"
            )
        rows = shortest > len(sides) and not files_are_volumes and not self.options.leading
        for file, array in enumerate(arrays):
            extent = tuple(array.shape[axis] for axis in self._axes)
            numbers = range(array.shape[0]) if rows else [None]
            volumes += [Volume(file, row, extent) for row in numbers]
        if not volumes:
            raise UsageError(f"{self.path} holds no volumes")
        return volumes

    def _check_fields(self) -> None:
        """Raise UsageError if fields have other extents than the largest where they are cut."""
        main = self.chunks.arrays[self._main]
        first_of = {volume.file: volume for volume in reversed(self.volumes)}
        for arrays in self.chunks.arrays.values():
            for file, volume in first_of.items():
                array, rows = arrays[file], main[file].shape[0]
                shape = array.shape if volume.row is None else array.shape[1:]
                fewer = volume.row is not None and (*array.shape, 0)[0] != rows
                for axis, extent in zip(self._axes, volume.extent, strict=True):
                    held = axis >= -len(shape) if axis < 0 else axis < len(shape)
                    if fewer or (held and shape[axis] != extent):
                        raise UsageError(
                            f"{array.where} has the shape {array.shape}, which does not fit "
                            f"{self._main} of {main[file].shape}"
                            ": fields that are cut alike need the same extents; name the arrays "
                            "to read after ::"
                        )

    def _check_extents(self) -> None:
        if self.options.pad is not None or self.options.leading:
            return
        for volume in self.volumes:
            if any(n < side for n, side in zip(volume.extent, self.sides, strict=True)):
                array = self.chunks.arrays[self._main][volume.file]
                raise UsageError(
                    f"{array.where} has {volume.extent} elements along the axes of a patch of "
                    f"{self.sides}: pad=0 fills in the rest; or give a smaller patch="
                )

    def _count_steps(self) -> npt.NDArray[np.int64]:
        """Return the number of patches of each volume along each axis, shape (volumes, axes); of
        shape (volumes, 1) if they are not on a grid."""
        if self.options.stride is None:
            return np.full((len(self.volumes), 1), self.options.per_volume, np.int64)
        room, step = self._extents - np.array(self.sides), np.array(self.options.stride)
        counts: npt.NDArray[np.int64] = 1 + -(-np.maximum(room, 0) // step)
        if self.options.leading:
            counts = np.maximum(room // step + 1, 0)
        return counts

    def _locate(self, sample: int) -> tuple[int, int]:
        """Return (number of the volume, number of the patch in it)."""
        volume = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return volume, sample - int(self._firsts[volume])

    def _cuts(self, volume: Volume, starts: Sequence[int]) -> list[PatchSlice]:
        cuts = []
        for name, arrays in self.chunks.arrays.items():
            array = arrays[volume.file]
            box = [slice(0, n) for n in array.shape]
            before, shape = [0] * len(box), list(array.shape)
            if volume.row is not None:
                box[0], shape[0] = slice(volume.row, volume.row + 1), 1
            sides = zip(self.cut_dimensions(len(box)), self.sides, starts, strict=True)
            for at, side, start in sides:
                if at is None:
                    continue
                n = array.shape[at]
                box[at] = slice(max(0, start), min(n, start + side))
                before[at], shape[at] = max(0, -start), side
            cuts.append(
                PatchSlice(
                    name,
                    array,
                    self.chunks.first(name, volume.file),
                    tuple(box),
                    volume.row is not None,
                    tuple(before),
                    tuple(shape),
                    self.pad_of(name),
                )
            )
        return cuts

    def cut_dimensions(self, dimensions: int) -> list[int | None]:
        """Return the dimension of an array of so many that each axis of a patch is; None where it
        has none."""
        rows = int(self.by_row)
        own = dimensions - rows
        return [
            None if not -own <= axis < own else axis + (dimensions if axis < 0 else rows)
            for axis in self._axes
        ]

    def pad_of(self, name: str) -> float:
        """Return the value around a field of volumes that are smaller than a patch."""
        pad = self.options.pad
        return float(pad.get(name, 0.0) if isinstance(pad, Mapping) else pad or 0.0)


def _sides(patch: object) -> tuple[int | None, ...]:
    if isinstance(patch, int) and not isinstance(patch, bool):
        patch = (patch,)
    if not isinstance(patch, tuple | list) or not patch:
        raise UsageError(
            f"{named('patch', patch)}: give its size along each of the last dimensions, such as "
            "(64, 64, 64)"
        )
    return tuple(None if s is None else whole_number("patch", s, 1, _MOST) for s in patch)


def _strides(given: object, sides: Sequence[int | None]) -> tuple[int, ...]:
    steps = list(given) if isinstance(given, tuple | list) else [given] * len(sides)
    if len(steps) != len(sides):
        raise UsageError(
            f"{named('patch_stride', given)}: give a number, or one for each of the "
            f"{counted(len(sides), 'dimension')} of patch="
        )
    pairs = zip(steps, sides, strict=True)
    return tuple(whole_number("patch_stride", s, 1, _MOST) for s, side in pairs if side is not None)


def _window(given: object) -> tuple[int, int]:
    parts = [given] if isinstance(given, int) else given
    if not isinstance(parts, tuple | list) or len(parts) not in (1, 2):
        raise UsageError(
            f"{named('window', given)}: give a number of steps, or (8, 2) for eight consecutive "
            "steps from every second one on"
        )
    length, step = (*parts, 1)[:2]
    return whole_number("window", length, 1, _MOST), whole_number(
        "stride of window", step, 1, _MOST
    )


def _pad(given: object) -> _Fill:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {str(name): _number(value) for name, value in given.items()}
    return _number(given)


def _number(given: object) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise UsageError(f"{named('pad', given)}: give a number, or one for each field")
    return float(given)

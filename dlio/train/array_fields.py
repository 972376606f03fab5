"""Data sets of arrays, such as volumes: which field a network gets, and which it predicts.

All follows from the schema, so that ranks agree without a message.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dlio.data.labels import LABEL_NAMES
from dlio.data.schema import IMAGES, Kind, Schema
from dlio.errors import UsageError
from dlio.util.arguments import listed, nearest

MOST_CHANNELS: Final = 16
"""Largest first dimension of three that is taken for channels."""
_TARGETS: Final = (*LABEL_NAMES, "classes", "mask", "masks", "segmentation")
"""Names of fields that are predicted, in the order of preference."""
_NUMBERS: Final = "biuf"
_PICTURE_CHANNELS: Final = (3, 4)
_VOLUME: Final = 3
"""Most spatial dimensions."""


@dataclass(frozen=True, slots=True)
class ArrayFields:
    """The fields of a data set of arrays that a network is trained on."""

    input: str
    target: str
    channels: int
    sides: tuple[int, ...]
    """Spatial extents of the input."""
    has_channels: bool
    """True if the input's first dimension is its channels."""
    is_map: bool
    """True if the target has a class for each element."""
    is_real: bool
    """True if the target is a real number."""
    path: str
    """Of the data set, for errors."""


def is_arrays(schema: Schema) -> bool:
    """True if samples hold arrays of one shape, of two dimensions and more, and no pictures."""
    kinds = schema.kinds.values()
    return (
        schema.structure is None
        and not any(kind.text in IMAGES for kind in kinds)
        and any(_is_array(kind) for kind in kinds)
    )


def is_table(schema: Schema) -> bool:
    """True if samples are rows of numbers and texts, and not of images or larger arrays."""
    kinds = schema.kinds.values()
    return (
        schema.structure is None
        and not any(kind.text in IMAGES for kind in kinds)
        and any(kind.scalar or kind.text == "text" or len(kind.shape) == 1 for kind in kinds)
        and all(len(kind.shape) <= 1 for kind in kinds)
    )


def array_fields(path: str, schema: Schema, target: str | None) -> ArrayFields:
    """Choose the fields of a data set for which `is_arrays` holds; its path is for errors.

    The input is the largest array, of shape (height, width), (channels, height, width) or
    (channels, depth, height, width); of three dimensions, the first one is depth if it has more
    than MOST_CHANNELS elements, or if the target has this shape. The target is a number, or an
    array of class numbers of the input's spatial extents; by default a field named `label`,
    `classes` or such.

    Raises UsageError for fields that no task takes.
    """
    kinds = schema.kinds
    if target is not None and target not in kinds:
        raise UsageError(
            f"--target {target}: {path} has no such field; it has {listed(kinds)}"
            f"{nearest(target, kinds)}"
        )
    arrays = [name for name, kind in kinds.items() if _is_array(kind) and name != target]
    if not arrays:
        raise UsageError(f"{path} has no array but {target} to learn from")
    chosen = max(arrays, key=lambda name: _rank(name, kinds[name]))
    name = target or _find_target(path, kinds, chosen)
    kind, shape = kinds[name], _shape(kinds[chosen])
    if kind.dtype is None or kind.dtype.kind not in _NUMBERS or not kind.fixed:
        raise UsageError(f"{path}: {name} is {kind.text}: name a number or an array by --target")
    has_channels = len(shape) > _VOLUME or (
        len(shape) == _VOLUME and shape[0] <= MOST_CHANNELS and _shape(kind) != shape
    )
    if not has_channels and len(shape) == _VOLUME and shape[-1] in _PICTURE_CHANNELS:
        raise UsageError(
            f"{path}: {chosen} has shape {shape}, as pictures with channels last: store them as "
            "(channels, height, width)"
        )
    sides = shape[1:] if has_channels else shape
    if not 1 < len(sides) <= _VOLUME:
        raise UsageError(
            f"{path}: {chosen} has shape {shape}: give arrays of (height, width), (channels, "
            "height, width) or (channels, depth, height, width)"
        )
    is_number = math.prod(_shape(kind)) == 1
    if not is_number and (_shape(kind) != sides or kind.dtype.kind not in "iu"):
        raise UsageError(
            f"{path}: {name} is {kind.text}: training predicts a number, or whole numbers of shape "
            f"{sides}, a class for each element of {chosen}; name another field by --target"
        )
    return ArrayFields(
        chosen,
        name,
        shape[0] if has_channels else 1,
        sides,
        has_channels,
        not is_number,
        kind.dtype.kind == "f",
        path,
    )


def _is_array(kind: Kind) -> bool:
    return (
        kind.fixed
        and len(kind.shape) > 1
        and kind.dtype is not None
        and (kind.dtype.kind in _NUMBERS)
    )


def _shape(kind: Kind) -> tuple[int, ...]:
    return tuple(size or 0 for size in kind.shape)


def _rank(name: str, kind: Kind) -> tuple[int, bool, bool]:
    is_real = kind.dtype is not None and kind.dtype.kind == "f"
    return math.prod(_shape(kind)), name not in _TARGETS, is_real


def _find_target(path: str, kinds: Mapping[str, Kind], chosen: str) -> str:
    others = [name for name in kinds if name != chosen]
    named = [name for name in _TARGETS if name in others]
    if named:
        return named[0]
    if len(others) == 1:
        return others[0]
    if not others:
        raise UsageError(f"{path} has {chosen} alone: training needs a field to predict, too")
    raise UsageError(
        f"{path}: give --target with the field to predict from {chosen}, one of {listed(others)}"
    )

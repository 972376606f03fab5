"""Parts of samples: which slab of every array is read, as `select=` says."""

import operator
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TypeAlias

from dlio.errors import UsageError
from dlio.util.arguments import nearest

Part: TypeAlias = tuple[slice | int, ...]
"""Slices and integers over the leading dimensions of a field."""
Index: TypeAlias = slice | int | EllipsisType
Select: TypeAlias = (
    Mapping[str, Index | Sequence[Index]] | Sequence[Index] | slice | int | EllipsisType | None
)
"""Part of every sample to read, as numpy indexes it: slices, integers and an ellipsis over its own
dimensions, of which the last may be left out. By field name, or for all fields that have
dimensions."""


def slab(select: Select, name: str, shape: tuple[int, ...]) -> Part:
    """Return the part of a field's own dimensions to read. Raises UsageError if it does not fit.

    Args:
        select: the user's choice.
        name: name of the field.
        shape: shape of the field in one sample.
    """
    if select is None:
        return ()
    if isinstance(select, Mapping):
        return _slab(select[name], name, shape) if name in select else ()
    return _slab(select, name, shape) if shape else ()


def slab_shape(shape: tuple[int, ...], select: Part) -> tuple[int, ...]:
    """Shape of the selected part."""
    parts = (*select, *[slice(None)] * (len(shape) - len(select)))
    return tuple(
        len(range(*part.indices(size)))
        for part, size in zip(parts, shape, strict=True)
        if isinstance(part, slice)
    )


def check_select(
    select: Select, path: str, dimensions: Mapping[str, tuple[int, ...] | None]
) -> None:
    """Raise UsageError if a part of `select` would be ignored.

    Args:
        path: path of the data set.
        dimensions: shape of each field in one sample; None where a part of it cannot be read, as of
            text and of values of varying size.
    """
    if select is None:
        return
    able = [name for name, shape in dimensions.items() if shape]
    if not isinstance(select, Mapping):
        if not able and _indices(select):
            raise UsageError(
                f"select= takes a part of every sample, but no field of {path} has dimensions of a "
                "fixed size: leave it out"
            )
        return
    for name in select:
        if name not in able:
            reason = "which has no dimensions of a fixed size" if name in dimensions else "not read"
            raise UsageError(
                f"select= names {name!r}, {reason} in {path}: choose from "
                f"{', '.join(able) or 'nothing, and leave it out'}{nearest(name, able)}"
            )


def _indices(given: Index | Sequence[Index]) -> list[Index]:
    """Return the slices and integers that a user gave, with an ellipsis."""
    return list(given) if isinstance(given, Sequence) else [given]


def _slab(given: Index | Sequence[Index], name: str, shape: tuple[int, ...]) -> Part:
    indices = _indices(given)
    places = [place for place, index in enumerate(indices) if index is Ellipsis]
    if len(places) > 1:
        raise UsageError(f"select= has {len(places)} ellipses for {name!r}: give one at most")
    if indices and not shape:
        raise UsageError(f"select= names {name!r}, whose samples are single values: leave it out")
    if len(indices) - len(places) > len(shape):
        raise UsageError(
            f"select= has {len(indices) - len(places)} dimensions, and samples of {name!r} have "
            f"shape {shape}: give {len(shape)} at most, or a part by field, as in "
            f"select={{{name!r}: (...,)}}"
        )
    if places:
        rest = [slice(None)] * (len(shape) - len(indices) + 1)
        indices[places[0] : places[0] + 1] = rest
    return tuple(
        _bounded(index, size, name, shape) for index, size in zip(indices, shape, strict=False)
    )


def _bounded(index: Index, size: int, name: str, shape: tuple[int, ...]) -> slice | int:
    """Return an index within a dimension of `size`. Raises UsageError for others."""
    wrong = UsageError(f"select= takes slices and integers within {shape} for {name!r}: {index!r}")
    try:
        if isinstance(index, slice):
            bounds = index.indices(size)
        else:
            if isinstance(index, bool | EllipsisType):
                raise wrong
            number = operator.index(index)
            if not -size <= number < size:
                raise wrong
            return number % size
    except (TypeError, ValueError):
        raise wrong from None
    if bounds[2] < 1:
        raise UsageError(f"select= goes backwards for {name!r}: give a step of 1 or more")
    if not len(range(*bounds)):
        raise UsageError(f"select= is empty for {name!r}, which has shape {shape}: {index!r}")
    return slice(*bounds)

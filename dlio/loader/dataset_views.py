"""Views of a data set: samples chosen by a field, parts by a keyed hash, functions of samples.

A view is a data set like the one that it is of: with tiers of its own, of the same specification,
an order that is a formula, and samples that are read and decoded in the same way.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader import Reader, open_reader
from dlio.data.schema import IMAGES
from dlio.errors import SourceError, UsageError
from dlio.loader.contract import Sample, UserDataset
from dlio.loader.sample import decoded_field, label_field
from dlio.util.arguments import MOST_SEED, named, nearest, whole_number
from dlio.util.thread_copies import mine
from dlio.util.units import counted

_I64 = npt.NDArray[np.int64]

_CLASS: Final = "class"
"""Name under which names of classes are asked for, unless a field has it."""
_STRETCH: Final = 1024
"""Samples that are read at a time, of a block."""


def where(reader: Reader, field: str, wanted: object) -> _I64:
    """Return the samples whose field has a wanted value; see `Dataset.where`."""
    chosen = np.flatnonzero(_matches(field_values(reader, field), wanted))
    if not len(chosen):
        raise UsageError(
            f"where({field!r}): none of the {counted(len(reader), 'sample')} of {reader.path} is "
            "wanted, and a view has one at least"
        )
    return chosen.astype(np.int64)


def split(
    reader: Reader,
    by: str | Callable[[str], Any] | None,
    seed: int,
    parts: Mapping[str, float],
) -> dict[str, _I64]:
    """Return the samples of each part, by name; see `Dataset.split`."""
    seed = whole_number("seed", seed, 0, MOST_SEED)
    edges = _edges(parts)
    owners = np.searchsorted(edges, _digests(reader, by, seed), side="right")
    result = {}
    for number, (name, fraction) in enumerate(parts.items()):
        result[name] = np.flatnonzero(owners == number).astype(np.int64)
        if not len(result[name]):
            raise UsageError(
                f"split: {name}={fraction} of {counted(len(reader), 'sample')} has none of them, "
                "by the hash of their keys: give it a larger part, another seed=, or by= with more "
                "groups"
            )
    return result


def results_reader(
    data: UserDataset, reader: Reader, random: bool, function: Callable[[Sample], Sample]
) -> Reader:
    """Return a reader of a function's results, for `Dataset.map`; `reader` has the samples'
    payloads.

    Raises UsageError for samples that are not the same in each epoch.
    """
    if random:
        raise UsageError(
            "map(kept=True) keeps one result a sample, and this data set's crops are random: open "
            "it with image_size=None or train=False, or leave kept out"
        )
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return open_reader(_FunctionResults(data, function), key=f"{reader.fingerprint} {name}")


class _FunctionResults:
    """The function's results as a map-style data set, whose values a reader encodes."""

    def __init__(self, data: UserDataset, function: Callable[[Sample], Sample]) -> None:
        self._data, self._function = data, function
        self.targets = data.targets if len(data.classes) else None
        self.classes = list(data.classes)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Sample:
        return mine(self._function)(self._data[index])


def field_values(reader: Reader, field: str) -> Sequence[Any] | npt.NDArray[Any]:
    """Return a field's value in each sample: an array of numbers or texts, or a list of others.

    Labels come from the reader's index; other fields from one pass over the payloads, block by
    block, in which no image is decoded.

    Raises UsageError for an unknown field and for images.
    """
    schema = reader.schema
    if not isinstance(field, str):
        raise UsageError(f"{named('field', field)}: give its name, such as 'label'")
    if field == _CLASS and field not in schema.kinds and len(reader.classes):
        labels = np.asarray(reader.labels)
        has_class = (labels >= 0) & (labels < len(reader.classes))
        # An unlabelled sample, such as the Hub's -1, has no class: Python's -1 would be the last.
        of_each = np.asarray(reader.classes)[np.where(has_class, labels, 0)]
        return np.where(has_class, of_each, "")
    if field not in schema.kinds:
        names = [name for name, _ in schema.fields]
        classes = f", or {_CLASS!r}" if len(reader.classes) else ""
        raise UsageError(
            f"field {field!r}: samples of {reader.path} have the fields {', '.join(names)}"
            f"{classes}{nearest(field, names)}"
        )
    kind = schema.kinds[field].text
    if kind in IMAGES:
        raise UsageError(
            f"field {field!r} is an image ({kind}): choose by another field, or by name with split"
        )
    if field == label_field(schema) and len(reader.classes):
        return np.asarray(reader.labels, np.int64)
    values: list[Any] = [None] * len(reader)
    # Block by block, as sources are read fastest; samples of a block are in memory together.
    for block in range(reader.layout.blocks):
        samples = reader.layout.samples_of(block)
        for first in range(0, len(samples), _STRETCH):
            part = samples[first : first + _STRETCH]
            for sample, payload in zip(part.tolist(), reader.read(part), strict=True):
                value = schema.split(payload)[field]
                values[sample] = _plain(value, kind, reader, sample)
    scalar = schema.kinds[field].scalar or kind == "text"
    return np.asarray(values) if scalar else values


def _plain(value: Any, kind: str, reader: Reader, sample: int) -> Any:
    """A value that does not share the payload's memory."""
    if isinstance(value, np.ndarray):
        return value.copy()
    try:
        return decoded_field(kind, value, sample)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{reader.path}: sample {reader.name(sample)!r}: {error}") from error


def _matches(values: Sequence[Any] | npt.NDArray[Any], wanted: object) -> npt.NDArray[np.bool_]:
    """True for each value that is wanted; shape (n,)."""
    if callable(wanted):
        if isinstance(values, np.ndarray):
            try:
                together = np.asarray(wanted(values))
            except (TypeError, ValueError, AttributeError):
                together = np.empty(0)  # A predicate of one value.
            if together.dtype == np.bool_ and together.shape == (len(values),):
                return together
        plain = values.tolist() if isinstance(values, np.ndarray) else values
        return np.array([bool(wanted(value)) for value in plain], np.bool_)
    choices: list[Any] = [wanted]
    if isinstance(wanted, list | tuple | set | frozenset | range | np.ndarray):
        choices = list(wanted)
    if isinstance(values, np.ndarray):
        return np.isin(values, np.asarray(choices))
    return np.array([any(np.array_equal(value, each) for each in choices) for value in values])


def _edges(parts: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Return the end of each part but the last, as fractions. Raises UsageError."""
    if len(parts) < 2:
        raise UsageError("split: name two parts or more with their fractions: train=0.9, val=0.1")
    for name, fraction in parts.items():
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not number or not 0 < fraction < 1:
            raise UsageError(f"{named(f'split: {name}', fraction)}: give a fraction from 0 to 1")
    total = math.fsum(parts.values())
    if abs(total - 1) > 1e-9:
        raise UsageError(f"split: the fractions sum to {total:g}: give parts that make up 1")
    return np.cumsum(list(parts.values()))[:-1]


def _digests(
    reader: Reader, by: str | Callable[[str], Any] | None, seed: int
) -> npt.NDArray[np.float64]:
    """Return a number of [0, 1) for each sample, equal for samples of one key; shape (n,)."""
    if by is None or callable(by):
        names = (os.fspath(reader.name(sample)) for sample in range(len(reader)))
        keys: Any = names if by is None else map(by, names)
    else:
        keys = field_values(reader, by)
        keys = keys.tolist() if isinstance(keys, np.ndarray) else keys
    known: dict[object, float] = {}
    digests = np.empty(len(reader), np.float64)
    for sample, key in enumerate(keys):
        text = _key_text(key)
        if text not in known:
            # Not `hash`, which differs from process to process; 53 bits, as a float64 has.
            bits = xxhash.xxh3_64_intdigest(f"{seed}/{text}".encode("utf-8", "surrogateescape"))
            known[text] = (bits >> 11) * 2.0**-53
        digests[sample] = known[text]
    return digests


def _key_text(key: object) -> str:
    """A text that is equal for equal keys, in every process. Raises UsageError for other keys."""
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, str):
        return f"s{key}"
    if isinstance(key, bool | int | float | bytes) or key is None:
        return repr(key)
    if isinstance(key, tuple | list):
        return f"({','.join(map(_key_text, key))})"
    raise UsageError(
        f"split: {named('a key of by=', key)}: give numbers, text, bytes, or tuples of these"
    )

"""Several data sets as one: folders of the same or other classes, stores, sources of a mixture.

`ReaderGroup` numbers the samples of one reader after those of another, and gives the labels of all
readers common numbers; `ConcatReader` and `MixtureReader` are built on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import fingerprint_of
from dlio.data.labels import label_name
from dlio.data.reader_contract import Abilities, Reader, abilities_of
from dlio.data.schema import IMAGES, LABEL, Schema
from dlio.errors import UsageError
from dlio.plan.layout import STORAGE_SEED, Layout, cut_blocks
from dlio.plan.order import Order
from dlio.util.forks import new_lock

_I64 = npt.NDArray[np.int64]


class ReaderGroup:
    """The samples of several readers, numbered one reader after another. Owns the readers.
    `prefixes` are those of the names of each reader's samples."""

    _unnamed_remedy = ""
    """End of the error for a label without a class."""

    def __init__(self, readers: Sequence[Reader], prefixes: Sequence[str], schema: Schema) -> None:
        self._readers, self._prefixes = list(readers), prefixes
        self.schema = schema
        self.firsts = np.cumsum([0, *map(len, readers)])
        """Number of the first sample of each reader, and of all samples; shape (readers + 1,)."""
        self.classes: Sequence[str] = readers[0].classes
        self._labels_of: list[_I64] | None = None
        """New label of each reader's labels; None if they stay."""
        self._label_at = 0
        """Offset of the label in a payload."""

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def sources_of(self, samples: npt.ArrayLike) -> _I64:
        """Return the number of each sample's reader; same shape."""
        owners: _I64 = np.searchsorted(self.firsts, np.asarray(samples), side="right") - 1
        return owners

    def name(self, sample: int) -> str:
        owner = int(self.sources_of(sample))
        inner = self._readers[owner].name(sample - int(self.firsts[owner]))
        return f"{self._prefixes[owner]}: {inner}"

    def read(self, samples: _I64) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        owners = self.sources_of(samples)
        for owner in np.unique(owners).tolist():
            here = np.flatnonzero(owners == owner)
            inner = self._readers[owner].read(samples[here] - self.firsts[owner])
            self._count(owner, sum(map(len, inner)))
            for k, payload in zip(here.tolist(), inner, strict=True):
                payloads[k] = self._relabelled(owner, payload)
        return payloads

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _count(self, owner: int, count: int) -> None:
        """Note the bytes that were read of a reader; by default not at all."""

    def _classes_differ(self) -> bool:
        return any(list(each.classes) != list(self.classes) for each in self._readers)

    def _merge_classes(self, text: str, names: Sequence[str], lacks: str, remedy: str) -> None:
        """Number the classes of all readers by their names, in alphabetical order.

        The arguments are for errors: `text` names what is wrong, that the classes of these readers
        differ, and `lacks` is the predicate of a reader without classes.

        Raises UsageError if labels cannot follow.
        """
        lacking = [
            name for name, each in zip(names, self._readers, strict=True) if not len(each.classes)
        ]
        places = {name: at for name, kind, at in self.schema.places() if kind.text == "int64"}
        field = label_name(places)
        if lacking or field not in places:
            lacking_text = f", and {lacking[0]} {lacks}" if lacking else ""
            raise UsageError(f"{text}: their classes differ{lacking_text}: {remedy}")
        self._label_at = places[field]
        self.classes = sorted({label for each in self._readers for label in each.classes})
        number = {label: k for k, label in enumerate(self.classes)}
        self._labels_of = [
            np.array([number[label] for label in each.classes], np.int64) for each in self._readers
        ]

    def _all_sizes(self) -> _I64:
        return np.concatenate([np.asarray(each.sizes, np.int64) for each in self._readers])

    def _all_labels(self) -> _I64:
        labels = [np.asarray(each.labels, np.int64) for each in self._readers]
        if self._labels_of is not None:
            labels = [new[old] for new, old in zip(self._labels_of, labels, strict=True)]
        return np.concatenate(labels)

    def _relabelled(self, owner: int, payload: bytes | memoryview) -> bytes | memoryview:
        if self._labels_of is None:
            return payload
        changed = bytearray(payload)
        (label,) = LABEL.unpack_from(changed, self._label_at)
        if not 0 <= label < len(self._labels_of[owner]):
            raise UsageError(
                f"{self._prefixes[owner]}: label {label} has no class name{self._unnamed_remedy}"
            )
        LABEL.pack_into(changed, self._label_at, int(self._labels_of[owner][label]))
        return memoryview(changed)


class ConcatReader(ReaderGroup):
    """Data sets of one format, one after another.

    Classes are those of all, in alphabetical order if they differ; labels follow them.

    Raises UsageError when the readers' fields differ, or when labels cannot follow their classes.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        first = readers[0]
        for other in readers[1:]:
            if other.schema != first.schema:
                raise UsageError(
                    f"{other.path} has fields {fields_of(other.schema)}, but {first.path} has "
                    f"{fields_of(first.schema)}: open them one by one"
                )
        paths = [str(each.path) for each in readers]
        super().__init__(readers, paths, first.schema)
        self.format = first.format
        self.objects = first.objects
        self.path = " ".join(paths)
        if self._classes_differ():
            self._merge_classes(self.path, paths, "has none", "open them one by one")
        self.labels = self._all_labels()
        self.sizes = self._all_sizes()
        order = Order(len(self.sizes), STORAGE_SEED, shuffled=bool(first.objects))
        self.layout = cut_blocks(self.sizes, order)
        self.fingerprint = fingerprint_of("joined", 1, *[each.fingerprint for each in readers])

    def __reduce__(self) -> tuple[type["ConcatReader"], tuple[list[Reader]]]:
        return ConcatReader, (self._readers,)


def fields_of(schema: Schema) -> str:
    """Return the fields of a schema in words."""
    return ", ".join(f"{name} ({kind})" for name, kind in schema.fields)


# Mixtures: sources side by side, in blocks of their own, counted apart

_KEEP_LABELS: Final = "labels='keep' leaves class numbers as they are"


@dataclass(frozen=True)
class ConcatOrder(Order):
    """The storage orders of several data sets, one data set's positions after another's.

    Samples are numbered by source, as they are given; positions begin with the source that is
    first in `turns`.
    """

    parts: tuple[Order, ...] = ()
    turns: tuple[int, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Order], turns: Sequence[int]) -> "ConcatOrder":
        return cls(sum(map(len, parts)), 0, 0, True, tuple(parts), tuple(turns))

    def _map(self, given: _I64, inverse: bool) -> _I64:
        self._check(given)
        firsts = np.concatenate([[0], np.cumsum([len(each) for each in self.parts])])
        begins = np.empty(len(self.parts), np.int64)
        at = 0
        for part in self.turns:
            begins[part] = at
            at += len(self.parts[part])
        result = np.empty(given.shape, np.int64)
        for number, own in enumerate(self.parts):
            come, go = (firsts[number], begins[number])[:: 1 if inverse else -1]
            here = (given >= come) & (given < come + len(own))
            result[here] = go + own._map(given[here] - come, inverse)
        return result


class MixtureReader(ReaderGroup):
    """The samples of several sources, numbered one source after another. Owns the readers.

    A block holds samples of one source. The blocks of the source whose bytes are used most often
    come first, and so get the fastest tiers.

    Of each source, `uses` says how often a sample is used, in proportion. `merge` as `labels`
    numbers the classes of all sources by name where they differ; `keep` leaves class numbers as
    they are.

    Raises UsageError when fields differ, or when labels cannot follow their classes.
    """

    format = "mixture"
    _unnamed_remedy = f": {_KEEP_LABELS}"

    def __init__(
        self,
        readers: Sequence[Reader],
        names: Sequence[str],
        uses: Sequence[float],
        labels: str = "merge",
    ) -> None:
        self._given = (list(readers), list(names), list(uses), labels)
        self.names = tuple(names)
        super().__init__(readers, self.names, _schema_of(readers, names))
        self.sizes = self._all_sizes()
        self.path = ", ".join(self.names)
        self.objects = all(each.objects for each in readers)
        if self._classes_differ():
            if labels == "merge":
                self._merge_classes(f"mixture of {self.path}", names, "names none", _KEEP_LABELS)
            else:
                self.classes = []
        turns = sorted(range(len(readers)), key=lambda k: (-uses[k], k))
        self.layout = _layout_of([each.layout for each in readers], turns)
        self.fingerprint = fingerprint_of(
            "mixture",
            1,
            labels,
            self.schema.to_json(),
            *map(str, turns),
            *self.classes,
            *(each.fingerprint for each in readers),
        )
        self._lock = new_lock()
        self._bytes = dict.fromkeys(self.names, 0)

    @property
    def labels(self) -> _I64:
        """Class number of each sample; shape (samples,)."""
        return self._all_labels()

    @property
    def abilities(self) -> Abilities:
        estimates = any(abilities_of(each).sizes_are_estimates for each in self._readers)
        return Abilities(sizes_are_estimates=estimates, bytes_by_source=self.bytes_by_source)

    def __reduce__(self) -> tuple[type["MixtureReader"], tuple[object, ...]]:
        return MixtureReader, tuple(self._given)

    def bytes_by_source(self) -> dict[str, int]:
        """Return the payload bytes that were read from the storage of each source."""
        with self._lock:
            return dict(self._bytes)

    def _count(self, owner: int, count: int) -> None:
        with self._lock:
            self._bytes[self.names[owner]] += count


def _schema_of(readers: Sequence[Reader], names: Sequence[str]) -> Schema:
    """Return the schema of all samples: image files of different formats go together."""
    first = readers[0].schema
    if all(each.schema == first for each in readers):
        return first
    common = []
    for each in readers:
        kinds = ((name, "image" if kind in IMAGES else kind) for name, kind in each.schema.fields)
        common.append(Schema(tuple(kinds), each.schema.structure))
    for name, schema in zip(names, common, strict=True):
        if schema != common[0]:
            raise UsageError(
                f"mixture: {name} has the fields {fields_of(schema)}, but {names[0]} has "
                f"{fields_of(common[0])}: mix data sets of the same fields"
            )
    return common[0]


def _layout_of(layouts: Sequence[Layout], turns: Sequence[int]) -> Layout:
    starts, at = [np.zeros(1, np.int64)], 0
    for number in turns:
        own = np.asarray(layouts[number].starts, np.int64)
        starts.append(at + own[1:])
        at += int(own[-1])
    return Layout(np.concatenate(starts), ConcatOrder.of([each.order for each in layouts], turns))

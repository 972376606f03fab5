"""The sources of a mixture as one data set: side by side, in blocks of their own, counted apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.concatenation import ReaderGroup, fields_of
from dlio.data.index import fingerprint_of
from dlio.data.reader_contract import Abilities, Reader, abilities_of
from dlio.data.schema import IMAGES, Schema
from dlio.errors import UsageError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.util.forks import new_lock

_I64 = npt.NDArray[np.int64]
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

    def _map(self, values: _I64, inverse: bool) -> _I64:
        given = np.asarray(values, np.int64)
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

    Args:
        readers: of the sources, whose samples have the same fields.
        names: of the sources.
        uses: how often a sample of each source is used, in proportion.
        labels: `merge` numbers the classes of all sources by name where they differ; `keep`
            leaves class numbers as they are.

    Raises UsageError when fields differ, or when labels cannot follow their classes.
    """

    format = "mixture"

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

    def _unnamed(self, owner: int, label: int) -> UsageError:
        return UsageError(f"{self.names[owner]}: label {label} has no class name: {_KEEP_LABELS}")


def _schema_of(readers: Sequence[Reader], names: Sequence[str]) -> Schema:
    """Return the schema of all samples: image files of different formats go together."""
    first = readers[0].schema
    if all(each.schema == first for each in readers):
        return first
    common = [_common(each.schema) for each in readers]
    for name, schema in zip(names, common, strict=True):
        if schema != common[0]:
            raise UsageError(
                f"mixture: {name} has the fields {fields_of(schema)}, but {names[0]} has "
                f"{fields_of(common[0])}: mix data sets of the same fields"
            )
    return common[0]


def _common(schema: Schema) -> Schema:
    fields = tuple((name, "image" if kind in IMAGES else kind) for name, kind in schema.fields)
    return Schema(fields, schema.structure)


def _layout_of(layouts: Sequence[Layout], turns: Sequence[int]) -> Layout:
    starts, at = [np.zeros(1, np.int64)], 0
    for number in turns:
        own = np.asarray(layouts[number].starts, np.int64)
        starts.append(at + own[1:])
        at += int(own[-1])
    return Layout(np.concatenate(starts), ConcatOrder.of([each.order for each in layouts], turns))

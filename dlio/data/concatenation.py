"""Several data sets of one format as one: folders with the same or other classes, Zarr stores."""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.data.index import fingerprint_of
from dlio.data.labels import LABEL_NAMES
from dlio.data.schema import LABEL, Schema
from dlio.errors import UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order

_SEED: Final = 0xD110


class _ReaderPart(Protocol):
    """A reader; see `dlio.data.reader.Reader`."""

    format: str
    path: str
    schema: Schema
    classes: Sequence[str]
    objects: bool
    fingerprint: str

    @property
    def labels(self) -> npt.NDArray[np.int64]: ...

    @property
    def sizes(self) -> npt.NDArray[np.int64]: ...

    def __len__(self) -> int: ...

    def name(self, sample: int) -> str: ...

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]: ...

    def close(self) -> None: ...


class ConcatReader:
    """The samples of several readers, one after another. Owns the readers.

    Classes are those of all, in alphabetical order if they differ; labels follow them.

    Raises UsageError when the readers' fields differ, or when labels cannot follow their classes.
    """

    def __init__(self, readers: Sequence[_ReaderPart]) -> None:
        first = readers[0]
        self._readers = list(readers)
        for other in readers[1:]:
            if other.schema != first.schema:
                raise UsageError(
                    f"{other.path} has fields {_fields(other)}, but {first.path} has "
                    f"{_fields(first)}: open them one by one"
                )
        self._firsts = np.concatenate([[0], np.cumsum([len(each) for each in readers])])
        self.format = first.format
        self.objects = first.objects
        self.path = " ".join(str(each.path) for each in readers)
        self.schema = first.schema
        self.classes: Sequence[str] = first.classes
        self._labels_of: list[npt.NDArray[np.int64]] | None = None
        """New label of each reader's labels; None if they stay."""
        self._label_at = 0
        if any(list(each.classes) != list(first.classes) for each in readers):
            self._join_classes()
        self.sizes = np.concatenate([np.asarray(each.sizes, np.int64) for each in readers])
        self.labels = np.concatenate(
            [self._labels(k, np.asarray(each.labels)) for k, each in enumerate(readers)]
        )
        order = Order(len(self.sizes), _SEED, shuffled=bool(first.objects))
        self.layout = cut_blocks(self.sizes, order)
        self.fingerprint = fingerprint_of("joined", 1, *[each.fingerprint for each in readers])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __reduce__(self) -> tuple[type["ConcatReader"], tuple[list[_ReaderPart]]]:
        return ConcatReader, (self._readers,)

    def name(self, sample: int) -> str:
        owner = int(self._owners(np.array([sample]))[0])
        reader = self._readers[owner]
        return f"{reader.path}: {reader.name(sample - int(self._firsts[owner]))}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        owners = self._owners(samples)
        for owner in np.unique(owners).tolist():
            here = np.flatnonzero(owners == owner)
            inner = self._readers[owner].read(samples[here] - self._firsts[owner])
            for k, payload in zip(here.tolist(), inner, strict=True):
                payloads[k] = self._relabelled(owner, payload)
        return payloads

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _owners(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._firsts, samples, side="right") - 1

    def _join_classes(self) -> None:
        name = next((name for name in LABEL_NAMES if name in self.schema.kinds), "")
        places = {field: at for field, kind, at in self.schema.places() if kind.text == "int64"}
        lacking = [each.path for each in self._readers if not len(each.classes)]
        if lacking or name not in places:
            raise UsageError(
                f"{self.path}: their classes differ"
                + (f", and {lacking[0]} has none" if lacking else "")
                + ": open them one by one"
            )
        self._label_at = places[name]
        self.classes = sorted({label for each in self._readers for label in each.classes})
        number = {label: k for k, label in enumerate(self.classes)}
        self._labels_of = [
            np.array([number[label] for label in each.classes], np.int64) for each in self._readers
        ]

    def _labels(self, owner: int, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return labels if self._labels_of is None else self._labels_of[owner][labels]

    def _relabelled(self, owner: int, payload: bytes | memoryview) -> bytes | memoryview:
        if self._labels_of is None:
            return payload
        changed = bytearray(payload)
        (label,) = LABEL.unpack_from(changed, self._label_at)
        LABEL.pack_into(changed, self._label_at, int(self._labels_of[owner][label]))
        return memoryview(changed)


def _fields(reader: _ReaderPart) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in reader.schema.fields)

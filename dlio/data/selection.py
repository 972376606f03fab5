"""Chosen samples of one or several data sets as a data set of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlio.data.concatenation import ReaderGroup
from dlio.data.index import fingerprint_of
from dlio.data.reader_contract import Abilities, FileLocations, Reader, abilities_of
from dlio.plan.layout import Layout, cut_blocks, shuffled_layout
from dlio.plan.order import Order

_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableOrder(Order):
    """A storage order that is a table, 16 bytes a sample."""

    table: _I64 = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    """Sample at each position; shape (n,)."""
    back: _I64 = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        back = np.empty_like(self.table)
        back[self.table] = np.arange(len(self.table))
        object.__setattr__(self, "back", back)

    def _map(self, given: _I64, inverse: bool) -> _I64:
        self._check(given)
        mapped: _I64 = (self.back if inverse else self.table)[given]
        return mapped


class SelectionReader(ReaderGroup):
    """A reader of chosen samples of other readers, in an order of their own.

    Samples of containers stay in the order in which they are stored, so that a chunk is read with
    one block; samples that are files are stored in a keyed order.

    `owners` has the number of the reader of each sample, of which there is one at least, and
    `inner` its index there.
    """

    def __init__(self, readers: Sequence[Reader], owners: _I64, inner: _I64) -> None:
        paths = [str(reader.path) for reader in readers]
        super().__init__(readers, paths, readers[0].schema)
        self._numbers = self.firsts[owners] + inner
        self.format = readers[0].format
        self.path = ", ".join(paths)
        self.objects = all(reader.objects for reader in readers)
        self.sizes = self._values_of(lambda reader: reader.sizes)
        self.layout = self._cut(owners, inner)
        self.fingerprint = fingerprint_of(
            "view",
            1 if self.objects else 2,
            *[reader.fingerprint for reader in readers],
            owners,
            inner,
        )

    @property
    def abilities(self) -> Abilities:
        each = [abilities_of(reader) for reader in self._readers]
        return Abilities(
            sizes_are_estimates=any(own.sizes_are_estimates for own in each),
            flow=each[0].flow if len(each) == 1 else None,
            multi_get=each[0].multi_get,
            locate=self._locate if len(each) == 1 and each[0].locate is not None else None,
        )

    @cached_property
    def labels(self) -> _I64:
        """Label of each sample; some readers read their samples for them. Shape (samples,)."""
        return self._values_of(lambda reader: np.asarray(reader.labels))

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, sample: int) -> str:
        number = int(self._numbers[sample])
        owner = int(self.sources_of(number))
        return str(self._readers[owner].name(number - int(self.firsts[owner])))

    def read(self, samples: _I64) -> list[bytes | memoryview]:
        return super().read(self._numbers[samples])

    def _locate(self, samples: _I64, _: _I64, __: _I64) -> FileLocations:
        """Return where samples lie in the files of the only reader; see `Abilities.locate`."""
        reader = self._readers[0]
        locate, inner = abilities_of(reader).locate, self._numbers[samples]
        assert locate is not None
        return locate(inner, *reader.layout.locate(inner))

    def _values_of(self, values: Callable[[Reader], _I64]) -> _I64:
        """Return the chosen samples' values out of those of all samples of each reader."""
        chosen = np.zeros(len(self), np.int64)
        owners = self.sources_of(self._numbers)
        for owner in np.unique(owners).tolist():
            here = owners == owner
            chosen[here] = values(self._readers[owner])[self._numbers[here] - self.firsts[owner]]
        return chosen

    def _cut(self, owners: _I64, inner: _I64) -> Layout:
        count = len(inner)
        if self.objects:
            return shuffled_layout(self.sizes)
        blocks, stored = np.empty(count, np.int64), np.empty(count, np.int64)
        for number, reader in enumerate(self._readers):
            here = owners == number
            blocks[here], places = reader.layout.locate(inner[here])
            stored[here] = reader.layout.starts[blocks[here]] + places
        table = np.lexsort((stored, owners)).astype(np.int64)
        turns = (np.diff(blocks[table]) != 0) | (np.diff(owners[table]) != 0)
        units = np.append(0, np.flatnonzero(turns) + 1).astype(np.int64)
        return cut_blocks(self.sizes, TableOrder(count, 0, 0, True, table), units)

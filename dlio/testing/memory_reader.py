"""A reader of samples in memory, for tests of code that takes a reader."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.schema import Schema, Value
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order


class MemoryReader:
    """A data set in memory that counts how often each sample was read. Thread-safe.

    Args:
        schema: names and kinds of the fields.
        rows: field values of each sample, at least one; a field `label` gives `labels`.
        classes: class names; labels index them.
        shuffled: storage order; False: sample by sample.

    Raises ValueError for a value that is not of its field's kind.
    """

    format = "memory"
    path = "memory"
    objects = False

    def __init__(
        self,
        schema: Schema,
        rows: Sequence[Mapping[str, Value]],
        classes: Sequence[str] = (),
        *,
        shuffled: bool = False,
    ) -> None:
        self.schema = schema
        self.payloads = [schema.join(row) for row in rows]
        self.classes: Sequence[str] = tuple(classes)
        labels = [row.get("label", 0) for row in rows]
        self.labels = np.array([each if isinstance(each, int) else 0 for each in labels], np.int64)
        self.sizes = np.array([len(payload) for payload in self.payloads], np.int64)
        self.layout = cut_blocks(self.sizes, Order(len(rows), 0, shuffled=shuffled))
        content = xxhash.xxh3_128(schema.to_json().encode())
        for payload in self.payloads:
            content.update(payload)
        self.fingerprint = content.hexdigest()
        self.reads = np.zeros(len(rows), np.int64)
        """Times that each sample was read; shape (samples,)."""

    def __len__(self) -> int:
        return len(self.payloads)

    def name(self, sample: int) -> str:
        """Name of a sample, as error messages have it."""
        return f"memory[{sample}]"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Payloads of `samples`, in the same order."""
        np.add.at(self.reads, samples, 1)
        return [self.payloads[sample] for sample in samples.tolist()]

    def close(self) -> None:
        """Do nothing: memory needs no closing."""

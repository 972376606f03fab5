"""A small reader that keeps every promise, for faults to be put into."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader import Reader
from dlio.data.schema import Schema, Value
from dlio.errors import SourceError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order
from dlio.testing import ReaderTests

COUNT = 64
WIDTH = 24
FILE = "numbers.records"


class RecordReader:
    """Records of one file: a label, and some float32 numbers."""

    format = "records"
    objects = False
    classes: Sequence[str] = ("even", "odd")

    def __init__(self, path: str) -> None:
        self.path = path
        self.schema = Schema((("label", "int64"), ("x", f"float32[{WIDTH}]")))
        self.record = self.schema.overhead
        count = os.path.getsize(path) // self.record
        self.sizes = np.full(count, self.record, np.int64)
        self.layout = cut_blocks(self.sizes, Order(count, 0, shuffled=False))
        self.fingerprint = xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
        whole = np.arange(count, dtype=np.int64)
        labels = [self.schema.split(payload)["label"] for payload in self.read(whole)]
        self.labels = np.array(labels, np.int64)

    @classmethod
    def recognises(cls, path: str) -> str | None:
        return None if str(path).endswith(".records") else "does not end in .records"

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, sample: int) -> str:
        return f"{os.path.basename(self.path)}[{sample}]"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """One read for each run of neighbours."""
        payloads: list[bytes | memoryview] = []
        runs = np.split(samples, np.flatnonzero(np.diff(samples) != 1) + 1) if len(samples) else []
        for run in runs:
            wanted = len(run) * self.record
            with open(self.path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), wanted, int(run[0]) * self.record)
            if len(data) != wanted:
                broken = int(run[0]) + len(data) // self.record
                raise SourceError(f"{self.name(broken)} is cut off: restore {self.path}")
            view = memoryview(data)
            size = self.record
            payloads += [view[k * size : (k + 1) * size] for k in range(len(run))]
        return payloads

    def close(self) -> None:
        """Do nothing: each read opens the file."""


class RecordTests(ReaderTests):
    """The suite over records; `reader` may be set to a broken kind of them."""

    reader: type[RecordReader] = RecordReader

    def make(self, folder: Path) -> Reader:
        path = folder / FILE
        if not path.exists():
            schema = Schema((("label", "int64"), ("x", f"float32[{WIDTH}]")))
            path.write_bytes(b"".join(schema.join(row) for row in self.expected()))
        return self.reader(str(path))

    def expected(self) -> Sequence[Mapping[str, Value]]:
        return [
            {"label": k % 2, "x": np.arange(WIDTH, dtype=np.float32) + 100 * k}
            for k in range(COUNT)
        ]

    def change(self, folder: Path) -> None:
        data = bytearray((folder / FILE).read_bytes())
        data[-1] ^= 1
        (folder / FILE).write_bytes(data)

    def damage(self, folder: Path, sample: int) -> None:
        schema = Schema((("label", "int64"), ("x", f"float32[{WIDTH}]")))
        os.truncate(folder / FILE, sample * schema.overhead + 1)

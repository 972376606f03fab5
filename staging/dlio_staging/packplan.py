"""What a packing writes where: pure, and the same in every process that works on it."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader import Reader, open_reader
from dlio.data.schema import IMAGES, Schema
from dlio.errors import UsageError
from dlio.plan.layout import Layout, cut_blocks
from dlio.plan.order import Order

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack; see the command's options."""

    format: str = "native"
    order: str = "shuffled"
    compress: str = "auto"
    shard_bytes: int = 1 << 30
    seed: int = 0
    resize: int | None = None
    quality: int = 90
    restart_rows: bool = True
    split: tuple[tuple[str, float], ...] = ()
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One of the data sets that a packing makes: all, or a share of a split."""

    name: str
    samples: npt.NDArray[np.int64]
    """Sample indices in the order in which they are written."""
    starts: npt.NDArray[np.int64]
    """First position of each block; shape (blocks + 1,)."""
    shard_of: npt.NDArray[np.int64]
    """Shard of each block."""
    fingerprint: str

    @property
    def shards(self) -> int:
        return int(self.shard_of[-1]) + 1


class Plan:
    """What is written where, the same in every process that works on it."""

    def __init__(self, source: Any, options: PackOptions) -> None:
        self.options = options
        self.reader: Reader = open_reader(source)
        images = [name for name, kind in self.reader.schema.kinds.items() if kind.text in IMAGES]
        if options.resize is not None and not images:
            raise UsageError(f"--resize: {self.reader.path} has no images")
        self.images = images
        self.schema = _schema_after(self.reader.schema, options)
        text = json.dumps([VERSION, asdict(replace(options, workers=1)), self.reader.fingerprint])
        self.key = xxhash.xxh3_128_hexdigest(text.encode())
        self.parts = [self._part(name, chosen) for name, chosen in self._chosen()]

    def _chosen(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """(name, sample indices in their order) of each part."""
        count = len(self.reader)
        shuffled = Order(count, self.options.seed, shuffled=True)
        order = shuffled.samples(np.arange(count, dtype=np.int64))
        if not self.options.split:
            yield "", order if self.options.order == "shuffled" else np.sort(order)
            return
        start = 0
        counts = _shares(count, [share for _, share in self.options.split])
        for (name, _), size in zip(self.options.split, counts, strict=True):
            chosen = order[start : start + size]
            yield name, chosen if self.options.order == "shuffled" else np.sort(chosen)
            start += size

    def _part(self, name: str, samples: npt.NDArray[np.int64]) -> Part:
        sizes = self.reader.sizes[samples]
        layout: Layout = cut_blocks(sizes, Order(len(samples), 0, shuffled=False))
        ends = np.cumsum(sizes)[layout.starts[1:] - 1]
        _, shard_of = np.unique((ends - 1) // self.options.shard_bytes, return_inverse=True)
        if self.options.format == "zarr":
            shard_of = np.zeros_like(shard_of)
        digest = xxhash.xxh3_128(f"{self.key} {name}".encode())
        digest.update(layout.starts.astype("<i8").tobytes())
        return Part(name, samples, layout.starts, shard_of, digest.hexdigest())

    def path(self, folder: str, part: Part) -> str:
        return os.path.join(folder, part.name) if part.name else folder


def _schema_after(schema: Schema, options: PackOptions) -> Schema:
    """Images that are encoded again are JPEGs."""
    if options.resize is None:
        return schema
    fields = [(n, "jpeg" if kind in IMAGES else kind) for n, kind in schema.fields]
    return Schema(tuple(fields), schema.structure)


def _shares(count: int, shares: Sequence[float]) -> list[int]:
    """`count` shared out by largest remainder. Raises UsageError when a share is nothing."""
    exact = [count * share for share in shares]
    whole = [int(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda k: whole[k] - exact[k])
    for k in by_rest[: count - sum(whole)]:
        whole[k] += 1
    if not all(whole):
        raise UsageError(f"--split: {count} samples are too few for these shares")
    return whole

"""Plan of a packing: its options, and the assignment of samples to files.

The plan depends only on the source and the options, so that every process computes the same one.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader import Reader, open_reader
from dlio.data.schema import IMAGES, Schema
from dlio.data.splits import FormatChoice, ReaderChoices, SplitChoice, reading_options
from dlio.errors import UsageError
from dlio.plan.layout import Layout, cut_blocks
from dlio.plan.order import Order
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import counted, exact_bytes, parse_bytes

VERSION: Final = 1
_LEAST_SHARD_BYTES: Final = 1 << 16


def _shard_bytes(text: str) -> int:
    limit = parse_bytes(text, "--shard-size")
    if limit < _LEAST_SHARD_BYTES:
        raise UsageError(f"--shard-size {text}: give at least {exact_bytes(_LEAST_SHARD_BYTES)}")
    return limit


def _split(text: str) -> tuple[tuple[str, float], ...]:
    parts = []
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            parts.append((name, float(share)))
        except ValueError:
            raise UsageError(f"--split {text}: write train=0.9,val=0.1") from None
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class PackOptions(CheckedOptions):
    """How to pack; options of `dlio pack`."""

    format: Annotated[
        str, Option("Format to write.", choices=("native", "tar", "hdf5", "zarr"))
    ] = "native"
    order: Annotated[
        str, Option("Order of the samples in the files.", choices=("shuffled", "source"))
    ] = "shuffled"
    compress: Annotated[
        str,
        Option(
            "Compression of payloads; auto leaves images as they are.",
            choices=("auto", "lz4", "none"),
        ),
    ] = "auto"
    shard_bytes: Annotated[
        int,
        Option(
            "Approximate size of each file, such as 1GiB.",
            name="shard-size",
            metavar="SIZE",
            parse=_shard_bytes,
            show=exact_bytes,
        ),
    ] = 1 << 30
    seed: Annotated[int, Option("Seed for the shuffled order and for --split.", least=0)] = 0
    resize: Annotated[
        int | None,
        Option(
            "Scale images down to this length of the short side; smaller ones stay as they are.",
            unit="pixels",
            least=1,
        ),
    ] = None
    quality: Annotated[int, Option("JPEG quality of resized images.", least=1, most=100)] = 90
    restart_rows: Annotated[
        bool,
        Option(
            "Add restart markers to JPEGs, losslessly, where jpegtran is installed, so that a crop "
            "decodes only its rows."
        ),
    ] = True
    split: Annotated[
        tuple[tuple[str, float], ...],
        Option(
            "Write several data sets with these shares of the samples, such as train=0.9,val=0.1.",
            metavar="NAME=SHARE,...",
            parse=_split,
            show=lambda split: ",".join(f"{name}={share}" for name, share in split) or None,
        ),
    ] = ()
    source_split: SplitChoice = None
    source_format: FormatChoice = None
    reader_option: ReaderChoices = ()
    workers: int = 1
    """Processes that read and write."""


@dataclass(frozen=True, slots=True)
class PackSplit:
    """A data set that a packing writes: all samples, or those of one share of `--split`."""

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
        """Number of shards."""
        return int(self.shard_of[-1]) + 1


class PackPlan:
    """Assignment of the samples of a source, as for `open_reader`, to files.

    Raises UsageError when the options do not fit the data set.
    """

    def __init__(self, source: object, options: PackOptions) -> None:
        self.options = options
        chosen = reading_options(options.source_split, options.source_format, options.reader_option)
        self.reader: Reader = open_reader(source, follow_links=None, trust=None, **chosen)
        images = [name for name, kind in self.reader.schema.kinds.items() if kind.text in IMAGES]
        if options.resize is not None and not images:
            raise UsageError(f"--resize: {self.reader.path} has no images")
        placed = [name for name in ("boxes", "mask") if name in self.reader.schema.kinds]
        if options.resize is not None and placed:
            raise UsageError(
                f"--resize: {self.reader.path} has the field {placed[0]!r}, whose places in the "
                "pictures would no longer be right: leave --resize out"
            )
        self.images = images
        self.schema = _schema_after(self.reader.schema, options)
        about = asdict(replace(options, workers=1))
        # The fingerprint is that of their data.
        del about["source_split"], about["source_format"], about["reader_option"]
        text = json.dumps([VERSION, about, self.reader.fingerprint])
        self.key = xxhash.xxh3_128_hexdigest(text.encode())
        self.parts = [self._part(name, chosen) for name, chosen in self._chosen()]

    def _chosen(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield (name, sample indices in the order of writing) of each part."""
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

    def _part(self, name: str, samples: npt.NDArray[np.int64]) -> PackSplit:
        sizes = self.reader.sizes[samples]
        layout: Layout = cut_blocks(sizes, Order(len(samples), 0, shuffled=False))
        ends = np.cumsum(sizes)[layout.starts[1:] - 1]
        _, shard_of = np.unique((ends - 1) // self.options.shard_bytes, return_inverse=True)
        if self.options.format == "zarr":
            shard_of = np.zeros_like(shard_of)
        digest = xxhash.xxh3_128(f"{self.key} {name}".encode())
        digest.update(layout.starts.astype("<i8").tobytes())
        return PackSplit(name, samples, layout.starts, shard_of, digest.hexdigest())

    def path(self, folder: str, part: PackSplit) -> str:
        """Return the folder of a part in the folder of the whole packing."""
        return os.path.join(folder, part.name) if part.name else folder


def _schema_after(schema: Schema, options: PackOptions) -> Schema:
    """Return the schema of the packed samples, in which resized images are JPEGs."""
    if options.resize is None:
        return schema
    fields = [(n, "jpeg" if kind in IMAGES else kind) for n, kind in schema.fields]
    return Schema(tuple(fields), schema.structure)


def _shares(count: int, shares: Sequence[float]) -> list[int]:
    """Divide `count` by the largest-remainder method. Raises UsageError when a part is empty."""
    exact = [count * share for share in shares]
    whole = [int(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda k: whole[k] - exact[k])
    for k in by_rest[: count - sum(whole)]:
        whole[k] += 1
    if not all(whole):
        raise UsageError(f"--split: {counted(count, 'sample')} are too few for these shares")
    return whole

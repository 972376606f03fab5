"""The reader of TFRecord files of tf.train.Example, without TensorFlow."""

import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import cached_index, fingerprint_of
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import Abilities
from dlio.data.schema import Schema
from dlio.data.source import File, Source, expand, inside, own_name, split_fields
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order
from dlio.util.memory import new_memory
from dlio_readers.concurrency import concurrently
from dlio_readers.path_reader import PathReader, split_paths
from dlio_readers.tfexample import (
    Feature,
    RecordBytes,
    count_of,
    features_of,
    floats_of,
    ints_of,
)
from dlio_readers.tfframes import (
    AROUND,
    HEAD,
    WholeRecord,
    check_data,
    is_framed,
)
from dlio_readers.tfscan import scan

_SUFFIXES: Final = (".tfrecord", ".tfrecords", ".tfrec", ".tfr")
_PACKED: Final = tuple(f"{suffix}.gz" for suffix in _SUFFIXES)
_SHARD: Final = re.compile(r"(.+)-(\d{3,6})-of-(\d{3,6})")
_VERSION: Final = 1
_RUN_BYTES: Final = 8 << 20
"""Bytes of neighbouring records that are read together, at most."""
_CHANGED: Final = "has changed since it was indexed: open it again"

_log = logging.getLogger("dlio")


class TfRecordReader(PathReader):
    """Read TFRecord files whose records are tf.train.Example: `train-*`, `x.tfrecord::image,label`.

    Features are fields: whole numbers int64, floats float32, single values as numbers, lists as
    arrays; bytes are images, text or bytes, depending on all values. One scan indexes a file, which
    of a local one skips over large values. Checksums are verified whenever a record is read.

    Args:
        path: a file, a folder, a pattern or a list, with the names of features after `::`; by
            default all features of the first record.

    Raises SourceError for compressed and cut off files, lists of several byte strings, and records
    that are not of tf.train.Example; CorruptBlock for wrong checksums; UsageError for a folder of
    several data sets.
    """

    format = "tfrecord"
    abilities = Abilities(random_access=True)

    def __init__(self, path: str | Sequence[str]) -> None:
        paths, names = split_paths(path)
        urls = _files_of(paths)
        self._files = concurrently(PersistentFile, urls, urls[0])
        concurrently(lambda file: file.stamp, self._files, urls[0])  # Kept by the files.
        kind = "tfrecord-" + ("-".join(names)[:64].replace("/", "_") or "all")
        index = cached_index(
            kind, _VERSION, self._files, lambda: scan(self.path, names, self._files)
        )
        head = json.loads(index["head"].tobytes())
        if names and [name for name, _ in head["fields"]] != list(names):  # Names that collide.
            index = scan(self.path, names, self._files)
            head = json.loads(index["head"].tobytes())
        self.schema = Schema(tuple((name, kind) for name, kind in head["fields"]))
        self.classes: Sequence[str] = []
        self.labels = index["labels"]
        self._at, self._stored = index["at"], index["stored"]
        self._starts: list[int] = index["starts"].tolist()
        bodies = {name: index["bodies"][:, k] for k, name in enumerate(head["variable"])}
        self.sizes = self.schema.payload_sizes(len(self._at), bodies)
        self.layout = cut_blocks(self.sizes, Order(len(self._at), 0, shuffled=False))
        stamps = [f"{file.url} {file.stamp}" for file in self._files]
        self.fingerprint = fingerprint_of(
            "tfrecord", _VERSION, self.schema.to_json(), *stamps, self.layout.starts
        )
        bases = [os.path.basename(file.name) for file in self._files]
        full = [file.name for file in self._files]
        self._names = bases if len(set(bases)) == len(bases) else full

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(expand(path)[0])[0]
        if _named(own_name(url)):
            return None
        source = Source(url)
        if source.is_folder():
            names = [name for name, folder in source.names() if not folder]
            if any(_named(name.lower()) for name in names):
                return None
            shard = next((name for name in names if _SHARD.fullmatch(name)), None)
            if shard is None:
                return "holds no .tfrecord file"
            url = inside(url, shard)
        elif not _SHARD.fullmatch(url.rsplit("/", 1)[-1]):
            return "is neither a .tfrecord nor a folder of them"
        try:
            return None if is_framed(File(url)) else "does not begin like a TFRecord file"
        except SourceError:
            return "is not a file"

    def name(self, sample: int) -> str:
        file, number = self._locate(sample)
        return f"{self._names[file]}:{number}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        order = np.argsort(samples, kind="stable")
        for run in self._runs(samples[order]):
            numbers = samples[order[run]]
            first, last = int(numbers[0]), int(numbers[-1])
            begin = int(self._at[first]) - HEAD.size
            end = int(self._at[last] + self._stored[last]) + AROUND - HEAD.size
            memory = new_memory(end - begin)
            self._files[self._locate(first)[0]].read_into(begin, memory)
            for slot, sample in zip(order[run].tolist(), numbers.tolist(), strict=True):
                at = int(self._at[sample]) - HEAD.size - begin
                stored = memory[at : at + int(self._stored[sample]) + AROUND]
                payloads[slot] = self._payload(sample, stored)
        return payloads

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _locate(self, sample: int) -> tuple[int, int]:
        """Return (number of the file, number of the record in it)."""
        file = bisect_right(self._starts, sample) - 1
        return file, sample - self._starts[file]

    def _runs(self, samples: npt.NDArray[np.int64]) -> Iterator[slice]:
        """Yield parts of sorted samples that lie next to each other in one file."""
        start = 0
        for k in range(1, len(samples) + 1):
            if k < len(samples):
                step = int(samples[k] - samples[k - 1])
                span = int(self._at[samples[k]] + self._stored[samples[k]])
                span -= int(self._at[samples[start]])
                new_file = step and self._locate(int(samples[k]))[1] == 0
                if step <= 1 and not new_file and span <= _RUN_BYTES:
                    continue
            yield slice(start, k)
            start = k

    def _payload(self, sample: int, stored: memoryview) -> bytes | memoryview:
        file, number = self._locate(sample)
        where = f"{self._files[file].name}, record {number},"
        record = WholeRecord(check_data(stored, where))
        try:
            features = features_of(record)
            values = {
                name: _value(record, features.get(name), self.schema.kinds[name].text)
                for name, _ in self.schema.fields
            }
            return self.schema.join(values)
        except (ValueError, CorruptBlock) as error:
            raise SourceError(f"{where} {error}") from error


def _value(record: RecordBytes, feature: Feature | None, kind: str) -> Any:
    """Return the value of a field of a kind. Raises ValueError if the feature has another."""
    wanted = kind.partition("[")[0]
    numeric = wanted in ("int64", "float32")
    if feature is None or feature.kind != (wanted if numeric else "bytes"):
        if feature is not None and count_of(record, feature):
            raise ValueError(_CHANGED)
        feature = None
    if not numeric:
        if feature is not None and len(feature.spans) > 1:
            raise ValueError(_CHANGED)
        return b"" if feature is None or not feature.spans else record.part(*feature.spans[0])
    values: npt.NDArray[Any] = np.zeros(0, wanted)
    if feature is not None:
        values = (ints_of if wanted == "int64" else floats_of)(record, feature)
    if "[" in kind:
        return values
    if len(values) != 1:
        raise ValueError(_CHANGED)
    return values[0].item()


def _named(name: str) -> bool:
    """True for the name of a TFRecord file, in lower case."""
    shard = _SHARD.fullmatch(name)
    return (shard[1] if shard else name).endswith((*_SUFFIXES, *_PACKED))


def _files_of(urls: Sequence[str]) -> list[str]:
    """Expand patterns; a folder becomes its TFRecord files.

    Raises UsageError if these are of several data sets.
    """
    files = []
    for url in expand(list(urls)):
        source = Source(url)
        if not source.is_folder():
            files.append(url)
            continue
        names = [name for name, folder in source.names() if not folder]
        named = [name for name in names if _named(name.lower())]
        named = named or [name for name in names if _SHARD.fullmatch(name)]
        sets = sorted({match[1] for name in named if (match := _SHARD.fullmatch(name))})
        if len(sets) > 1:
            raise UsageError(
                f"{url} holds the files of {len(sets)} data sets, {', '.join(sets[:8])}: name one, "
                f"as in {inside(url, sets[0])}-*"
            )
        for name in named:
            source.check_link(source.path(name))
        files += [inside(url, name) for name in named]
    _warn_of_missing(files)
    return files


def _warn_of_missing(files: Sequence[str]) -> None:
    """Warn if the names of shards say that there are more of them."""
    matches = [match for url in files if (match := _SHARD.fullmatch(os.path.basename(url)))]
    totals = {int(match[3]) for match in matches}
    if len(totals) == 1 and len(matches) == len(files) < max(totals):
        _log.warning("%d of %d files are read, by their names", len(files), max(totals))

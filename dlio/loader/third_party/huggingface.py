"""Hugging Face `datasets` of images: their encoded bytes go through tiers, their features decode.

This works for data sets whose columns are images, numbers and text, unmodified or with a transform
(`set_transform`, `with_transform`). A sample equals the data set's own `[i]`, with one difference:
a transform is called with one sample at a time.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import fingerprint_of
from dlio.data.labels import label_name
from dlio.data.links import DataRoot, is_below, links_followed
from dlio.data.schema import Buffer, Schema
from dlio.data.source import File
from dlio.errors import DecodeError, SourceError
from dlio.loader.contract import Sample, UserDataset
from dlio.plan.layout import shuffled_layout

_ROWS: Final = 4096
"""Rows per step when a data set is opened."""
_NUMBERS: Final = ("int", "uint", "float", "bool")


def is_image_set(data: UserDataset) -> bool:
    """True for a data set of `datasets` that `ImageSet` reads."""
    kind = type(data)
    if (kind.__module__, kind.__name__) != ("datasets.arrow_dataset", "Dataset"):
        return False
    chosen, own = data.format["columns"], data.format["type"]
    if own not in (None, "custom") or set(chosen) != set(data.column_names):
        return False
    kinds = _kinds(data)
    return kinds is not None and "image" in kinds.values()


class ImageSet:
    """A reader of such a data set's encoded samples, which also decodes them as the set does.

    Raises SourceError where a sample has no value, or its image is neither in the data set nor a
    local file.
    """

    format = "huggingface"
    objects = False

    def __init__(self, data: UserDataset) -> None:
        import datasets

        self.path = f"datasets.Dataset {data.info.builder_name or ''} {data.split or ''}".strip()
        kinds = _kinds(data)
        assert kinds is not None
        self._features = data.features
        self._pictures = [name for name, kind in kinds.items() if kind == "image"]
        self._transform = data.format["format_kwargs"].get("transform")
        self.functions: list[object] = [self._transform]
        raw = data.with_format(None)
        for name in self._pictures:
            raw = raw.cast_column(name, datasets.Image(decode=False))
        self._raw = raw
        self.schema = Schema(tuple(kinds.items()))
        self._files = _NamedFiles(data)
        self.labels: npt.NDArray[np.int64] = np.zeros(len(data), np.int64)
        self.sizes = self._measure(kinds)
        label = label_name(kinds)
        names = getattr(self._features[label], "names", None) if label else None
        self.classes: Sequence[str] = list(names or ())
        self.layout = shuffled_layout(self.sizes)
        self.fingerprint = fingerprint_of(
            "huggingface", 1, data._fingerprint, self.schema.to_json(), self.layout.starts
        )

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def reader(self) -> "ImageSet":
        return self

    def name(self, sample: int) -> str:
        return f"{self.path}[{sample}]"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        columns = self._raw[samples.tolist()]
        payloads: list[bytes | memoryview] = []
        for k, sample in enumerate(samples.tolist()):
            values = {name: column[k] for name, column in columns.items()}
            for name in self._pictures:
                values[name] = self._bytes_of(values[name], sample)
            payloads.append(self.schema.join(values))
        return payloads

    def close(self) -> None:
        """Do nothing: the data set is the user's."""

    def finished(self, payload: Buffer, sample: int) -> Sample:
        """Return the result of the data set's own `[i]`, from bytes that have been read."""
        row = self.schema.split(payload)
        for name, kind in self.schema.fields:
            if kind in ("text", "bytes"):
                row[name] = str(row[name], "utf-8") if kind == "text" else bytes(row[name])
        for name in self._pictures:
            encoded = {"bytes": bytes(row[name]), "path": None}
            try:
                row[name] = self._features[name].decode_example(encoded)
            except OSError as error:
                raise DecodeError(f"{self.name(sample)} cannot be decoded: {error}") from error
        if self._transform is None:
            return row
        made = self._transform({name: [value] for name, value in row.items()})
        return {name: column[0] for name, column in made.items()}

    def _measure(self, kinds: dict[str, str]) -> npt.NDArray[np.int64]:
        """Payload bytes of each sample, from the columns alone; also sets `labels`."""
        import pyarrow.compute as pc

        count = len(self)
        bodies = {
            name: np.zeros(count, np.int64)
            for name, kind in kinds.items()
            if kind in ("image", "text", "bytes")
        }
        label = label_name(name for name, kind in kinds.items() if "int" in kind)
        arrow = self._raw.with_format("arrow")
        for first in range(0, count, _ROWS):
            rows = slice(first, min(first + _ROWS, count))
            table = arrow[rows]
            for name in table.column_names:
                column = table.column(name).combine_chunks()
                if column.null_count:
                    raise SourceError(f"{self.path}: column {name!r} has samples without a value")
                if name == label:
                    self.labels[rows] = column.to_numpy(zero_copy_only=False)
                if name in self._pictures:
                    bodies[name][rows] = self._picture_bytes(column, first)
                elif name in bodies:
                    lengths = pc.binary_length(column)
                    bodies[name][rows] = lengths.to_numpy(zero_copy_only=False)
        return self.schema.payload_sizes(count, bodies)

    def _picture_bytes(self, column: Any, first: int) -> npt.NDArray[np.int64]:
        import pyarrow.compute as pc

        lengths = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), -1)
        sizes: npt.NDArray[np.int64] = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
        for k in np.flatnonzero(sizes < 0).tolist():
            path = column[k]["path"].as_py()
            try:
                sizes[k] = self._files.file(path).size
            except TypeError as error:
                raise SourceError(f"{self.name(first + k)} has no image: {error}") from error
        return sizes

    def _bytes_of(self, picture: dict[str, Any], sample: int) -> bytes:
        if picture["bytes"] is not None:
            return bytes(picture["bytes"])
        try:
            return self._files.file(picture["path"]).read()
        except SourceError as error:
            raise SourceError(f"{self.name(sample)}: {error}") from error


class ForeignFile(SourceError):
    """A data set names a file that it may not: to leave it to `datasets` would read it."""


class _NamedFiles:
    """The files that a data set names by their paths, which whoever made it has chosen.

    They lie where the data set does, or where `datasets` keeps what it has downloaded. Others are
    read if links out of data sets are followed, if the program has made the data set out of paths
    of its own, in memory, or if `datasets` has listed a folder of pictures for it.
    """

    def __init__(self, data: UserDataset) -> None:
        from datasets import config

        kept = [os.path.dirname(os.path.abspath(each["filename"])) for each in data.cache_files]
        lists = os.path.realpath(os.path.join(str(config.HF_DATASETS_CACHE), "imagefolder"))
        listed = bool(kept) and all(is_below(os.path.realpath(each), lists) for each in kept)
        made_here = not kept and data.info.builder_name is None
        self._free = links_followed() or listed or made_here
        places = [*kept, str(config.DOWNLOADED_DATASETS_PATH)]
        self._roots = [DataRoot(os.path.abspath(each), follows=False) for each in places]

    def file(self, path: str) -> File:
        """Return a file that the data set names.

        Raises SourceError if it is missing, ForeignFile if it may not be read, TypeError without a
        path.
        """
        where = os.path.abspath(path)
        if not os.path.lexists(where):
            raise SourceError(f"{where} is missing: restore it")
        own = next((root for root in self._roots if is_below(where, root.path)), None)
        try:
            if self._free:
                return File(where)
            if own is not None:
                return File(where, own)
        except SourceError as error:
            raise ForeignFile(f"the data set names a file: {error}") from error
        raise ForeignFile(
            f"the data set names {where}, which does not lie in its folder: make it again with the "
            "pictures in it, or allow such files with DLIO_FOLLOW_LINKS=1"
        )


def _kinds(data: Any) -> dict[str, str] | None:
    """The kind of each column; None if a column is of another kind."""
    kinds = {}
    for name, feature in data.features.items():
        kind = type(feature).__name__
        dtype = str(getattr(feature, "dtype", ""))
        if kind == "Image" and feature.decode:
            kinds[name] = "image"
        elif kind == "ClassLabel":
            kinds[name] = "int64"
        elif kind != "Value":
            return None
        elif dtype.startswith(_NUMBERS):
            kinds[name] = dtype
        elif dtype in ("string", "large_string"):
            kinds[name] = "text"
        elif dtype in ("binary", "large_binary"):
            kinds[name] = "bytes"
        else:
            return None
    return kinds

"""The reader protocol, and the search for the reader of a path.

A reader knows one format. It never caches payloads and starts no threads: tiers and engines do
that for all formats alike. Readers plug in through the entry-point group `dlio.readers`.
"""

import inspect
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Schema
from dlio.data.source import Source, expand, listed_once, redact, split_fields
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import Layout

__all__ = ["Reader", "ReaderType", "StoredBlocks", "data_bytes", "open_reader"]


@runtime_checkable
class Reader(Protocol):
    """Knows one format: the number of samples, their sizes and names, and their payloads.

    All methods are thread-safe and deterministic. Sample indices are the reader's own,
    0 to len - 1. Readers can be pickled, for another process to read the same samples. Owner:
    the data set that opened it, which closes it. `dlio.testing.ReaderTests` checks these promises.
    """

    format: str
    """The entry point's name."""
    path: str
    """Path that was opened, as the user wrote it."""
    schema: Schema
    classes: Sequence[str]
    """Class names; labels index them. Empty when the data set has none."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class number of each sample; shape (samples,)."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of each sample; shape (samples,)."""

    fingerprint: str
    """32 hex digits that change when the data set does; names its folder in a tier."""
    layout: Layout
    objects: bool
    """True if each sample is a file of its own, so that many are read in parallel; otherwise
    neighbours in storage are read together."""

    def __len__(self) -> int: ...

    def name(self, sample: int) -> str:
        """Return the sample's name for users: its file, or its key in a container."""

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Return the payloads of `samples`, in the same order.

        Args:
            samples: indices; shape (n,).

        Reads of neighbours in storage are coalesced. Payloads stay valid, and unchanged, when
        other samples are read. Raises SourceError, or CorruptBlock where the format has
        checksums, that names the sample or its file.
        """

    def close(self) -> None:
        """Close files. Reading afterwards opens them again."""


@runtime_checkable
class StoredBlocks(Protocol):
    """A reader whose source stores blocks in the format of tiers, which are copied unchanged."""

    block_bytes: Any
    """File bytes of each block; shape (blocks,)."""

    def stored_at(self, block: int) -> int:
        """Return the offset of a block in its file, in bytes."""

    def read_stored(self, block: int, into: memoryview, at: int = 0) -> None:
        """Fill `into` with the bytes of a block from offset `at` on. Raises SourceError."""

    def check_stored(self, block: int, stored: memoryview) -> None:
        """Check the bytes of a whole block. Raises CorruptBlock when they are damaged."""


class ReaderType(Protocol):
    """A reader's class, as entry points name it.

    A class with a true attribute `fallback` is tried last. One with a true `objects_only` does not
    read paths but Python objects.
    """

    def __call__(self, path: object, **options: object) -> Reader: ...

    def recognises(self, path: object) -> str | None:
        """Return None if `path` is of this format, otherwise the reason why not, in a few words.

        Of several paths, only the first is asked about.
        """


def data_bytes(reader: Reader) -> int:
    """Return the payload bytes of a data set; some readers know them without summing sizes."""
    known: int | None = getattr(reader, "data_bytes", None)
    return int(reader.sizes.sum(dtype=np.int64)) if known is None else known


def open_reader(path: object, **options: object) -> Reader:
    """Find the reader that recognises `path`, and open it.

    Args:
        path: a path or URL, several of them, or an object that a reader takes, such as torch's
            map-style data sets.
        options: for the reader, such as `select` for HDF5 and Zarr.

    Raises SourceError when the path does not exist or no reader recognises it, with the reason of
    each; UsageError for an option that the reader does not have.
    """
    if isinstance(path, Reader):
        return path
    named = False
    if _are_names(path):
        named = True
        for each in expand(path):
            if not Source(split_fields(each)[0]).exists():
                raise SourceError(f"{redact(each)}: no such file or folder: check the path")
    shown = redact(str(path)) if named else f"this {type(path).__name__}"
    first = path[0] if isinstance(path, list | tuple) else path
    reasons = []
    kinds = [(entry.name, entry.load()) for entry in entry_points(group="dlio.readers")]
    kinds.sort(key=lambda item: (getattr(item[1], "fallback", False), item[0]))
    with listed_once():
        for name, kind in kinds:
            if getattr(kind, "objects_only", False) == named:
                continue
            reason = kind.recognises(first)
            if reason is None:
                return _made(name, kind, path, options)
            reasons.append(f"{name}: {reason}")
    if not reasons:
        raise SourceError("no readers are installed: install dlio as a package (pip install dlio)")
    raise SourceError(f"{shown} is not a data set that dlio can read ({'; '.join(reasons)})")


def _are_names(path: object) -> TypeGuard[str | Sequence[str]]:
    """True for a path or several, false for another object."""
    return isinstance(path, str) or (
        isinstance(path, list | tuple) and all(isinstance(each, str) for each in path)
    )


def _made(name: str, kind: ReaderType, path: object, options: dict[str, object]) -> Reader:
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            raise UsageError(
                f"{option}=: the {name} reader, which reads {path}, has no such option"
            )
    return kind(path, **options)

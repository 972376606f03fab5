"""The reader protocol, and the search for the reader of a path.

A reader knows one format. It never caches payloads and starts no threads: tiers and engines do
that for all formats alike. Readers plug in through the entry-point group `dlio.readers`.
"""

import inspect
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.data.concatenation import ConcatReader
from dlio.data.links import following_links, links_followed
from dlio.data.schema import Schema
from dlio.data.source import Source, expand, listed_once, redact, split_fields
from dlio.data.splits import warn_of_splits
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import Layout
from dlio.util.arguments import named, nearest, one_of, path_in, paths_in
from dlio.util.extras import how_to_install
from dlio.util.limits import parsing

OPEN_ARGUMENTS: Final = (
    *("tiers", "image_size", "train", "crops", "transform"),
    *("seed", "on_error", "replicas", "follow_links", "requests"),
    *("patch", "patches_per_volume", "patch_stride", "pad", "window", "min_visible"),
)
"""Arguments of `dlio.open` that readers do not see, for suggestions."""


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


@dataclass(frozen=True, slots=True)
class SampleName:
    """Name of a sample for errors, which is looked up only when it is shown."""

    reader: Reader
    sample: int

    def __str__(self) -> str:
        return self.reader.name(self.sample)


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
    read paths but Python objects. One with a true `single` gets one path at a time; the data sets
    of several paths are joined.
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


def open_reader(path: object, *, follow_links: bool | None = None, **options: object) -> Reader:
    """Find the reader that recognises `path`, and open it.

    Args:
        path: a path or URL, several of them, or an object that a reader takes, such as torch's
            map-style data sets.
        follow_links: follow symbolic links that lead out of the data set's folder, or refuse them;
            None for DLIO_FOLLOW_LINKS.
        options: for the reader, such as `select` for HDF5 and Zarr.

    Raises SourceError when the path does not exist or no reader recognises it, with the reason of
    each; UsageError for an option that the reader does not have.
    """
    path = _as_text(path)
    if isinstance(path, Reader):
        if options:
            raise UsageError(f"{next(iter(options))}=: the data set is open already: give its path")
        return path
    named = False
    if _are_names(path):
        named = True
        for each in expand(path):
            if not Source(split_fields(each)[0]).exists():
                raise SourceError(f"{redact(each)}: no such file or folder: check the path")
    shown = redact(str(path)) if named else f"this {type(path).__name__}"
    first = path[0] if isinstance(path, list | tuple) else path
    kinds = [(entry.name, entry.load()) for entry in entry_points(group="dlio.readers")]
    kinds.sort(key=lambda item: (getattr(item[1], "fallback", False), item[0]))
    kinds = [each for each in kinds if getattr(each[1], "objects_only", False) != named]
    with listed_once(), following_links(follow_links):
        name, kind, reasons = _recognised(first, kinds, named)
        if kind is not None:
            single = named and getattr(kind, "single", False)
            urls = _each(cast("str | Sequence[str]", path)) if single else []
            if len(urls) > 1:
                return ConcatReader([_made(name, kind, url, options) for url in urls])
            return _made(name, kind, urls[0] if urls else path, options)
        if named and (fields := split_fields(cast(str, first))[1]):
            bare = split_fields(cast(str, first))[0]
            name, kind, reasons = _recognised(bare, kinds, named)
            if kind is not None:
                raise SourceError(
                    f"{shown} names {', '.join(fields)}, but {redact(bare)} ({name}) has no such "
                    "parts to choose from: give the path alone"
                )
    if not reasons:
        raise SourceError(f"no readers are installed: install dlio, {how_to_install('')}")
    remedy = "" if named else ": give a path, a list of paths, or a map-style data set of torch"
    raise SourceError(
        f"{shown} is not a data set that dlio can read ({'; '.join(reasons)}){remedy}"
    )


def open_parts(
    path: object, *, follow_links: bool | None = None, **options: object
) -> list[Reader]:
    """Open each of the paths that `path` stands for as a data set of its own; see `open_reader`.

    So they may differ in the shapes of their samples.
    """
    path = _as_text(path)
    each = _each(path) if _are_names(path) else [path]
    return [open_reader(one, follow_links=follow_links, **options) for one in each]


def _recognised(
    path: object, kinds: Sequence[tuple[str, Any]], named: bool
) -> tuple[str, Any, list[str]]:
    """Return name and class of the first reader that recognises a path, and why others do not."""
    reasons: list[str] = []
    for name, kind in kinds:
        single = named and getattr(kind, "single", False)
        try:
            reason = kind.recognises(expand(cast(str, path))[0] if single else path)
        except SourceError as error:
            reason = str(error)
        if reason is None:
            return name, kind, reasons
        reasons.append(f"{name}: {reason}")
    return "", None, reasons


def _as_text(path: object) -> object:
    """Return a path or several of pathlib as text, and any other object as it is."""
    if isinstance(path, list | tuple) and all(isinstance(each, str | os.PathLike) for each in path):
        return paths_in("path", path)
    if not isinstance(path, str | os.PathLike):
        return path
    path = path_in("path", path)
    if not path:
        raise UsageError("path='': name a folder, a file or a URL; the current folder is '.'")
    return path


def _each(path: str | Sequence[str]) -> list[str]:
    """Return the single paths that a path or several stand for; names of fields apply to all."""
    parts = [split_fields(each) for each in expand(path)]
    names = next((names for _, names in reversed(parts) if names), ())
    tail = f"::{','.join(names)}" if names else ""
    return [url + tail for url, _ in parts]


def _are_names(path: object) -> TypeGuard[str | Sequence[str]]:
    """True for a path or several, false for another object."""
    return isinstance(path, str) or (
        isinstance(path, list | tuple) and all(isinstance(each, str) for each in path)
    )


def _made(name: str, kind: ReaderType, path: object, options: dict[str, object]) -> Reader:
    known = inspect.signature(kind, eval_str=True).parameters
    own = [each for each in known if each != "path"]
    for option in options:
        if option not in known:
            raise UsageError(
                f"{option}=: the {name} reader, which reads {redact(str(path))}, has no such "
                f"option{nearest(option, [*own, *OPEN_ARGUMENTS])}"
            )
    options = {
        each: _fitting(each, value, known[each].annotation) for each, value in options.items()
    }
    if getattr(kind, "objects_only", False):
        return kind(path, **options)
    with parsing(redact(str(path))):
        reader = kind(path, **options)
    if reader.format == "folder":
        warn_of_splits(reader.path, reader.classes)
    return reader


def _fitting(name: str, value: object, hint: object) -> object:
    """Return an option's value if its type is the declared one; only texts and words are checked.

    Raises UsageError.
    """
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for each in typing.get_args(hint) if typing.get_origin(hint) is typing.Union else hints:
        if typing.get_origin(each) is typing.Literal:
            return value if value is None else one_of(name, value, typing.get_args(each))
    if Sequence[str] in hints:
        if isinstance(value, str):
            return value if str in hints else [value]
        several = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        if not (several or value is None):
            raise UsageError(f"{named(name, value)}: give a list of names, such as ['a', 'b']")
    elif str in hints and not isinstance(value, str | None):
        raise UsageError(f"{named(name, value)}: give text")
    return value


def reopened(kind: type[Reader], follow_links: bool, given: tuple[object, ...]) -> Reader:
    """Open a reader in another process as it was opened in this one; see `reopening`."""
    with following_links(follow_links):
        return kind(*given)


def reopening(kind: type[Reader], *given: object) -> tuple[object, ...]:
    """Return what a reader's `__reduce__` returns: its arguments, and whether it follows links.

    To be called while the reader is being opened.
    """
    return reopened, (kind, links_followed(), given)

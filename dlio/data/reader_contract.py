"""The contract of readers, on one page: duties of each, and abilities of some.

A reader knows one format. It never caches payloads and starts no threads: tiers and engines do
that for all formats alike. Readers plug in through the entry-point group `dlio.readers`; see
docs/guides/writing-a-reader.md.

    Reader          members that every reader has
    Abilities       further abilities of a reader: its attribute `abilities`, which may be missing
    RangedSamples   two more methods, where a sample lies in a file as ranges of bytes
    StoredBlocks    four more members, where the source has the blocks of tiers
    FileLocations   where samples lie in open files, as arrays
    ReaderType      the class, as its entry point names it, with its attribute `path_rules`
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.data.chunked_array import ChunkedArray
from dlio.data.flow import Flow
from dlio.data.schema import Buffer, Schema
from dlio.data.source import File
from dlio.plan.layout import Layout, sum_of


@runtime_checkable
class Reader(Protocol):
    """Knows one format: the number of samples, their sizes and names, and their payloads.

    All methods are thread-safe and deterministic. Sample indices are the reader's own,
    0 to len - 1. Readers can be pickled, for another process to read the same samples. Owner:
    the data set that opened it, which closes it. `dlio.testing.ReaderTests` checks these promises.

    A reader that can do more says so by an attribute `abilities`; see `Abilities`.
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
        """Close files. Interpretation afterwards opens them again."""


IN_MEMORY: Final = -2
"""The descriptor of payloads that lie at an address."""
IN_PARTS: Final = -3
"""The descriptor of payloads in parts, at whose `offset`, an address, the first PART lies."""
PART: Final = np.dtype([("descriptor", np.int64), ("offset", np.int64), ("bytes", np.int64)])
"""Of a payload that follows the one before: bytes of an open file, or IN_MEMORY at an address, or
IN_FOLDER, the whole of the NAMED_FILE at an address. The parts of a payload add up to its bytes."""
IN_FOLDER: Final = -4
NAMED_FILE: Final = np.dtype(
    [(name, np.int64) for name in ("folder", "name", "name_bytes", "changed_ns", "follows")]
)
"""A file below an open folder: the folder's descriptor; address and bytes of the path below it; the
time of change (ctime) of the file that is meant: another one is not read; 1 if the path may lead
over links, 0 if a file behind one is not read."""


def locate_in_memory(
    parts: npt.NDArray[np.void],
    values: npt.NDArray[np.generic],
    rows: npt.NDArray[np.int64] | None = None,
) -> None:
    """Have `parts` of type PART, shape (n,), be numbers of a contiguous array that stays: those at
    `rows`, or all."""
    rows = np.arange(len(values), dtype=np.int64) if rows is None else rows
    parts["descriptor"], parts["bytes"] = IN_MEMORY, values.itemsize
    parts["offset"] = values.ctypes.data + rows * values.itemsize


@dataclass(frozen=True, slots=True)
class FileLocations:
    """Where samples lie in open files; a row for each, all of shape (n,).

    Samples that are not `known` have to be read by `Reader.read`, and their other values mean
    nothing.
    """

    known: npt.NDArray[np.bool_]
    descriptor: npt.NDArray[np.int64]
    """Of an open file, which is one of `files`; or IN_PARTS."""
    offset: npt.NDArray[np.int64]
    """Of the first byte, in the file."""
    stored: npt.NDArray[np.int64]
    """Bytes in the file; fewer than `raw` where they are compressed as one block of LZ4."""
    raw: npt.NDArray[np.int64]
    """Bytes of the payload."""
    digest: npt.NDArray[np.uint64] | None
    """xxh3_64 of the payload; None where the format has no checksums."""
    files: list[object]
    """Owners of open files: these stay open while the list refers to them."""

    @classmethod
    def of_parts(
        cls, known: npt.NDArray[np.bool_], parts: npt.NDArray[np.void], files: list[object]
    ) -> "FileLocations":
        """Return those of payloads in `parts` of type PART, shape (n, parts of a payload), without
        digests."""
        sizes = parts["bytes"].sum(1)
        only = parts[:, 0]
        if parts.shape[1] == 1 and not (only["descriptor"] == IN_FOLDER).any():
            return cls(known, only["descriptor"], only["offset"], sizes, sizes, None, files)
        begins = parts.ctypes.data + np.arange(len(parts), dtype=np.int64) * parts[:1].nbytes
        places = np.full(len(parts), IN_PARTS, np.int64)
        return cls(known, places, begins, sizes, sizes, None, [*files, parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Abilities of a reader beyond `Reader`; the defaults are those of most readers.

    A reader has it as an attribute, or as a property if it depends on the reads so far.
    """

    # How samples are requested

    flow: Flow | None = None
    """Limits the requests in flight, for a reader whose samples are requests of their own, each
    with a latency. Samples are then read as they are needed, and fill their blocks as they go by.
    """
    multi_get: bool = False
    """True if several samples take one request, of a reader with `flow`."""
    random_access: bool = False
    """True if a sample in a container can be read for its own bytes, without its neighbours. Where
    `Reader.objects` is true this is so anyway."""

    locate: (
        Callable[
            [npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]], FileLocations
        ]
        | None
    ) = None
    """Returns where samples lie in local files, by (samples, their blocks, places in these): they
    are then read without the reader. Thread-safe; samples that
    cannot be located are not known, and raise nothing."""

    # Sizes

    sizes_are_estimates: bool = False
    """True if `Reader.sizes` are estimates, the same on all ranks: a sample's true size is known
    when it has been read."""
    data_bytes: int | None = None
    """Payload bytes of the data set, if known without summing `Reader.sizes`."""

    # Arrays, for patches and windows

    chunked: Callable[[], Mapping[str, Sequence[ChunkedArray]]] | None = None
    """Returns the arrays by field, one a file, each with its chunks: `patch=` and `window=` of
    `dlio.open` then work for the format."""
    files_are_samples: bool = False
    """True if each file is one sample: a dimension more than a patch has is channels, not rows."""

    # Data sets that are inspected, which takes requests

    is_inspected: bool = True
    """False while `schema`, `sizes` and others are unknown; asking for them reads samples."""
    agree: Callable[[Communicator], None] | None = None
    """Has one rank inspect the data set for all. Collective; raises the same error on all ranks."""

    # Reports

    bytes_by_source: Callable[[], dict[str, int]] | None = None
    """Returns the payload bytes that were read from the storage of each source of a mixture."""
    summary: Callable[[], str] | None = None
    """Says in a sentence where the bytes came from, for the report of staging."""
    box_counts: Callable[[], dict[str, int]] | None = None
    """Returns the number of boxes of each class that has some, by name."""


_AS_ATTRIBUTES: Final = ("flow", "sizes_are_estimates", "chunked", "files_are_samples")
_DEFAULTS: Final = Abilities()


def abilities_of(reader: object) -> Abilities:
    """Return a reader's abilities."""
    own: Abilities | None = getattr(reader, "abilities", None)
    if own is not None:
        return own
    # Readers of other packages, from before there was `abilities`, have these as attributes.
    given: dict[str, Any] = {
        name: getattr(reader, name) for name in _AS_ATTRIBUTES if hasattr(reader, name)
    }
    return Abilities(**given) if given else _DEFAULTS


def data_bytes(reader: Reader) -> int:
    """Return the payload bytes of a data set."""
    known = abilities_of(reader).data_bytes
    return sum_of(reader.sizes) if known is None else known


def reads_alone(reader: Reader) -> bool:
    """True if a sample can be read for its own bytes: a file, or a record in a container."""
    return reader.objects or abilities_of(reader).random_access


@dataclass(frozen=True, slots=True)
class SampleName:
    """Name of a sample for errors, which is looked up only when it is shown."""

    reader: Reader
    sample: int

    def __str__(self) -> str:
        return self.reader.name(self.sample)


@runtime_checkable
class RangedSamples(Protocol):
    """A reader some of whose samples are made of ranges of files, as they are stored.

    Over a network a large sample is then read by several requests at a time.
    """

    def ranges_of(self, sample: int) -> Sequence[tuple[File, int, int]]:
        """Return (file, offset, bytes) of a sample's ranges; none if the reader is to read it."""

    def payload_of(self, sample: int, parts: Sequence[memoryview]) -> Buffer:
        """Return the payload out of the bytes of the ranges. Raises SourceError."""


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


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a folder fits a reader, to compare with others that recognise it as well."""

    words: str
    """Its samples, with counts, such as `2 class folders with 5 images`."""
    weight: float
    """Files that it would read; fewer for those that may be there by chance."""
    is_marked: bool = False
    """True if the folder says that it is of the format, by its index or annotations."""
    in_folders: bool = False
    """True if its samples lie in folders, which may also be splits."""
    left_out: tuple[str, ...] = ()
    """Files that it could read and would leave out, with counts."""
    doubts: tuple[str, ...] = ()
    """What the folder may mean otherwise."""
    used: tuple[str, ...] = ()
    """Files at the top that it reads besides samples, such as a table of labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """How `dlio.open` uses a reader's class; the defaults are those of most formats."""

    one_path: bool = False
    """True if it takes one path at a time: several are opened one by one and concatenated."""
    is_fallback: bool = False
    """True if it is asked after all others, since others know better what it recognises."""
    takes_objects: bool = False
    """True if it reads no paths but Python objects, such as data sets of torch."""
    owns: Callable[[str], bool] | None = None
    """True for the name of a file, in lower case, that it reads out of a folder: these are counted
    and have splits. None if the format has an index, or folders of its own."""
    samples: tuple[str, ...] = ()
    """Suffixes of its samples, if these are files in class folders: a folder whose samples all lie
    in one folder below is read from there."""


class ReaderType(Protocol):
    """A reader's class, as entry points name it.

    It may have an attribute `path_rules`, and two static methods: `fit(path, options)` returns the
    `Fit` of a folder that it recognises, or None if that was by chance; `own_splits(path, options)`
    the splits of a folder that it knows by other means than folders and names of files.
    """

    def __call__(self, path: object, **options: object) -> Reader: ...

    def recognises(self, path: object) -> str | None:
        """Return None if `path` is of this format, otherwise the reason why not, in a few words.

        Of several paths, only the first is asked about.
        """


def path_rules_of(kind: object) -> PathRules:
    """Return how a reader's class is used."""
    own: PathRules | None = getattr(kind, "path_rules", None)
    if own is not None:
        return own
    # Classes of other packages from before there was `path_rules`.
    return PathRules(
        one_path=bool(getattr(kind, "single", False)),
        is_fallback=bool(getattr(kind, "fallback", False)),
        takes_objects=bool(getattr(kind, "objects_only", False)),
    )

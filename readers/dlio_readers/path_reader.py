"""The base class of readers of files, and questions about many files at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dlio.data.index import fingerprint_of
from dlio.data.links import following_links, links_followed, opened_by_user, path_of_user
from dlio.data.schema import Schema, Value
from dlio.data.source import File, Source, expand, own_name, split_fields
from dlio.errors import UsageError
from dlio.plan.layout import Layout, cut_blocks
from dlio.plan.order import Order
from dlio.storage.file_system_kind import file_system_of
from dlio.util.arguments import listed, nearest
from dlio.util.kept_memory import counted_together
from dlio.util.limits import is_trusted, trusting
from dlio.util.parallel import each_of

# The same question about many files, put to a network's storage many at a time

_THREADS: Final = 32

T = TypeVar("T")
R = TypeVar("R")


def concurrently(function: Callable[[T], R], items: Sequence[T], path: str) -> list[R]:
    """Call `function` on each item, files at a path, and return the results in order.

    Over a network each call takes a round trip or more, and 32 are under way at a time; on a disk
    they follow one another. Raises the first error, and SourceError when none answers.
    """
    if len(items) < 2 or not file_system_of(path).network:
        return [function(item) for item in items]
    return each_of(function, items, min(_THREADS, len(items)), path)


# Readers

_Guards = tuple[bool, bool, str | None]
"""Links are followed; the data set is trusted; the path that the user has named."""
_Again = tuple[type["PathReader"], _Guards, tuple[object, ...], dict[str, object]]


class PathReader:
    """A reader of one or several paths, which can be pickled: another process opens them again."""

    objects = False
    path: str
    schema: Schema
    classes: Sequence[str] = ()
    format: str
    fingerprint: str
    layout: Layout
    unlabelled = ""
    """Why the field with a label's name gives no labels; empty if it does, or if there is none."""
    _again: _Again

    def __new__(cls, path: str | Sequence[str], *given: object, **options: object) -> Self:
        # Here and not in `__init__`: the arguments of any subclass, as they were given, and links
        # as they are followed while the reader is opened.
        made = super().__new__(cls)
        made.path = path if isinstance(path, str) else " ".join(path)
        guards = links_followed(), is_trusted(), path_of_user()
        made._again = cls, guards, (path, *given), options
        return made

    def __reduce__(self) -> tuple[Any, _Again]:
        return _opened, self._again

    @property
    def trusted(self) -> bool:
        """True if the data set was trusted when it was opened."""
        return self._again[1][1]

    def __len__(self) -> int:
        return int(self.layout.starts[-1])

    def name(self, sample: int) -> str:
        return f"{sample:09d}"

    def close(self) -> None:
        """Nothing is open between calls."""

    def _lay_out(
        self,
        version: int,
        files: Sequence[File],
        sizes: npt.NDArray[np.int64],
        units: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Set the layout, in the order of the files, and the fingerprint; the schema is set before.

        `units` are the first samples of runs that are decoded together.
        """
        self.layout = cut_blocks(sizes, Order(len(sizes), 0, shuffled=False), units)
        stamps = [f"{file.url} {file.stamp}" for file in files]
        self.fingerprint = fingerprint_of(
            self.format, version, self.schema.to_json(), *stamps, self.layout.starts
        )


def _opened(
    kind: type[PathReader],
    guards: _Guards,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> PathReader:
    with (
        following_links(guards[0]),
        trusting(guards[1]),
        opened_by_user(guards[2]),
        counted_together(),
    ):
        return kind(*given, **options)


def lie_at(
    path: str, suffixes: tuple[str, ...], marker: str = "", *, has_fields: bool = True
) -> bool:
    """True if a path is a file with one of some suffixes, or a folder that has one, or a `marker`
    instead. If it `has_fields`, their names may stand after `::`.
    """
    first = expand(path)[0]
    url = split_fields(first)[0] if has_fields else first
    if own_name(url).endswith(suffixes):
        return True
    source = Source(url)
    rows = source.names() if source.is_folder() else []
    return any(name == marker or name.lower().endswith(suffixes) for name, _ in rows)


def split_paths(path: str | Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return (paths, names of fields) of `a.h5::x,y`; of several paths, the last names apply."""
    parts = [split_fields(each) for each in ([path] if isinstance(path, str) else path)]
    return [url for url, _ in parts], next((names for _, names in reversed(parts) if names), ())


def check_names(path: str, names: Sequence[str], known: Sequence[str], kind: str) -> None:
    """Raise UsageError if one of some names of fields is not known in a file."""
    there = set(known)
    for name in names:
        if name not in there:
            has = listed(known)
            raise UsageError(f"{path} has no {kind} {name!r}: it has {has}{nearest(name, known)}")


def joined_rows(
    schema: Schema, count: int, columns: Mapping[str, Sequence[Value] | npt.NDArray[np.generic]]
) -> list[bytes | memoryview]:
    """Return the payloads of samples whose values are the rows of columns."""
    if schema.is_fixed:
        return schema.join_fixed(count, {name: np.asarray(each) for name, each in columns.items()})
    return [
        schema.join({name: values[k] for name, values in columns.items()}) for k in range(count)
    ]


def neighbours(
    samples: npt.NDArray[np.int64], begins: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield runs of samples that follow one another: (first, after the last, slots in `samples`).

    A sample that is asked for twice is in its run twice. With `begins`, the first sample of each
    file, ascending, a run is in one of them.
    """
    if len(samples) == 1:
        yield int(samples[0]), int(samples[0]) + 1, [0]
    if len(samples) < 2:
        return
    first, last = int(samples[0]), int(samples[-1])
    # A block, as mostly: nothing to sort.
    if last - first == len(samples) - 1 and bool((samples[1:] > samples[:-1]).all()):
        edges = () if begins is None else begins[np.searchsorted(begins, first, "right") :]
        cuts = [first, *(int(edge) for edge in edges if edge <= last), last + 1]
        for low, high in pairwise(cuts):
            if low < high:  # A file may have no samples.
                yield low, high, list(range(low - first, high - first))
        return
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    gaps = ordered[1:] - ordered[:-1] > 1
    if begins is not None:
        files = np.searchsorted(begins, ordered, side="right")
        gaps |= files[1:] > files[:-1]
    for low, high in pairwise([0, *(np.flatnonzero(gaps) + 1).tolist(), len(order)]):
        yield int(ordered[low]), int(ordered[high - 1]) + 1, order[low:high].tolist()

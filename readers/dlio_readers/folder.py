"""The reader of folders of images: one folder per class, or one flat folder with a label table.

Class folders are ordered as by torchvision's ImageFolder. The listing of a local folder is cached
and reused until a folder changes. It is held in arrays instead of objects, so that a million files
take a few tens of megabytes.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.folder_names import Rows, files_among, folders_among, present
from dlio.data.index import Arrays, let_go
from dlio.data.index_memory import KeptParts, Names, new_column
from dlio.data.interpretation import counted_below, named_files
from dlio.data.links import FolderLinks, links_followed
from dlio.data.reader_contract import (
    PART,
    Abilities,
    FileLocations,
    Fit,
    PathRules,
    locate_in_memory,
)
from dlio.data.schema import IMAGE_LABEL, LABEL, Schema
from dlio.data.source import Entry, Source, file_at
from dlio.data.splits import split_of, splits_among
from dlio.errors import SourceError, UsageError
from dlio.image.native.listed_files import files_a_look
from dlio.plan.layout import STORAGE_SEED, shuffled_layout
from dlio.storage.block import MAX_SAMPLE_BYTES
from dlio.storage.shard_file import SUFFIX
from dlio.util.parallel import each_of, follow
from dlio.util.units import counted
from dlio_readers.fileset import (
    PICTURES,
    FileSet,
    ListedReader,
    by_look,
    files_in,
    index_kind,
    listing_threads,
    look_at,
    note_others,
)
from dlio_readers.folder_doubts import (
    doubt_of_masks,
    doubts_of_classes,
    label_words,
    masks_among,
    name_labels,
    number_labels,
)
from dlio_readers.foreign_labels import check_downloads, foreign_words
from dlio_readers.hollow_folders import remedy_of_hollow
from dlio_readers.label_tables import TABLES, check_agreement, numbered, read_table
from dlio_readers.picture_lists import (
    PictureLists,
    find_lists,
    has_lists,
    names_of_lists,
)
from dlio_readers.unread_labels import (
    files_of_labels,
    labels_beside,
    lists_classes,
    unread_labels,
    write_them,
)

_FEW: Final = 8
"""Files of which fewer are read one by one: a call for all costs some 40 us."""
_CHOICES: Final = ("layout", "table", "label")
_RECORDS: Final = (".json", ".jsonl", ".parquet")
"""Tables whose rows name their columns."""
_FEW_FOLDERS: Final = 16
"""Folders of which one may hold splits, at most: class folders are mostly more."""
_DEEPEST: Final = 8
_PROBED: Final = 64
"""Class folders whose names of files are looked at for what else they may mean."""
_SOME_NAMES: Final = 64
"""Names of pictures that lists next to class folders are searched for."""
_COLUMNS: Final = ("sizes", "times", "changed", "name_ends")
"""Of images: `times` are modification times, which the fingerprint includes; `changed` are change
times (ctime), by which reads, and openings with a cached listing, detect that a file was replaced.
A change of permissions affects only the latter."""
_HELD: Final = 1 << 16
"""Images whose columns are in memory at a time while an index is made."""
_IMAGE: Final = Schema((("image", "image"),))


@dataclass(frozen=True, slots=True)
class _FolderFiles:
    """The images of one folder, or of a part of it, and its times by `Source.times_ns`."""

    name: str
    times_ns: list[int]
    first: str
    """Name of the first image, by which the parts of a folder are sorted."""
    count: int
    name_bytes: int
    columns: npt.NDArray[np.uint8]
    """Their `_COLUMNS` and the bytes of their names."""


class FolderReader(ListedReader):
    """Read `<class>/**/*.jpg` and other image formats, or `*.jpg` with `labels.csv`.

    A sample is the bytes of an image file and its label, or the image alone without labels.
    A label table has a column of file names and a column of labels, which are class numbers or
    class names. In JSON it is an object from names to labels, or a list of rows. One that names the
    pictures of folders gives the labels in place of the folders' names.

    Args:
        path: the folder.
        layout: `classes` for folders that are classes, `flat` for the pictures of the folder
            itself, `names` for these with labels that their names begin with, such as `cat` of
            `cat.12.jpg`; None for classes or flat, of which there clearly are more.
        split: which of several splits that lists of pictures name, or `all`.
        table: the list of pictures and labels to read, below the folder or by its full path; None
            for those that are found; see `dlio_readers.picture_lists`.
        label: the column of labels in lists with a header; None for the one that is called so.

    Raises SourceError if the folder, or a class folder, holds no images, or if the table and the
    images disagree.
    """

    format = "folder"
    path_rules = PathRules(one_path=True, is_fallback=True, samples=PICTURES)
    version = 7

    def __init__(
        self,
        path: str,
        layout: Literal["classes", "flat", "names"] | None = None,
        split: str | None = None,
        table: str | None = None,
        label: str | None = None,
    ) -> None:
        self.path = path
        self._layout, self._split, self._table, self._label = layout, split, table, label
        # A listing that followed links elsewhere is not used by those who do not.
        kind = "-".join(["folder", *["links"] * links_followed(), *([layout] if layout else [])])
        if split or table or label:
            is_elsewhere = table and (os.path.isabs(table) or "://" in table)
            stamp = file_at(table).opened().state if table and is_elsewhere else ""
            kind = index_kind(kind, split, table, label, stamp)
        index, head = self._open(Source(path), kind)
        self.schema = IMAGE_LABEL if head["labelled"] else _IMAGE
        self.labels = index["labels"]
        self.sizes = index["sizes"]
        """Bytes of each payload: the file's, and eight for the label."""
        self._files = FileSet(self._source, index, overhead=self.schema.overhead)
        self.layout = shuffled_layout(self.sizes)

    @property
    def abilities(self) -> Abilities:
        # Not an attribute: it would refer to the reader, which is to go with its last user.
        return Abilities(locate=self._locate) if self._source.local else Abilities()

    @staticmethod
    def recognises(path: str) -> str | None:
        source = Source(path)
        if not source.is_folder():
            return "is not a folder"
        rows = source.names()
        if any(name.endswith(SUFFIX) for name, _ in rows):
            return "holds native shards"
        if any(folder or name.lower().endswith(PICTURES) for name, folder in rows):
            return None
        if rows and all(name in _bare_links(source, "", rows) for name, _ in rows):
            return None  # Links to class folders that are gone: listing them says so.
        return "holds neither images nor class folders: sort images into one folder per class"

    @staticmethod
    def fit(path: str, options: Mapping[str, object]) -> Fit:
        """Return how well a folder fits: as class folders, or pictures with or without a table."""
        return plan_of(Source(path), *map(options.get, _CHOICES)).fit

    @staticmethod
    def own_splits(path: str, options: Mapping[str, object]) -> list[str]:
        """Return the splits that lists of pictures in a folder name."""
        if not options and not has_lists(Source(path)):
            return []
        lists = plan_of(Source(path), *map(options.get, _CHOICES)).lists
        return [] if lists is None else list(lists.splits)

    def _read(self, sample: int) -> bytes | memoryview:
        label = b""
        if self.schema.overhead:
            label = LABEL.pack(int(self.labels[sample]))
        return self._content(self._files, sample, label)

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        if len(samples) < _FEW:
            return [self._read(int(sample)) for sample in samples]
        samples = np.asarray(samples, np.int64)
        labels = self.labels[samples].astype("<i8").view(np.uint8).reshape(len(samples), 8)
        payloads = self._files.read_many(samples, labels[:, : self.schema.overhead])
        return [
            self._read(sample) if payload is None else payload
            for sample, payload in zip(samples.tolist(), payloads, strict=True)
        ]

    def _locate(self, samples: npt.NDArray[np.int64], _: object, __: object) -> FileLocations:
        """Return where samples lie in a local folder; see `Abilities.locate`."""
        has_label, labels = self.schema.overhead > 0, self.labels[samples]
        parts = np.zeros((len(samples), 1 + has_label), PART)
        holders = self._files.locate(samples, parts[:, -1])
        known = np.full(len(samples), holders is not None)
        if has_label:
            locate_in_memory(parts[:, 0], labels)
        return FileLocations.of_parts(known, parts, [*(holders or ()), labels])

    def _fits(self, index: Arrays, head: dict[str, Any]) -> bool:
        sizes, names, ends = index["sizes"], index["names"], index["name_ends"]
        rows = [index[name] for name in ("labels", "sizes", "changed", "name_ends")]
        if any(each.shape != (len(sizes),) or each.dtype != np.int64 for each in rows):
            return False
        last = ends[-1] if len(ends) else 0
        rising = (ends[1:] >= ends[:-1]).all() and (not len(ends) or ends[0] >= 0)
        right = (sizes >= 0).all() and (sizes <= MAX_SAMPLE_BYTES).all()
        return bool(rising and right and names.dtype == np.uint8 and names.shape == (last,))

    def _list(self) -> tuple[Arrays, bool]:
        source, started = self._source, time.time()
        rows = source.names()
        classes = [name for name, folder in rows if folder]
        plan = plan_of(source, self._layout, self._table, self._label, explains=False)
        if plan.lists is not None:
            index, head = _by_lists(source, plan.lists, self._split)
        elif plan.labels or plan.is_named:
            index, head = _by_table(source, plan.table, plan.labels, plan.pictures)
        elif plan.is_flat:
            index, head = _flat(source, rows)
        elif classes:
            _look_for_folders(source, "", rows)
            index, head = _classes(source, classes)
        else:
            _look_for_folders(source, "", rows)
            source.check_dangling(0)
            raise SourceError(f"{source.path()} holds no images ({', '.join(PICTURES)})")
        return self._listed(
            started,
            index,
            head,
            json.dumps([head["classes"], STORAGE_SEED]),
            *[array for name, array in index.items() if name != "changed"],
            *FileSet(source, index).content_samples(),
            shuffled_layout(index["sizes"]).starts,
        )


def _classes(source: Source, classes: Sequence[str]) -> tuple[Arrays, dict[str, Any]]:
    """List class folders recursively."""
    listed = _Walk(source).run(classes)
    source.check_dangling(sum(each.count for each in listed))
    folders = {"": source.times_ns()}
    parts: list[_FolderFiles] = []
    counts: list[int] = []
    by_class: dict[str, list[_FolderFiles]] = {name: [] for name in classes}
    for each in listed:
        by_class[each.name.split("/", 1)[0]].append(each)
    for name, own in by_class.items():
        own.sort(key=lambda each: (each.name, each.first))
        folders.update({each.name: each.times_ns for each in own})
        counts.append(sum(each.count for each in own))
        if not counts[-1]:
            raise SourceError(
                f"{source.path(name)} is a class folder without images "
                f"({', '.join(PICTURES)}): {remedy_of_hollow(source, name, classes)}"
            )
        parts += own
    index = _index_of(parts, IMAGE_LABEL.overhead)
    index["labels"] = new_column(sum(counts), np.int64)
    ends = np.cumsum(counts)
    for number, (end, count) in enumerate(zip(ends, counts, strict=True)):
        index["labels"][end - count : end] = number
    return index, {"classes": list(classes), "labelled": True, "folders": folders}


def _index_of(parts: Sequence[_FolderFiles], overhead: int) -> Arrays:
    """Return the arrays of the listing; a payload has `overhead` bytes more than its file."""
    count = sum(each.count for each in parts)
    index: Arrays = {name: new_column(count, np.int64) for name in _COLUMNS}
    index["names"] = new_column(sum(each.name_bytes for each in parts), np.uint8)
    end = name_end = 0
    for part in parts:
        begin, end = end, end + part.count
        rows = np.frombuffer(part.columns, np.int64, 4 * part.count).reshape(4, -1)
        for name, row, more in zip(_COLUMNS, rows, (overhead, 0, 0, name_end), strict=True):
            index[name][begin:end] = row + more
        name_end += part.name_bytes
        index["names"][name_end - part.name_bytes : name_end] = part.columns[rows.nbytes :]
        let_go(part.columns)
        if end // _HELD > begin // _HELD:
            for values in index.values():
                let_go(values)
    return index


def _index_of_one(own: Sequence[str], looks: npt.NDArray[np.int64], overhead: int) -> Arrays:
    """Return the arrays of the listing of one folder."""
    _check_sizes(own, looks)
    names = own if isinstance(own, Names) else Names.of(own)
    index: Arrays = {name: new_column(len(own), np.int64) for name in _COLUMNS}
    for at in range(0, len(own), _HELD):
        rows = slice(at, at + _HELD)
        sizes, *times = looks[rows].T
        for values, more in zip(
            index.values(), (sizes + overhead, *times, names.ends[rows]), strict=True
        ):
            values[rows] = more
            let_go(values)
        let_go(looks)
    return {**index, "names": names.blob}


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """How a folder of images is read."""

    fit: Fit
    is_flat: bool = False
    table: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of pictures of folders, by their names, out of the table; {} without."""
    pictures: list[str] = field(default_factory=list)
    """All pictures below the folder, where a table names some."""
    lists: PictureLists | None = None
    """Lists of the pictures of splits."""
    is_named: bool = False
    """True if names of pictures are their labels."""


def plan_of(
    source: Source,
    layout: object = None,
    table: object = None,
    label: object = None,
    *,
    explains: bool = True,
) -> FolderPlan:
    """Return how a folder is read: with a table or lists, as class folders, or flat.

    Its fit lacks doubts, and files that are left out, unless it `explains`: they take all names.

    Raises UsageError if it holds about as many pictures as its folders do.
    """
    named, column = (each if isinstance(each, str) else None for each in (table, label))
    rows = source.names()
    table = named or next((name for name in TABLES if (name, False) in rows), "")
    if column is not None and table.endswith(_RECORDS) and not os.path.isabs(table):
        pictures = list(files_in(source, "", PICTURES))
        labels = read_table(source, table, pictures, column)
        words = f"{counted(len(labels), 'picture')} with the labels of {table}"
        fit = Fit(words, len(labels), is_marked=True, used=(table,))
        return FolderPlan(fit, table=table, labels=labels, pictures=pictures)
    if named is not None or column is not None:
        lists = find_lists(source, named, column)
        if lists is not None:
            return _list_plan(source, lists)
        if not explains:  # It may be the label of another reader's.
            raise UsageError(
                f"label={label!r}: {source.path()} has no list of its pictures: leave label= out, "
                "or name a table of theirs with table="
            )
    here, folders = files_among(rows, PICTURES), folders_among(rows)
    if layout == "names":
        return _name_plan(source, here)
    rest = [name for name in TABLES if (name, False) in rows and name != table]
    useless = ""
    if table and folders and layout == "classes":
        useless = f"{table}, as layout='classes' takes the folders' names"
    elif table and folders:
        plan, useless = _table_plan(source, table)
        if plan is not None:
            return plan
    lists = None if layout or (table and not folders) else find_lists(source)
    if lists is not None:
        return _list_plan(source, lists)
    if not folders:
        words = f"{counted(len(here), 'picture')}" + (f" with {table}" if table else "")
        weight = len(here) if table else len(here) / 2
        notes: tuple[str, ...] = ()
        files: list[str] = []
        if explains and here and not table and not layout:
            notes, files = _flat_words(source, here)
        if rest:
            notes = (*notes, f"{named_files(rest)}, since {table} is read")
        masks = [] if layout or not explains else masks_among(here)
        doubts = [doubt_of_masks(masks)] if masks else []
        parts = splits_among(here) if explains else {}
        if len(parts) > 1 and sum(map(len, parts.values())) == len(here) and not table:
            shown = ", ".join(f"{name} ({len(own)})" for name, own in parts.items())
            doubts.append(f"names say the splits {shown}: put the pictures of each into a folder")
        fit = Fit(words, weight, left_out=notes, used=(table, *files), doubts=tuple(doubts))
        return FolderPlan(fit, is_flat=bool(here))
    _check_classes(source, folders)
    if layout is None:
        check_downloads(source, folders)
    others = [useless] if useless and not here else []
    words, weight = _class_words(source, folders)
    shown, is_chosen = named_files(here), layout is not None
    if layout is None and here:
        if table or len(here) >= 2 * weight:
            layout = "flat"
        elif weight >= 2 * len(here):
            layout = "classes"
        else:
            raise UsageError(
                f"{source.path()} is {words}, or {counted(len(here), 'picture')} next to them: "
                "choose with layout='classes' or layout='flat'"
            )
    if layout == "flat":
        lost: tuple[str, ...] = (f"{words}, which layout='classes' reads",) if weight else ()
        files = []
        if explains and not is_chosen and not table:
            notes, files = _flat_words(source, here, folders[:_PROBED])
            lost += notes
        flat = Fit(
            f"{counted(len(here), 'picture')}",
            len(here) / 2,
            left_out=lost,
            used=(table, *files),
        )
        return FolderPlan(flat, is_flat=True)
    if here:
        others.append(f"{shown} next to them, which layout='flat' reads")
    used = (table,) if table else ()
    doubts = []
    if layout is None and explains:
        below = _PicturesBelow(source, folders[:_PROBED])
        doubts = doubts_of_classes(folders, below)
        doubts += _nested(source, folders, bool(below))
        others += _beside_pictures(source, below)
        some = nsmallest(_SOME_NAMES, chain.from_iterable(below.values()))
        some = some or _further_in(source, folders)
        above = files_of_labels(source, "", some, is_strict=True)
        above = [name for name in above if name != table and not name.lower().endswith(".csv")]
        above = [name for name in above if not lists_classes(source, name, folders)]
        if above:
            others.append(f"{named_files(above)}, which may hold labels: folders' names are taken")
    fit = Fit(
        words,
        weight,
        in_folders=True,
        left_out=tuple(others),
        used=used,
        doubts=tuple(doubts),
    )
    return FolderPlan(fit)


def _flat_words(
    source: Source, pictures: Sequence[str], folders: Sequence[str] = ()
) -> tuple[tuple[str, ...], list[str]]:
    """Return (words about the files next to some pictures, and in folders next to these, that may
    hold their labels, those of the files that lie next to them)."""
    notes, files = unread_labels(source, pictures)
    inner = [
        f"{folder}/{name}"
        for folder in folders
        for name in files_of_labels(source, folder, pictures, is_strict=True)
    ]
    if inner:
        words = foreign_words(source, inner)
        other = f"{named_files(inner)}, which may hold labels: {write_them(source, inner[0])}"
        notes = (*notes, words or other)
    return (*_names_words(pictures), *_lists_above(source, pictures), *notes), files


def _name_plan(source: Source, here: Sequence[str]) -> FolderPlan:
    """Return how pictures are read whose names are labels. Raises UsageError if they are not."""
    labels = name_labels([os.path.splitext(name)[0] for name in here])
    if not labels:
        raise UsageError(
            f"layout='names': the names of the pictures of {source.path()} are not labels and "
            "numbers, such as cat.12.jpg, of several classes"
        )
    named = {name: labels[os.path.splitext(name)[0]] for name in here}
    words = f"{counted(len(here), 'picture')} with labels in their names"
    fit = Fit(words, len(here), is_marked=True)
    return FolderPlan(fit, labels=named, pictures=list(here), is_named=True)


def _names_words(here: Sequence[str]) -> tuple[str, ...]:
    """Return the words about pictures whose names look like labels."""
    labels = label_words(os.path.splitext(name)[0] for name in here)
    shown = labels or number_labels(os.path.splitext(name)[0] for name in here)
    some = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    if not shown:
        return ()
    if not labels:
        return (
            f"numbers that names begin with and that repeat ({some}), which may be labels: write "
            "them to labels.csv, of file_name and label",
        )
    return (f"labels that the names look like ({some}), which layout='names' reads",)


class _PicturesBelow(Mapping[str, Sequence[str]]):
    """The names of the pictures in some folders, those without any left out. They are looked up
    each time: all at once would take more memory than the data set's index."""

    def __init__(self, source: Source, folders: Sequence[str]) -> None:
        self._source = source
        self._counts = {name: len(own) for name in folders if (own := self[name])}

    def __getitem__(self, folder: str) -> list[str]:
        rows = self._source.names(folder)
        return [name for name, inner in rows if not inner and name.lower().endswith(PICTURES)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


def _further_in(source: Source, folders: Sequence[str]) -> list[str]:
    """Return the names of some pictures in class folders that hold folders alone."""
    every = (name for folder in folders[:_PROBED] for name in files_in(source, folder, PICTURES))
    return [name.rpartition("/")[2] for name in islice(every, _PROBED)]


def _nested(source: Source, folders: Sequence[str], has_own: bool) -> list[str]:
    """Return the words about class folders that hold the other classes again, as archives do that
    were packed twice, or that all hold the same folders, such as `images` and `masks`, or folders
    and no pictures unless one `has_own`, as SUN397's `a/abbey`."""
    inner = {name: source.folders(name) for name in folders[:_PROBED]}
    for name, own in inner.items():
        again = [each for each in own if each in folders]
        if len(again) > 1:
            return [
                f"{name} is a class that holds folders called {' and '.join(again[:2])}, as other "
                f"classes are: remove it, or open {source.path(name)}"
            ]
    # Of amazon/images/bike, dslr/images/bike those in images.
    deeper = [
        (len(own) == 1 and source.folders(f"{name}/{own[0]}")) or own for name, own in inner.items()
    ]
    first = deeper[0]
    if len(inner) > 1 and len(first) > 1 and all(own == first for own in deeper):
        return [
            f"each of these folders holds the folders {', '.join(first[:3])}, as cases do and "
            "classes do not: their labels are the outer folders all the same"
        ]
    several = next((name for name, own in inner.items() if len(own) > 1), None)
    if several is not None and len(inner) > 1 and all(inner.values()) and not has_own:
        return [
            f"these folders hold folders alone, such as {several}/{inner[several][0]}, and labels "
            f"are the outer ones: open {source.path('*')}/ for the inner ones"
        ]
    return []


def _beside_pictures(source: Source, below: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words about files next to the pictures of class folders that may say more."""
    label_files = []
    for folder, pictures in below.items():
        if pictures:
            label_files += [
                f"{folder}/{name}" for name in files_of_labels(source, folder, pictures)
            ]
    if not label_files:
        return []
    words = foreign_words(source, label_files)
    return [words or f"{named_files(label_files)} in class folders, which may hold labels or boxes"]


def _list_plan(source: Source, lists: PictureLists) -> FolderPlan:
    count = sum(len(each) for each in lists.splits.values())
    labelled = "the labels of " if lists.encoding.numbers else ""
    words = f"{counted(count, 'picture')} with {labelled}{', '.join(lists.files)}"
    left: tuple[str, ...] = ()
    if lists.unlisted:
        left = (f"{named_files(lists.unlisted)} that they do not name",)
    left += labels_beside(source, lists)
    return FolderPlan(
        Fit(words, count, is_marked=True, left_out=left, used=lists.files), lists=lists
    )


def _lists_above(source: Source, pictures: Sequence[str]) -> tuple[str, ...]:
    """Return the words about lists next to a folder of pictures that is opened by itself."""
    above, _, folder = source.root.rpartition("/")
    if not source.local or not above:
        return ()
    try:
        lists = names_of_lists(Source(above), folder)
        others = Source(above).files()
    except (SourceError, UsageError):
        return ()
    matlab = [name for name in others if "label" in name.lower() and name.endswith(".mat")]
    if matlab:
        return (
            f"the labels of {above}/{matlab[0]}, which dlio does not read: "
            f"{write_them(source, matlab[0])}",
        )
    if not lists:
        label_files = files_of_labels(Source(above), "", pictures, is_strict=True)
        if ("annotations", True) in Source(above).names():
            inner = files_of_labels(Source(above), "annotations", pictures, is_strict=True)
            label_files += [f"annotations/{name}" for name in inner]
        if ("ann", True) in Source(above).names():
            label_files += [f"ann/{name}" for name, _ in Source(above).names("ann")]
        if words := foreign_words(Source(above), label_files):
            return (f"in {above} {words}",)
        where = f"{named_files(label_files)} in {above}, which may hold labels"
        return (f"{where}: write them to {source.path('labels.csv')}",) if label_files else ()
    return (f"the labels of {above}/{lists[0]}: open {above} with table={lists[0]!r}",)


def _check_classes(source: Source, folders: Sequence[str]) -> None:
    """Raise UsageError if each folder holds splits, such as Cityscapes' `leftImg8bit` and `gtFine`:
    pictures and their masks are not two classes; or if one of a few does, such as `data/train` and
    `data/valid` next to `test`."""
    if len(folders) == 1:
        return
    own = {folder: _splits_below(source, folder) for folder in folders[:_FEW_FOLDERS]}
    holding = next((folder for folder, (_, splits) in own.items() if splits), None)
    are_all = all(each == folder and parts for folder, (each, parts) in own.items())
    if holding is None or (len(folders) > _FEW_FOLDERS and not are_all):
        return
    at, splits = own[holding]
    shown = ", ".join(splits)
    others = [name for name in folders if not own[name][1]] if not are_all else []
    if others and not counted_below(source, others, PICTURES)[0]:
        return  # As `ImageSets` next to ImageNet's `Data/CLS-LOC`.
    if not are_all:
        rest = [source.path(name) for name in folders if split_of(name, folder=True)]
        raise UsageError(
            f"{source.path(holding)} holds the splits {shown}, and is not a class: open "
            f"{' or '.join([f'{source.path(at)} with split={splits[0]!r}', *rest])}"
        )
    raise UsageError(
        f"{source.path()}: {' and '.join(folders[:2])} hold the splits {shown}, and are not "
        f"classes: open one split, such as {source.path(folders[0])}/{splits[0]}, or both with "
        f"format='masks', images={folders[1]!r}, masks={folders[0]!r}, split={splits[0]!r}"
    )


def _splits_below(source: Source, folder: str) -> tuple[str, list[str]]:
    """Return (a folder, or the only one in it, and so on, the folders of several splits there)."""
    at = folder
    while len(inner := source.folders(at)) == 1 and at.count("/") < _DEEPEST:
        at = f"{at}/{inner[0]}"
    parts = splits_among(inner, folder=True)
    return at, [name for names in parts.values() for name in names] if len(parts) > 1 else []


def _class_words(source: Source, folders: Sequence[str]) -> tuple[str, float]:
    """Return ("2 class folders with 5 images", 5); a lone folder may be there by chance."""
    counts, more = counted_below(source, folders, PICTURES)
    total = sum(counts.values())
    words = f"{counted(len(counts), 'class folder')} with {'over ' * more}{counted(total, 'image')}"
    return words, total if len(counts) > 1 else 0.5 * bool(total)


def _table_plan(source: Source, table: str) -> tuple[FolderPlan | None, str]:
    """Return (how a folder is read by a table of labels, ""); (None, words about the table) if it
    names no pictures of folders."""
    pictures = list(files_in(source, "", PICTURES))
    try:
        rows = read_table(source, table, pictures)
    except SourceError as error:
        if any("/" not in name for name in pictures):
            raise
        return None, f"{table}, which gives no labels ({error})"
    known = set(pictures)
    if not any("/" in name and name in known for name in rows):
        if not rows or known.intersection(rows) or not pictures:
            return None, f"{table}, which has no labels of the pictures"
        return None, (
            f"{table}, whose names match no picture here (it has {next(iter(rows))}, the folder "
            f"{pictures[0]}): write them relative to the folder"
        )
    words = f"{counted(len(rows), 'picture')} with the labels of {table}"
    fit = Fit(words, len(rows), is_marked=True, used=(table,))
    return FolderPlan(fit, table=table, labels=rows, pictures=pictures), ""


def _by_table(
    source: Source, table: str, labels: dict[str, str], pictures: Sequence[str]
) -> tuple[Arrays, dict[str, Any]]:
    """List the pictures of folders that a table names. Raises SourceError if they do not agree."""
    check_agreement(source, table, labels, pictures)
    names = sorted(pictures)
    index = FileSet.listing(source, names)
    index["sizes"] = index["sizes"] + IMAGE_LABEL.overhead
    index["labels"], classes = numbered([labels[name] for name in names])
    below = {name.rpartition("/")[0] for name in names}
    places = ["", *[table] * bool(table), *sorted(below - {""})]
    folders = {place: source.times_ns(place) for place in places}
    return index, {"classes": classes, "labelled": True, "folders": folders}


def _by_lists(
    source: Source, lists: PictureLists, split: str | None
) -> tuple[Arrays, dict[str, Any]]:
    """List the pictures of a split. Raises UsageError if none is chosen of several."""
    labels = lists.chosen(split, source.path())
    names = sorted(labels)
    has = [name for name in names if labels[name]]
    if has and len(has) < len(names):
        raise UsageError(
            f"{source.path()}: {len(names) - len(has)} of its {counted(len(names), 'picture')} "
            f"have no label: choose with split= of {', '.join(lists.splits)}"
        )
    index = FileSet.listing(source, names)
    index["sizes"] = index["sizes"] + (IMAGE_LABEL.overhead if has else 0)
    index["labels"] = np.zeros(len(names), np.int64)
    classes: list[str] = []
    if has:
        index["labels"], classes = numbered(
            [labels[name] for name in names], lists.encoding_of(split, source.path())
        )
    below = {name.rpartition("/")[0] for name in names}
    own = [file for file in lists.files if not os.path.isabs(file) and "://" not in file]
    below |= {file.rpartition("/")[0] for file in own}
    places = ["", *own, *sorted(below - {""})]
    folders = {place: source.times_ns(place) for place in places}
    return index, {"classes": classes, "labelled": bool(has), "folders": folders}


def _flat(source: Source, top: Rows) -> tuple[Arrays, dict[str, Any]]:
    """List one folder of images, whose entries are `top`, and its label table if there is one."""
    note_others(source, "", files_among(top))
    if source.local:
        own, looks = _present(*_look_at_all(source, files_among(top, PICTURES)))
        source.check_dangling(len(own))
    else:
        own, looks = _images_of(source.listing())
    table = next((n for n in TABLES if (n, False) in top or (n, True) in top), None)
    folders = {"": source.times_ns()}
    labels = new_column(len(own), np.int64)
    labels[:] = 0
    classes: list[str] = []
    labelled = False
    if table is not None:
        folders[table] = source.times_ns(table)
        label_of = read_table(source, table, own)
        labelled = bool(label_of)
        if labelled:
            check_agreement(source, table, label_of, own)
            labels, classes = numbered([label_of[name] for name in own])
    index = _index_of_one(own, looks, IMAGE_LABEL.overhead * labelled)
    index["labels"] = labels
    return index, {"classes": classes, "labelled": labelled, "folders": folders}


class _Walk:
    """The listing of a data set's folders in parallel: each task returns those that follow it."""

    def __init__(self, source: Source) -> None:
        self._source, self._kept = source, KeptParts()
        self._links = FolderLinks()
        self.listed: list[_FolderFiles] = []

    def run(self, folders: Sequence[str]) -> list[_FolderFiles]:
        """List all folders at and below `folders`."""
        tasks = [partial(self._list_folder, name, ()) for name in folders]
        follow(tasks, listing_threads(), self._source.path(""))
        return self.listed

    def _list_folder(self, folder: str, came_by: tuple[str, ...]) -> "list[_Task]":
        """List one folder; links to it were followed from the folders `came_by`."""
        source = self._source
        if source.local and os.path.islink(source.path(folder)):
            source.check_links(folder)
            came_by = self._links.enter(source.path(folder), came_by)
        times_ns = source.times_ns(folder)
        if not source.local:
            entries = source.listing(folder)
            note_others(source, folder, [each.name for each in entries if not each.folder])
            self.listed.append(_listed(folder, times_ns, *_images_of(entries), self._kept))
            inner = [entry.name for entry in entries if entry.folder]
            return [partial(self._list_folder, f"{folder}/{name}", came_by) for name in inner]
        rows = source.names(folder, keep=False)
        names = [n for n, inside in rows if not inside and n.lower().endswith(PICTURES)]
        parts = by_look(names) or [[]]
        below = [name for name, inside in rows if inside]
        note_others(source, folder, [name for name, inside in rows if not inside])
        _look_for_folders(source, folder, rows)
        return [
            *(partial(self._list_folder, f"{folder}/{name}", came_by) for name in below),
            *(partial(self._look_at, folder, times_ns, part) for part in parts),
        ]

    def _look_at(self, folder: str, times_ns: list[int], names: Sequence[str]) -> "list[_Task]":
        images = _present(names, look_at(self._source, folder, names))
        self.listed.append(_listed(folder, times_ns, *images, self._kept))
        return []


def _bare_links(source: Source, folder: str, rows: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the links of a local folder without a suffix that lead to no folder."""
    if not source.local:
        return []
    bare = [name for name, is_folder in rows if not is_folder and "." not in name]
    return [name for name in bare if os.path.islink(f"{source.path(folder)}/{name}")]


def _look_for_folders(source: Source, folder: str, rows: Sequence[tuple[str, bool]]) -> None:
    """Note links without a suffix that lead to nothing: one may have been a folder of images, and
    another class would take its label."""
    for name in _bare_links(source, folder, rows):
        if not os.path.exists(f"{source.path(folder)}/{name}"):
            source.entry(folder, name)


_Task = Callable[[], "list[_Task]"]


def _look_at_all(
    source: Source, names: Sequence[str]
) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
    """Return names and the rows of `look_at` of files of the root."""
    looks, step = new_column(3 * len(names), np.int64).reshape(-1, 3), files_a_look()

    def look(begin: int) -> None:
        looks[begin : begin + step] = look_at(source, "", names[begin : begin + step])
        let_go(looks)

    each_of(look, range(0, len(names), step), listing_threads(), source.path(""))
    return names, looks


def _present(
    names: Sequence[str], looks: npt.NDArray[np.int64]
) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
    """Return the names and rows of `look_at` of those files that are there."""
    is_there = looks[:, 0] >= 0
    return (names, looks) if is_there.all() else (present(names, is_there), looks[is_there])


def _images_of(entries: Sequence[Entry]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the names of the images in a listing, and their sizes and times as of `look_at`.

    Raises SourceError if a size is unknown.
    """
    images = [e for e in entries if not e.folder and e.name.lower().endswith(PICTURES)]
    rows = [(each.known_size(), each.modified_ns, each.changed_ns) for each in images]
    return [each.name for each in images], np.array(rows, np.int64).reshape(-1, 3)


def _check_sizes(names: Sequence[str], looks: npt.NDArray[np.int64]) -> None:
    """Raise SourceError for a file that is too large for a sample."""
    large = np.flatnonzero(looks[:, 0] > MAX_SAMPLE_BYTES - IMAGE_LABEL.overhead)
    if len(large):
        name, size = names[int(large[0])], looks[large[0], 0]
        raise SourceError(f"{name} of {size} bytes is not an image: remove it")


def _listed(
    folder: str,
    times_ns: list[int],
    names: Sequence[str],
    looks: npt.NDArray[np.int64],
    kept: KeptParts,
) -> _FolderFiles:
    """Keep the images of a folder, of which `looks` has sizes and times, shape (n, 3)."""
    _check_sizes(names, looks)
    paths = Names.of([f"{folder}/{name}" if folder else name for name in names])
    columns = kept.add(looks.T, paths.ends, paths.blob)
    first = names[0] if names else ""
    return _FolderFiles(folder, times_ns, first, len(names), len(paths.blob), columns)

"""The interpretation of a folder: the reader that fits it best, the split that is meant, the rest.

Every reader that recognises a folder says how well it fits, in files (`Fit`). An index or
annotations decide; else the reader with at least twice the files of any other. The rest is told
once; a tie is an error that shows both and the option that chooses.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dlio.data.reader_contract import Fit, path_rules_of
from dlio.data.source import Source, inside, is_remote, last_name
from dlio.data.splits import (
    SPLITS,
    WHOLE,
    chosen_split,
    how_to_choose,
    split_folders,
    splits_among,
)
from dlio.errors import SourceError, UsageError, redact
from dlio.util.limits import LFS_POINTER, is_lfs_pointer
from dlio.util.printable import tell_once
from dlio.util.units import counted

_CLEAR: Final = 2
"""How many times the files of the next reader the chosen one has, at least."""
_NAMED: Final = 3
"""Files that a message names."""
_MOST_COUNTED: Final = 10_000
_MOST_LISTED: Final = 4096
"""Folders below one in which files are counted: links may lead to the same ones again and again."""
_LISTED: Final = 64
"""Folders that are listed to count their files; the others count as one file each."""
_DEEPEST: Final = 32
CONTAINERS: Final = (
    "images",
    "image",
    "imgs",
    "img",
    "pictures",
    "photos",
    "data",
    "jpg",
    "jpegs",
)
"""Names of folders of all samples, in lower case, and not of a class."""
_TABLES: Final = ("labels.", "metadata.")

Kinds = Sequence[tuple[str, Any]]


@dataclass(slots=True)
class Interpretation:
    """How dlio understands a path."""

    format: str
    kind: Any
    path: object
    """Path or paths that the reader opens."""
    options: dict[str, object] = field(default_factory=dict)
    words: str = ""
    split: str = ""
    """The split that is read, as the data set spells it; "" if it has none."""
    others: dict[str, list[str]] = field(default_factory=dict)
    """Files, or the folder, of each other split of the same data set."""
    left_out: list[str] = field(default_factory=list)
    """Files that lie there and are not read, with counts."""
    doubts: list[str] = field(default_factory=list)
    """What it may mean otherwise, with remedies."""
    has_files: bool = False
    """True if it reads files of the folder itself, whose names may say their splits."""
    has_folders: bool = False
    """True if it reads folders of the folder, which may be splits in place of classes."""
    weight: float = 1
    """Of its `Fit`; 0 if nothing that it reads was found."""

    def tell(self) -> None:
        """Warn of the files that are left out, and of doubts, once in a process; of nothing where
        nothing was found, which is an error."""
        if not self.weight:
            return
        paths = self.path if isinstance(self.path, list) else [self.path]
        shown = redact(", ".join(map(str, paths[:_NAMED])) + ", ..." * (len(paths) > _NAMED))
        text = f"{shown}: read as {self.words or self.format}"
        if self.left_out:
            tell_once(f"{text}; left out: {', '.join(self.left_out)}")
        for doubt in self.doubts:
            tell_once(f"{text}; {doubt}")


def best_fit(path: str, fitting: Kinds, kinds: Kinds, options: dict[str, object]) -> Interpretation:
    """Return the clearly best of the readers `fitting` of a folder, out of all `kinds`.

    Raises UsageError if two fit about as well.
    """
    source = Source(path)
    files = source.files()
    fits: list[tuple[Fit, str, Any]] = []
    for name, kind in fitting:
        fallback = path_rules_of(kind).is_fallback
        if fallback and any(fit.is_marked for fit, _, _ in fits):
            continue  # Its pictures are those of the annotations, and its folders the format's.
        fit = _fit_of(name, kind, path, files, options)
        if fit is not None:
            fits.append((fit, name, kind))
    if not fits:
        name, kind = fitting[0]
        fits = [(Fit(name, 1), name, kind)]
    fits.sort(key=lambda each: (not each[0].is_marked, -each[0].weight))
    best, name, kind = fits[0]
    if len(fits) > 1:
        other, rival, _ = fits[1]
        alike = other.is_marked if best.is_marked else best.weight < _CLEAR * other.weight
        if alike:
            raise UsageError(
                f"{path} is {best.words}, or {other.words}: choose with "
                f"format={name!r} or format={rival!r}"
            )
    left = list(best.left_out)
    taken = path_rules_of(kind).owns
    for rival, each in kinds:
        owns = path_rules_of(each).owns
        if owns is not None and each is not kind:
            others = [f for f in files if owns(f.lower()) and not (taken and taken(f.lower()))]
            others = [f for f in others if f not in best.used]
            if others:
                left.append(f"{named_files(others)}, which format={rival!r} reads")
    if taken is not None and not best.is_marked:
        left += files_further_down(source, lambda name: taken(name.lower()))
    for fit, rival, each in fits[1:]:
        if path_rules_of(each).owns is None and fit.weight:
            left.append(f"{fit.words}, which format={rival!r} reads")
    return Interpretation(
        name,
        kind,
        path,
        words=best.words,
        left_out=left,
        doubts=list(best.doubts),
        has_files=taken is not None and not best.is_marked,
        has_folders=best.in_folders,
        weight=best.weight,
    )


def _fit_of(
    name: str, kind: Any, path: str, files: Sequence[str], options: dict[str, object]
) -> Fit | None:
    """Return how well a folder with some `files` fits a reader that recognises it."""
    own_fit = getattr(kind, "fit", None)
    if own_fit is not None:
        fit: Fit | None = own_fit(path, options)
        return fit
    owns = path_rules_of(kind).owns
    own = [file for file in files if owns is not None and owns(file.lower())]
    if not own:
        return Fit(f"a data set of {name}", 1, is_marked=True)
    return Fit(f"{named_files(own)} of {name}", len(own))


def named_files(files: Sequence[str]) -> str:
    """Return `2 files (a.tar, b.tar)`."""
    shown = ", ".join(files[:_NAMED]) + (", ..." if len(files) > _NAMED else "")
    return f"{counted(len(files), 'file')} ({shown})"


def count_below(source: Source, folder: str, suffixes: tuple[str, ...], most: int) -> int:
    """Return the files at and below a folder with one of some suffixes; `most`, if so many, or if
    there are too many folders to look through."""
    count = listed = 0
    stack = [(folder, 0)]
    while stack and count < most:
        if listed == _MOST_LISTED:
            return most
        listed += 1
        here, depth = stack.pop()
        try:
            rows = source.names(here)
        except SourceError:
            return max(count, 1)  # Its reader gives the reason.
        for name, is_folder in rows:
            if is_folder and depth < _DEEPEST:
                stack.append((f"{here}/{name}" if here else name, depth + 1))
            elif not is_folder and name.lower().endswith(suffixes):
                count += 1
    return min(count, most)


def files_further_down(source: Source, is_own: Callable[[str], bool]) -> list[str]:
    """Return the words about files in the folders of a folder of whose files each is read: these
    are not. Folders of Hive's partitions, such as `country=DE`, are columns."""
    stack = [name for name, folder in source.names() if folder and "=" not in name][:_LISTED]
    files: list[str] = []
    listed = 0
    while stack and listed < _LISTED:
        here = stack.pop(0)
        listed += 1
        try:
            rows = source.names(here)
        except SourceError:
            continue
        files += [f"{here}/{name}" for name, folder in rows if not folder and is_own(name)]
        stack += [f"{here}/{name}" for name, folder in rows if folder]
    if not files:
        return []
    folder = files[0].rpartition("/")[0]
    return [f"{named_files(files)} in folders: open {source.shown(folder)}, or a list of folders"]


def counted_below(
    source: Source, folders: Sequence[str], suffixes: tuple[str, ...]
) -> tuple[dict[str, int], bool]:
    """Return (files below each folder that has some, True if not all were counted)."""
    counts: dict[str, int] = {}
    left = _MOST_COUNTED
    for number, folder in enumerate(folders):
        if number == _LISTED:
            left = 0
        count = count_below(source, folder, suffixes, left) if left else 1
        left = max(0, left - count)
        if count:
            counts[folder] = count
    return counts, not left


def has_split_files(path: str, reading: Interpretation) -> bool:
    """True if the names of files that a reader would read say their splits."""
    return bool(splits_among(_own_files(path, reading)))


def _own_files(path: str, reading: Interpretation) -> list[str]:
    owns = path_rules_of(reading.kind).owns
    names = Source(path).files()
    return [name for name in names if owns is not None and owns(name.lower())]


def check_pointer(path: str, reading: Interpretation | None = None) -> None:
    """Raise SourceError if a local file, or the first one of a folder that its reader takes, is a
    pointer of Git LFS."""
    if is_remote(path):
        return
    if os.path.isdir(path) and reading is not None and path_rules_of(reading.kind).owns:
        path = next((inside(path, name) for name in _own_files(path, reading)), path)
    if os.path.isfile(path) and is_lfs_pointer(
        Source(os.path.dirname(path) or ".").read(os.path.basename(path), 0, 64)
    ):
        raise SourceError(f"{path} {LFS_POINTER}")


def files_of_split(path: str, fields: str, reading: Interpretation, split: str | None) -> None:
    """Have a reader of a folder's files read those of one split.

    Raises UsageError when there are several and none is chosen, or no such one.
    """
    own = _own_files(path, reading)
    splits = splits_among(own)
    if split == WHOLE:
        reading.path = [inside(path, name) + fields for name in own]
        return
    if split is None:
        if len(splits) > 1:
            raise UsageError(_several(path, {name: len(each) for name, each in splits.items()}))
        return
    chosen = chosen_split(split, list(splits), path)
    reading.split = chosen
    reading.path = [inside(path, name) + fields for name in splits[chosen]]
    reading.others = {
        split: [inside(path, name) + fields for name in names]
        for split, names in splits.items()
        if split != chosen
    }
    rest = len(own) - len(splits[chosen])
    reading.words += f", split {chosen}: {len(splits[chosen])} of {rest + len(splits[chosen])}"


def _several(path: str, counts: dict[str, int]) -> str:
    names = [name for name in SPLITS if name in counts]
    shown = ", ".join(f"{n} ({counts[n]} file{'s' * (counts[n] != 1)})" for n in names)
    return (
        f"{path} holds the splits {shown}: {how_to_choose(names[0])}, or split={WHOLE!r} "
        "for all of them as one data set"
    )


def check_pattern(pattern: str, paths: Sequence[str]) -> None:
    """Warn once if a pattern stands for files of several splits."""
    splits = splits_among([last_name(path) for path in paths])
    if len(splits) > 1:
        text = f"{pattern} stands for the splits {', '.join(splits)}, read as one data set"
        tell_once(f"{text}: choose one with split=")


def other_folders(path: str, split: str) -> dict[str, list[str]]:
    """Return the folders of the other splits next to one that was chosen of a folder."""
    folders = split_folders(Source(path).folders())
    return {name: [inside(path, name)] for name in folders if name != split}


def split_folder(path: str, split: str | None) -> tuple[str, str] | None:
    """Return (path of the folder of a split, its name) in a folder of split folders, such as
    `train` and `val`; None if the folder is not one.

    A folder with others that hold such files as well, such as `bus` next to `train`, has classes;
    next to both `train` and `test`, others are told.

    Raises UsageError when there are several and none is chosen, or no such one.
    """
    source = Source(path)
    folders = source.folders()
    parts = split_folders(folders)
    splits = list(parts)
    if not splits:
        return None
    if split is not None:
        chosen = chosen_split(split, splits, path)
        _check_alike(source, chosen, splits)
        _tell_of_twins(source, chosen, [name for name in folders if name not in parts])
        return source.inner(chosen), chosen
    suffix = _first_suffix(source, splits)
    others = [n for n in folders if n not in parts and count_below(source, n, (suffix,), 1)]
    if others and len(set(parts.values())) == 1:
        return None
    full = [name for name in splits if source.names(name)]
    if len(full) == 1:
        tell_once(f"{path} holds one split alone: open {inside(path, full[0])}")
        return source.inner(full[0]), full[0]
    first = next((name for name in splits if parts[name] == SPLITS[0]), splits[0])
    beside = f", next to {', '.join(others[:_NAMED])}" if others else ""
    raise UsageError(
        f"{path} holds the splits {', '.join(splits)}{beside}: {how_to_choose(first)}, or "
        f"open {inside(path, first)}"
    )


def all_splits(path: str) -> list[str]:
    """Return the folders of the splits in a folder that have some files; [] unless several do."""
    source = Source(path)
    parts = split_folders(source.folders())
    full = [name for name in parts if source.names(name)]
    return full if len({parts[name] for name in full}) > 1 else []


def _check_alike(source: Source, chosen: str, splits: Sequence[str]) -> None:
    """Warn once of a split whose samples lie side by side, where others have class folders, as
    ImageNet's `val` of Kaggle: they have no labels."""
    if any(folder for _, folder in source.names(chosen)):
        return
    others = [name for name in splits if any(folder for _, folder in source.names(name))]
    tables = [name for name, _ in source.names(chosen) if name.endswith((".csv", ".txt"))]
    if others and not tables:
        tell_once(
            f"{source.shown(chosen)} has no class folders, which {source.shown(others[0])} has: "
            "its samples have no labels; name a list of them with table= and label="
        )


def _tell_of_twins(source: Source, chosen: str, others: Sequence[str]) -> None:
    """Warn once of a folder next to that of a split that holds files of the same names, such as
    `train_labels`: these may be masks."""
    stems = {os.path.splitext(name)[0] for name, folder in source.names(chosen) if not folder}
    if not stems:
        return
    for name in others[:_LISTED]:
        files = source.files(name)
        first = os.path.splitext(files[0])[0] if files else ""
        if first and any(first.startswith(stem) for stem in stems):
            tell_once(
                f"{source.shown(name)} holds files named as those of {chosen}, and is left out: if "
                f"they are masks, read both with format='masks', images={chosen!r}, masks={name!r}"
            )


def _first_suffix(source: Source, folders: Sequence[str]) -> str:
    """Return the suffix of the first file at or below some folders, "" without one."""
    stack = [(name, 0) for name in reversed(folders)]
    while stack:
        here, depth = stack.pop()
        below = []
        for name, is_folder in source.names(here):
            if not is_folder:
                return os.path.splitext(name)[1].lower()
            if depth < _DEEPEST:
                below.append((f"{here}/{name}", depth + 1))
        stack += reversed(below)
    return ""


def folder_of_all(path: str, suffixes: tuple[str, ...]) -> str | None:
    """Return the folder in which all samples of a folder lie, in folders of their own or next to a
    table; None if there are several such folders, or if it is a class.

    So it is with `images` of many data sets, and `Data/CLS-LOC` of ImageNet.
    """
    source = Source(path)
    rows = source.names()
    folders = [name for name, folder in rows if folder]
    if len(folders) > _LISTED or any(n.lower().endswith(suffixes) for n, f in rows if not f):
        return None
    full = [name for name in folders if count_below(source, name, suffixes, 1)]
    if len(full) != 1:
        return None
    inner = source.names(full[0])
    here = [name for name, folder in inner if not folder]
    if any(name.lower().endswith(suffixes) for name in here):
        is_class = full[0].lower() not in CONTAINERS or len(folders) > 1
        if is_class and not any(name.startswith(_TABLES) for name in here):
            return None
    return source.inner(full[0])


_DATA_TEXTS: Final = (
    *(".csv", ".tsv", ".txt", ".json", ".jsonl", ".xml", ".parquet", ".xlsx", ".mat", ".lst"),
)
_MOST_BESIDE: Final = 8
_NO_DATA: Final = (
    *("readme", "dataset_info", "dataset_dict", "license", "licence", "requirements", "changelog"),
    "citation",
)


def files_beside(path: str, read: str) -> list[str]:
    """Return the files next to the only sub-folder of a folder that is read, and in the others
    next to it, that may say more about it."""
    source = Source(path)
    rows = source.names()
    others = [name for name, folder in rows if folder and source.inner(name) != read]
    names = [name for name, folder in rows if not folder]
    for other in others[:_MOST_BESIDE]:
        names += [f"{other}/{name}" for name, folder in source.names(other) if not folder]
    return [
        name
        for name in names
        if name.lower().endswith(_DATA_TEXTS) and not name.lower().startswith(_NO_DATA)
    ]


def lone_folder(path: str, *, has_data: bool) -> str | None:
    """Return the only folder of a folder, such as `data` of a repository of Hugging Face's Hub.

    None if there are others, or if it `has_data`, which may be of one class, not of several splits.
    """
    source = Source(path)
    folders = source.folders()
    if len(folders) != 1:
        return None
    names = source.files(folders[0])
    return None if has_data and len(splits_among(names)) < 2 else source.inner(folders[0])

"""The search for the reader of a path; `reader_contract` defines readers."""

import inspect
import os
import shlex
import types
import typing
from collections.abc import Sequence
from typing import Any, Final, TypeGuard, cast

import numpy as np

from dlio.data.concatenation import ConcatReader
from dlio.data.foreign_formats import (
    check_folder,
    check_index,
    error_of_file,
    hive_words,
    pattern_for,
)
from dlio.data.hub_cards import words_of_splits
from dlio.data.interpretation import (
    Interpretation,
    Kinds,
    all_splits,
    best_fit,
    check_pattern,
    check_pointer,
    files_beside,
    files_of_split,
    folder_of_all,
    has_split_files,
    lone_folder,
    named_files,
    other_folders,
    split_folder,
)
from dlio.data.kept_interpretation import understood
from dlio.data.labels import (
    is_number,
    label_candidates,
    label_names,
    most_likely_label,
    repeating_fields,
    several_labels,
    twins_in_case,
)
from dlio.data.links import following_links, opened_by_user
from dlio.data.reader_contract import Reader as Reader  # Packages of readers import it from here.
from dlio.data.reader_contract import ReaderType, abilities_of, path_rules_of
from dlio.data.source import (
    Source,
    expand,
    inside,
    is_hanging,
    is_remote,
    last_name,
    listed_once,
    split_fields,
)
from dlio.data.splits import (
    WHOLE,
    chosen_split,
    no_splits,
    not_chosen_by,
    reading_options,
    split_column,
    split_folders,
    split_of,
    splits_among,
)
from dlio.errors import CorruptBlock, DlioError, SourceError, UsageError, redact
from dlio.util.arguments import named, nearest, one_of, path_in, paths_in
from dlio.util.extras import how_to_install
from dlio.util.kept_memory import counted_together
from dlio.util.limits import parsing, trusting
from dlio.util.plugins import plugins
from dlio.util.printable import tell_once
from dlio.util.units import counted

# fmt: off
OPEN_ARGUMENTS: Final = (
    "tiers", "image_size", "train", "crops", "transform", "seed", "on_error", "replicas",
    "follow_links", "trust", "requests", "patch", "patches_per_volume", "patch_stride", "pad",
    "window", "min_visible", "format", "split",
)
# fmt: on
"""Arguments of `dlio.open` that readers do not see, for suggestions."""


_COMPARED: Final = 64 << 20
"""Bytes of another split's files that are read to compare its classes, at most."""
_DEEPEST_LONE: Final = 4
"""Folders within one another that each hold nothing else, such as `MNIST/raw`, that are looked
through."""
_SHOWN: Final = 3
"""Folders that a message names."""
_MOST_CANDIDATES: Final = 8
_TABLES: Final = ("tables", "parquet", "arrow")
"""Formats of rows, in which one column of several is usually the label."""
_FEW_COLUMNS: Final = 2
_LEAST_ROWS: Final = 16
_ENDS: Final = 32
"""Rows that are looked at, at each end of a table."""
_MOST_LOOKED_AT: Final = 64 << 20
_MOST_FOLDERS: Final = 16
"""Folders that are looked into for data sets of their own."""


def open_reader(
    path: object,
    *,
    follow_links: bool | None = None,
    trust: bool | None = None,
    **options: object,
) -> Reader:
    """Find the reader that fits `path` best, and open it; see `open_reading`."""
    return open_reading(path, follow_links=follow_links, trust=trust, tells=True, **options)[0]


def open_split(path: object, split: str | None, others: Sequence[str] = ()) -> Reader:
    """Do `open_reader` for a command that may have chosen a split, and options of the reader."""
    chosen = reading_options(split, None, others)
    return open_reader(path, follow_links=None, trust=None, **chosen)


@counted_together()
def open_reading(
    path: object,
    *,
    follow_links: bool | None = None,
    trust: bool | None = None,
    tells: bool = True,
    **options: object,
) -> tuple[Reader, Interpretation]:
    """Find the reader that fits `path` best, open it, and return it with how `path` is understood.

    Files of a folder that it leaves out are told once.

    Args:
        path: a path or URL, several of them, or an object that a reader takes, such as torch's
            map-style data sets.
        follow_links: follow symbolic links that lead out of the data set's folder, or refuse them;
            None for DLIO_FOLLOW_LINKS.
        trust: lift the guards against strangers; None for DLIO_TRUST. See `dlio.util.limits`.
        tells: False for a caller that shows the files left out and the doubts itself.
        options: for the reader, such as `select` for HDF5 and Zarr. For all readers there are
            `format`, the name of the reader of a folder that several fit, and `split`, the one of
            several splits to read: `train` or `val`, or `all` for all as one data set.

    Raises SourceError when the path does not exist or no reader recognises it, with the reason of
    each; UsageError for an option that the reader does not have, for several splits of which none
    is chosen, and if two readers fit a folder as well.
    """
    path = _as_text(path)
    if isinstance(path, Reader):
        if options:
            raise UsageError(f"{next(iter(options))}=: the data set is open already: give its path")
        return path, Interpretation(path.format, type(path), path)
    form, split = (_text_of(options, name) for name in ("format", "split"))
    options = {each: value for each, value in options.items() if each not in ("format", "split")}
    named, lone = False, None
    if _are_names(path):
        named = True
        every = expand(path)
        lone = _local_path(split_fields(every[0])[0]) if len(every) == 1 else None
        for each in every:
            source = Source(split_fields(each)[0])
            if not source.exists():
                raise source.missing()
    kinds = [(entry.name, entry.load()) for entry in plugins("dlio.readers")]
    kinds.sort(key=lambda item: (path_rules_of(item[1]).is_fallback, item[0]))
    kinds = [each for each in kinds if path_rules_of(each[1]).takes_objects != named]
    if form is not None:
        one_of("format", form, [name for name, _ in kinds])
        kinds = [each for each in kinds if each[0] == form]
    with (
        listed_once(),
        following_links(follow_links),
        opened_by_user(lone),
        trusting(trust),
    ):
        if named:
            check_pointer(split_fields(every[0])[0])
            reading = understood(
                path,
                kinds,
                split,
                options,
                lambda: _understood(cast("str | Sequence[str]", path), kinds, split, options),
            )
        else:
            if split is not None:
                raise UsageError("split=: this is not a path: give dlio.split the data set")
            name, kind, reasons = _recognised(path, kinds)
            if kind is None:
                raise _unknown(f"this {type(path).__name__}", reasons, named=False)
            reading = Interpretation(name, kind, path, options)
        if tells:
            reading.tell()
        if lone is not None and split is None and not reading.split:
            words = words_of_splits(lone)
            if words:
                tell_once(words)
        if isinstance(reading.path, str):
            check_pointer(split_fields(reading.path)[0], reading)
        reader = _opened(reading, named)
        if len(reader.classes) and abilities_of(reader).is_inspected:
            for split, paths in reading.others.items():
                _compare_classes(reader, reading, split, paths)
    _tell_of_labels(reader, reading.kind)
    return reader, reading


def _local_path(url: str) -> str | None:
    """Return the full path that a name stands for; None if it is a URL."""
    return None if is_remote(url) else os.path.abspath(os.path.expanduser(url))


def _tell_of_labels(reader: Reader, kind: object) -> None:
    """Warn once if a field looks like a label and gives none, or if labels are fractions."""
    if not abilities_of(reader).is_inspected:
        return  # To look at its fields would read samples.
    kinds = reader.schema.kinds
    column = split_column(kinds) if hasattr(reader, "unlabelled") else None
    if column is not None:
        tell_once(f"{reader.path}: {not_chosen_by(column)}")
    text: str = getattr(reader, "unlabelled", "")
    if text:
        text += "; so the data set has no labels (`targets` are 0)"
    elif (
        len(reader.classes)
        and all(is_number(each.replace(",", ".", 1)) for each in reader.classes)
        and not all(each.lstrip("+-").isdecimal() for each in reader.classes)
    ):
        count = counted(len(reader.classes), "class")
        text = f"its labels are numbers with fractions, and are {count}"
    elif hasattr(reader, "unlabelled") and not len(reader.classes) and not label_names(kinds):
        is_wide = reader.format in _TABLES and len(kinds) > _FEW_COLUMNS
        able = label_candidates({name: kind.text for name, kind in kinds.items()}, is_wide)
        able = able or _repeating_fields(reader)
        if able and not reader.labels.any():
            best = most_likely_label(able)
            some = able if len(able) <= _MOST_CANDIDATES else [*able[: _MOST_CANDIDATES - 1], best]
            which = some[0] if len(some) == 1 else f"one of {', '.join(dict.fromkeys(some))}"
            remedy = "name it label in the source"
            if callable(kind) and "label" in inspect.signature(kind).parameters:
                word = shlex.quote(f"label={best}")
                remedy = f"choose it, such as label={best!r} (`--reader-option {word}`)"
            text = (
                f"none of its fields has a label's name; if {which} is it, {remedy}: `targets` "
                "are 0"
            )
    several = several_labels(reader.classes)
    if several and not text:
        text = (
            f"its label {several!r} seems to be several, and is one class: store one label a "
            "sample, or a column of 0 and 1 for each"
        )
    if hasattr(reader, "unlabelled"):  # Readers of folders tell it of theirs.
        text = text or twins_in_case(reader.classes)
    if text:
        tell_once(f"{reader.path}: {text}")


def _repeating_fields(reader: Reader) -> list[str]:
    """Return `repeating_fields` of a table's first and last rows; [] of a remote one of which these
    would have to be fetched, and of few rows."""
    if reader.format not in _TABLES or len(reader) < _LEAST_ROWS:
        return []
    if reader.format != "tables" and is_remote(reader.path):
        return []
    count = len(reader)
    rows = np.union1d(np.arange(min(_ENDS, count)), np.arange(max(0, count - _ENDS), count))
    if int(reader.sizes[rows].sum()) > _MOST_LOOKED_AT:
        return []
    try:
        values = [reader.schema.split(payload) for payload in reader.read(rows)]
    except (SourceError, CorruptBlock):
        return []  # Whoever reads them is told.
    kinds = {name: kind.text for name, kind in reader.schema.kinds.items()}
    return repeating_fields(kinds, values)


def _compare_classes(
    reader: Reader, reading: Interpretation, split: str, paths: Sequence[str]
) -> None:
    """Warn once if another split has other classes, so that a label means another one there."""
    shown = f"{reader.path}: its classes"
    own, theirs = list(reader.classes), None
    urls = [split_fields(path)[0] for path in paths]
    if not is_remote(urls[0]) and os.path.isdir(urls[0]):
        here = str(reader.path) if isinstance(reader.path, str) else ""
        if not here or Source(here).folders() != own:
            return  # Of a table, or of files in the folder.
        place, theirs = urls[0], Source(urls[0]).folders()
        while (
            len(theirs) == 1
            and theirs != own
            and (inner := Source(inside(place, theirs[0])).folders())
        ):
            place, theirs = inside(place, theirs[0]), inner  # As in test/test/<class>.
    elif not is_remote(urls[0]) and sum(map(os.path.getsize, urls)) <= _COMPARED:
        try:
            other = _opened(
                Interpretation(reading.format, reading.kind, paths, reading.options), True
            )
        except DlioError:
            return  # It has no labels, or cannot be read, as whoever opens it is told.
        theirs = list(other.classes)
        other.close()
    if theirs is None:
        tell_once(
            f"{shown} are numbered among its own texts, and were not compared with those of split "
            f"{split}: compare data.classes, or store the labels as numbers"
        )
    elif theirs and theirs != own:
        few = sorted(set(own).symmetric_difference(theirs)) or own
        tell_once(
            f"{shown} are not those of split {split} (such as {few[0]}): a label is not the same "
            "class in both; store the labels as numbers, or open both as a list of paths, which "
            "numbers them together"
        )


def _opened(reading: Interpretation, named: bool) -> Reader:
    name, kind, path, options = reading.format, reading.kind, reading.path, reading.options
    single = named and path_rules_of(kind).one_path
    urls = _each(cast("str | Sequence[str]", path)) if single else []
    if len(urls) > 1:
        return ConcatReader([_made(name, kind, url, options) for url in urls])
    return _made(name, kind, urls[0] if urls else path, options)


def _understood(
    path: str | Sequence[str], kinds: Kinds, split: str | None, options: dict[str, object]
) -> Interpretation:
    """Return how one or several paths are read. Raises as `open_reading` does."""
    several = expand(path)
    first = path if isinstance(path, str) else path[0]
    if len(several) == 1:
        url, fields = split_fields(several[0])
        if Source(url).is_folder():
            return _of_folder(url, several[0][len(url) :], kinds, split, options)
    elif isinstance(path, str):
        if split is not None and split != WHOLE:
            groups = splits_among([last_name(each) for each in several])
            chosen = chosen_split(split, list(groups), path)
            several = [each for each in several if last_name(each) in groups[chosen]]
            return _understood(several, kinds, None, options)
        if split is None:
            check_pattern(path, several)
    name, kind, reasons = _recognised(first, kinds, one=True)
    if len(several) > 1 and kind is not None and Source(split_fields(several[0])[0]).is_folder():
        fitting = _fitting_of(several[0], kinds)[0]
        if len(fitting) > 1:
            best = best_fit(split_fields(several[0])[0], fitting, kinds, options)
            name, kind = best.format, best.kind
    shown = str(path)
    if kind is None:
        bare, fields = split_fields(first)
        if fields:
            name, kind, reasons = _recognised(bare, kinds, one=True)
            if kind is not None:
                raise _without_parts(shown, fields, bare, name)
        raise error_of_file(bare) or _unknown(shown, reasons, named=True)
    own = "split" in inspect.signature(kind).parameters
    if split is not None and split != WHOLE and not own:
        raise no_splits(split, shown)
    return Interpretation(
        name, kind, path, {**options, "split": split} if own and split else options
    )


def _of_folder(
    url: str, fields: str, kinds: Kinds, split: str | None, options: dict[str, object]
) -> Interpretation:
    """Return how a folder is read; `fields` is "" or the names of fields with `::` before them."""
    fitting, reasons = _fitting_of(url + fields, kinds)
    if not fitting and len(kinds) == 1 and options:
        fitting = list(kinds)  # The format is chosen, and options may say where its files are.
    if fields and not fitting:
        bare, _ = _fitting_of(url, kinds)
        if bare:
            names = split_fields(url + fields)[1]
            raise _without_parts(url + fields, names, url, bare[0][0])
    reading = best_fit(url, fitting, kinds, options) if fitting else None
    if reading is not None:
        reading.options = options
        reading.path = url + fields
        own = getattr(reading.kind, "own_splits", None)
        takes = "split" in inspect.signature(reading.kind).parameters
        if reading.has_files and not (takes and not has_split_files(url, reading)):
            files_of_split(url, fields, reading, split)
            return reading
        if takes and (own is None or own(url, options)):
            reading.split = split or ""
            if split is not None:
                reading.options = {**options, "split": split}
                reading.words += f", split {split}" if own is not None else ""
                # Other splits are left out by choice.
                reading.left_out = [text for text in reading.left_out if "split=" not in text]
            return reading
    if reading is None or reading.has_folders or split is not None:
        # Folders that are called so may be classes, if the user says so.
        are_classes = options.get("layout") == "classes"
        if split == WHOLE and not are_classes and (every := all_splits(url)):
            return _of_all(url, fields, kinds, every, options)
        inner = split_folder(url, split) if split != WHOLE and not are_classes else None
        if inner is not None:
            made = _of_folder(inner[0], fields, kinds, None, options)
            made.split = inner[1]
            known = " ".join(made.left_out)
            beside = [name for name in _lists_of_split(url, inner) if name not in known]
            if beside:
                words = f"{named_files(beside)} in {redact(url)}, which may hold labels"
                if beside[0].lower().endswith(".mat"):
                    words += ": scipy.io.loadmat(...) reads them, to write to a labels.csv"
                elif "table" in inspect.signature(made.kind).parameters:
                    words += ": choose one with table= and label="
                made.left_out.append(words)
            made.others = other_folders(url, inner[1])
            return made
        has_data = reading is not None and reading.weight > 0
        lone = _lone_data(url, fields, kinds, has_data)
        if lone is not None:
            made = _of_folder(lone, fields, kinds, split, options)
            files = files_beside(url, lone)
            if files:
                text = f"{named_files(files)} in {redact(url)}, next to the folder that is read"
                made.left_out = [text, *made.left_out]
            return made
        suffixes = path_rules_of(reading.kind).samples if reading is not None else ()
        below = folder_of_all(url, suffixes) if suffixes else None
        if below is not None:
            made = _of_folder(below, fields, kinds, split, options)
            outer = reading.left_out if reading is not None else []
            outer = [text for text in outer if "folders' names are taken" not in text]
            sentences = " ".join([*outer, *made.left_out])
            files = [name for name in files_beside(url, below) if name not in sentences]
            if files:
                words = f"{named_files(files)} in {redact(url)}, which may hold labels or splits"
                outer = [*outer, f"{words}: choose one with table= and label= if it does"]
            made.left_out = [*outer, *made.left_out]
            tell_once(f"{url} holds samples in {below} alone, which is read")
            return made
        if reading is None:
            _check_files(url, kinds)
        if reading is None or (path_rules_of(reading.kind).is_fallback and not reading.weight):
            _check_several(url, kinds)
            check_folder(url)
        if split is not None and split != WHOLE:
            raise no_splits(split, url)
    if reading is None:
        if os.path.isdir(url) and not Source(url).names():
            raise SourceError(f"{url} holds nothing to read: check the path")
        raise _unknown(url + fields, reasons, named=True, is_folder=True)
    return reading


def _lists_of_split(url: str, inner: tuple[str, str]) -> list[str]:
    """Return the files next to the folder of a split that are called as it is, such as `train.csv`
    and `train_labels.txt`, or labels, and MATLAB's also in folders next to it."""
    own = split_of(inner[1], folder=True) or split_of(inner[1])
    beside = files_beside(url, inner[0])
    names = [name for name in beside if "/" not in name or name.lower().endswith(".mat")]
    return [
        name
        for name in names
        if "label" in name.lower() or split_of(os.path.splitext(name)[0]) in (own or "",)
    ]


def _of_all(
    url: str, fields: str, kinds: Kinds, splits: Sequence[str], options: dict[str, object]
) -> Interpretation:
    """Return how all of the folders of splits in a folder are read, as one data set.

    Raises UsageError if they are of several formats.
    """
    inner = [Source(url).inner(name) for name in splits]
    parts = [_of_folder(each, fields, kinds, None, options) for each in inner]
    made = parts[0]
    for name, part in zip(splits, parts, strict=True):
        if part.kind is not made.kind:
            raise UsageError(
                f"{url}: split {splits[0]} is of {made.format}, and {name} of {part.format}: open "
                "one of them"
            )
    paths = [each for part in parts for each in _each(cast("str | Sequence[str]", part.path))]
    rows = Source(url).names()
    others = [name for name, folder in rows if folder and name not in splits]
    words = f"the splits {', '.join(splits)}, each {made.words or made.format}"
    left = [text for part in parts for text in part.left_out]
    if others:
        left.append(f"{counted(len(others), 'folder')} ({', '.join(others[:_SHOWN])}) next to them")
    doubts = [text for part in parts for text in part.doubts]
    return Interpretation(
        made.format,
        made.kind,
        paths,
        made.options,
        words=words,
        split=WHOLE,
        left_out=list(dict.fromkeys(left)),
        doubts=list(dict.fromkeys(doubts)),
    )


def _lone_data(url: str, fields: str, kinds: Kinds, has_data: bool) -> str | None:
    """Return the only folder of a folder, or of that one and so on, that is a data set."""
    lone = lone_folder(url, has_data=has_data)
    for _ in range(_DEEPEST_LONE):
        if lone is None or _data_of(lone, fields, kinds) is not None:
            return lone
        lone = lone_folder(lone, has_data=has_data)
    return None


def _data_of(url: str, fields: str, kinds: Kinds) -> tuple[str, Any] | None:
    """Return the reader of the samples of a folder, or of its folders of splits; None for a reader
    of class folders, or without one."""
    splits = split_folders(Source(url).folders())
    for each in (url, *(inside(url, name) for name in splits)):
        fitting = _fitting_of(each + fields, kinds)[0]
        if fitting and not path_rules_of(fitting[0][1]).is_fallback:
            return fitting[0]
    return None


def _check_files(url: str, kinds: Kinds) -> None:
    """Raise UsageError for a folder with files of a format whose files are opened by their names,
    such as nanoGPT's `train.bin` and `val.bin`."""
    check_index(Source(url))
    names = Source(url).files()
    for form, kind in kinds:
        owns = path_rules_of(kind).owns
        own = [name for name in names if owns is not None and owns(name.lower())]
        if own and _reason(kind, inside(url, own[0])) is None:
            raise UsageError(
                f"{url} holds {named_files(own)} of {form}, which are not opened by their folder: "
                f"open {inside(url, own[0])}, or several by a list or a pattern"
            )


def _check_several(url: str, kinds: Kinds) -> None:
    """Raise UsageError if the folders of a folder, which holds no samples of its own, are data
    sets, such as the configurations of a repository of Hugging Face's Hub."""
    source = Source(url)
    rows = source.names()
    folders = [name for name, folder in rows if folder][:_MOST_FOLDERS]
    known = {}
    for name in folders:
        data = _data_of(inside(url, name), "", kinds)
        if data is not None:
            known[name] = data
    if not known:
        return
    hive = hive_words(folders, next(iter(known.values()))[0])
    if hive:
        raise UsageError(f"{url}: {hive}")
    if len(known) > 1:
        first = next(iter(known))
        kind = known[first][1]
        shown = ", ".join(f"{name} ({form})" for name, (form, _) in known.items())
        pattern = pattern_for(
            source, list(known), lambda name: _reason(kind, inside(url, name)) is None
        )
        text = (
            f"{url} holds the data sets {shown}: open one of them, such as {inside(url, first)}, "
            "or some files of all by a list"
        )
        if pattern:
            text += f", or by a pattern, such as {inside(url, pattern)!r}"
        tables = [n for n, folder in rows if not folder and n.lower().endswith((".tsv", ".csv"))]
        if tables:
            text += f"; {named_files(tables)} next to them would not be read"
        raise UsageError(text)


def _without_parts(shown: str, fields: Sequence[str], bare: str, name: str) -> SourceError:
    return SourceError(
        f"{shown} names {', '.join(fields)}, but {bare} ({name}) has no such parts to "
        "choose from: give the path alone"
    )


def _unknown(
    shown: str, reasons: Sequence[str], named: bool, is_folder: bool = False
) -> SourceError:
    """Return the error for what no reader recognises, whose reasons stand behind `NAME: `. With
    several readers these are named alone, but for the last one's reason about a folder.
    """
    if not reasons:
        return SourceError(f"no readers are installed: install dlio, {how_to_install('')}")
    remedy = "" if named else ": give a path, a list of paths, or a map-style data set of torch"
    if len(reasons) == 1 or not named:
        return SourceError(
            f"{shown} is not a data set that dlio can read ({'; '.join(reasons)}){remedy}"
        )
    names = ", ".join(reason.partition(":")[0] for reason in reasons)
    last = f"; as class folders, it {reasons[-1].partition(': ')[2]}" if is_folder else ""
    return SourceError(
        f"{shown} is not a data set that dlio can read, of none of the formats {names}{last}. "
        "format=NAME (`dlio ls --format NAME`) says why it is not of that one"
    )


@counted_together()
def open_parts(
    path: object,
    *,
    follow_links: bool | None = None,
    trust: bool | None = None,
    **options: object,
) -> list[Reader]:
    """Open each of the paths that `path` stands for as a data set of its own; see `open_reader`.

    So they may differ in the shapes of their samples.
    """
    path = _as_text(path)
    each = _each(path) if _are_names(path) else [path]
    return [open_reader(one, follow_links=follow_links, trust=trust, **options) for one in each]


def _text_of(options: dict[str, object], name: str) -> str | None:
    """Return an option that is text or left out. Raises UsageError."""
    value = options.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{named(name, value)}: give text")
    return value


def _recognised(path: object, kinds: Kinds, one: bool = False) -> tuple[str, Any, list[str]]:
    """Return name and class of the first reader that recognises a path, and why others do not.

    `one` for a path, of whose files the first is asked about if the reader takes one.
    """
    reasons: list[str] = []
    for name, kind in kinds:
        single = one and path_rules_of(kind).one_path
        reason = _reason(kind, expand(cast(str, path))[0] if single else path)
        if reason is None:
            return name, kind, reasons
        reasons.append(f"{name}: {reason}")
    return "", None, reasons


def _fitting_of(path: str, kinds: Kinds) -> tuple[Kinds, list[str]]:
    """Return the readers that recognise a folder, and why others do not."""
    reasons = [(name, kind, _reason(kind, path)) for name, kind in kinds]
    fitting = [(name, kind) for name, kind, reason in reasons if reason is None]
    return fitting, [f"{name}: {reason}" for name, _, reason in reasons if reason is not None]


def _reason(kind: Any, path: object) -> str | None:
    try:
        reason: str | None = kind.recognises(path)
    except SourceError as error:
        if is_hanging(error):
            raise  # Every other reader would wait for it, too.
        return str(error)
    return reason


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
            every = [*own, *OPEN_ARGUMENTS]
            hint = " (of dlio.open)" if option in every else nearest(option, every)
            raise UsageError(
                f"{option}=: the {name} reader, which reads {path}, has no such option{hint}"
            )
    options = {
        each: _fitting(each, value, known[each].annotation) for each, value in options.items()
    }
    if path_rules_of(kind).takes_objects:
        return kind(path, **options)
    with parsing(str(path)):
        return kind(path, **options)


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
        words = "give text"
        if isinstance(value, int | float):  # Such as the name of a column on a command line.
            words += f", such as {name}='{value}' (`--reader-option '{name}=\"{value}\"'`)"
        raise UsageError(f"{named(name, value)}: {words}")
    return value

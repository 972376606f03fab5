"""Lists of pictures in text files next to their folders: their splits and their labels.

    train.csv, test.csv                 id,breed                      of Kaggle: `train/<id>.jpg`
    annotations/{trainval,test}.txt     <name> <class> ...            Oxford-IIIT Pets
    meta/{train,test}.txt               <class>/<name>                Food-101
    val_annotations.txt                 <file> TAB <class> ...        Tiny ImageNet
    images.txt, image_class_labels.txt, train_test_split.txt          CUB-200-2011, by numbers
    list_eval_partition.txt             <name> <0, 1 or 2>            CelebA's splits
    list_attr_celeba.txt                a count, names, <name> <values>, with table= and label=

A file is a list if its first rows name pictures, with or without their suffixes; its name may say
the split. Where rows have no label, the folder of a picture is its label.
"""

import csv
import io
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from dlio.data.folder_names import files_among
from dlio.data.labels import (
    LABEL_NAMES,
    LabelEncoding,
    check_label,
    encode_labels,
    is_index,
    is_number,
    most_likely_label,
    one_hot,
)
from dlio.data.source import Source, file_at
from dlio.data.splits import (
    SPLITS,
    WHOLE,
    chosen_split,
    how_to_choose,
    not_chosen_by,
    split_column,
    split_of,
    split_word,
)
from dlio.errors import SourceError, UsageError
from dlio.util.printable import tell_once
from dlio.util.structured_text import check_cells, separator_of, utf8_text
from dlio.util.units import counted
from dlio_readers.fileset import PICTURES, files_in
from dlio_readers.foreign_labels import foreign_words

# fmt: off
FILE_COLUMNS: Final = (
    "file_name", "filename", "file", "image", "path", "name", "image_id", "image_name",
    "image_path", "file_path", "filepath", "img", "img_path", "id",
)
# fmt: on
"""Columns of names of files, with their extension or without, in the order of preference."""
# fmt: off
_BOXES: Final = (
    "xmin", "ymin", "xmax", "ymax", "x_min", "y_min", "x1", "y1", "bbox", "bboxes",
)
# fmt: on
"""Columns of boxes, which tables of labels may have."""
_RUN_LENGTHS: Final = re.compile(r"(?:^|[-_ ])rles?(?:$|[-_ ])|encoded[-_ ]?pixels", re.IGNORECASE)
"""A column of masks as Kaggle has them, in runs of pixels."""
MAX_TABLE: Final = 128 << 20
DESCRIPTIONS: Final = "metadata."
"""Beginning of the names of tables that describe pictures: their label is called so, or they have
none."""
_LIST_FOLDERS: Final = ("annotations", "meta", "splits", "lists")
_NOT_PICTURES: Final = (*_LIST_FOLDERS, "masks", "labels", "trimaps", "segmentations")
_MOST_FOLDERS: Final = 16
"""Folders next to a list; more of them are classes."""
_DEEPEST: Final = 3
_LISTS: Final = (".csv", ".tsv", ".txt")
_MOST_LISTS: Final = 16
_HEAD: Final = 1 << 16
PROBED: Final = 8
"""First rows by which a list is recognised."""
_WORDY: Final = 3
"""Words of a label, at most; longer values are boxes or descriptions."""
_COMMENT: Final = "#"
_BOX: Final = 4
"""Numbers of a box."""
_MARKED: Final = frozenset(("0", "1", "-1"))
_QUADS: Final = ({"x", "y", "width", "height"}, {"x", "y", "w", "h"})
"""Columns of boxes that are none one by one."""
_PARTITION: Final = "partition"
"""Part of the name of a file that gives the split of each picture."""
_MARKS: Final = dict(zip("012", SPLITS, strict=True))
"""Splits as CelebA numbers them."""
_NUMBERED: Final = re.compile(r"(.+?)[-_ ]?[0-9]+")
Rows = Sequence[tuple[str, str | None]]
"""(picture as the list names it, label as text; None without)."""


@dataclass(frozen=True, slots=True)
class PictureLists:
    """The splits of a folder, as its lists say."""

    files: tuple[str, ...]
    """The lists, below the folder."""
    splits: dict[str, dict[str, str]]
    """By split the label of each picture, as text; "" for one without. Pictures by their names
    below the folder."""
    encoding: LabelEncoding
    """Labels of all splits."""
    unlisted: tuple[str, ...]
    """Pictures next to listed ones that no list names."""
    own: Mapping[str, LabelEncoding] = field(default_factory=dict)
    """Labels of the splits that no list names, by their folders, where those of lists are others,
    such as the numbers of ImageNet's `val.txt` next to class folders of `train`."""

    def encoding_of(self, split: str | None, where: str) -> LabelEncoding:
        """Return the labels of a split. Raises UsageError for all of them if they differ."""
        if split is None or not self.own:
            return self.encoding
        if split == WHOLE:
            raise UsageError(
                f"{where}: labels of {', '.join(self.own)} are folders, and others those of "
                f"{', '.join(self.files)}: open one split"
            )
        return self.own.get(chosen_split(split, list(self.splits), where), self.encoding)

    def chosen(self, split: str | None, where: str) -> dict[str, str]:
        """Return the labels of the pictures of a split.

        Raises UsageError if there are several and none is chosen, or no such one.
        """
        if split == WHOLE:
            return {name: text for each in self.splits.values() for name, text in each.items()}
        if split is None and len(self.splits) == 1:
            return next(iter(self.splits.values()))
        if split is None:
            shown = ", ".join(f"{name} ({len(each):,})" for name, each in self.splits.items())
            raise UsageError(
                f"{where} holds the splits {shown}, as {', '.join(self.files)} say: "
                f"{how_to_choose(next(iter(self.splits)))}"
            )
        return self.splits[chosen_split(split, list(self.splits), where)]


@dataclass(frozen=True, slots=True)
class _List:
    file: str
    split: str
    rows: Rows
    has_labels: bool
    columns: tuple[str, ...] = ()
    """Columns that might be labels, where none clearly is."""
    beside: tuple[str, ...] = ()
    """Further files that it was made of."""
    words: str = ""
    """What is told if it is read."""


def find_lists(
    source: Source, table: str | None = None, label: str | None = None
) -> PictureLists | None:
    """Return the lists of a folder; None if it has none.

    Args:
        source: the folder.
        table: the list to read, below the folder or by its full path; None to look for lists.
        label: the column of labels; None for the one that is called so, or the only other one.

    Raises SourceError if a list names pictures that are not there, UsageError if a list of pictures
    in one folder has several columns that might be labels.
    """
    rows = source.names()
    tops = [name for name, folder in rows if folder and name.lower() not in _NOT_PICTURES]
    if len(tops) > _MOST_FOLDERS:
        return None
    tops = [_innermost(source, top) for top in tops]
    if table is not None:
        listed = [_read(source, table, label, is_named=True)]
    else:
        listed = _candidates(source, rows, tops, label)
    lists = _candidates(source, rows, tops, None) if table is not None else []
    listed = _by_partition(source, rows, listed, [each for each in lists if not each.has_labels])
    made: dict[str, dict[str, str]] = {}
    used: list[str] = []
    unclear: list[tuple[_List, str]] = []
    unlisted: set[str] = set()
    folders: set[str] = set()
    for each in listed:
        folder = _folder_of(source, tops, each.rows)
        if folder is None:
            if table is not None:
                raise SourceError(
                    f"{table}: its first pictures ({', '.join(n for n, _ in each.rows[:3])}) are "
                    f"not in {source.shown()}: check table="
                )
            continue
        keys = _keys(source, folder, each.rows)
        if any(_picture_of(keys, name) is None for name, _ in each.rows):
            for top in tops:  # Pictures in several folders, such as those of parts of a download.
                for name, picture in _keys(source, top, each.rows).items():
                    keys.setdefault(name, picture)
        nested = any("/" in name[len(folder) + 1 if folder else 0 :] for name in keys.values())
        if not each.has_labels and each.columns and (label is not None or not nested):
            unclear.append((each, folder))
            continue
        if not each.has_labels and each.columns:
            continue  # The pictures' folders are their classes.
        split = each.split or (folder if split_of(folder, folder=True) else "")
        own = made.setdefault(split, {})
        _add(own, each, keys, source, folder)
        used += [each.file, *each.beside]
        if each.words:
            tell_once(f"{source.shown(each.file)}: {each.words}")
        folders.add(folder)
        folders |= {picture.partition("/")[0] for picture in own if "/" in picture}
        unlisted |= set(keys.values())
    if unclear and not made:
        first, folder = unclear[0]
        check_label(source.shown(first.file), first.columns, label)
        if known_words := foreign_words(source, [first.file]):
            raise UsageError(
                f"{source.shown()}: {known_words}; layout='flat' reads the pictures without them"
            )
        masks = next(filter(_RUN_LENGTHS.search, first.columns), None)
        if masks is not None:
            raise UsageError(
                f"{source.shown(first.file)}: its {masks} are masks by their runs of pixels, which "
                "are read from pictures: draw each into a folder masks, as 0.png of images/0.jpg, "
                f"or read the pictures without them: {source.shown(folder)}, layout='flat'"
            )
        likely = most_likely_label(first.columns)
        raise UsageError(
            f"{source.shown(first.file)} names pictures of {folder or 'the folder'}, and has no "
            f"column that is clearly the label ({', '.join(first.columns)}): choose with "
            f"table={first.file!r}, label={likely!r}, or read them without labels with "
            "layout='flat'"
        )
    known = {name for each in made.values() for name in each}
    if not made or (table is None and not _are_whole(source, tops, folders, known, unlisted)):
        return None
    if len(made) > 1:
        made.pop("", None)  # A list of all.
    unread: list[str] = []
    for top in tops:
        if (split_of(top, folder=True) or split_of(top)) and top not in folders and table is None:
            others = {name: _class_below(top, name) for name in files_in(source, top, PICTURES)}
            if others:
                made.setdefault(top, others)
                unread.append(top)
    known = {name for each in made.values() for name in each}
    named = {text for top in unread for text in made[top].values()} - {""}
    listed_texts = {t for k, each in made.items() if k not in unread for t in each.values() if t}
    by_folder: dict[str, LabelEncoding] = {}
    if named and listed_texts and not (named >= listed_texts or listed_texts >= named):
        by_folder = {top: encode_labels(made[top].values()) for top in unread}
        tell_once(
            f"{source.shown()}: labels of {', '.join(unread)} are its folders, and those of other "
            f"splits of {', '.join(dict.fromkeys(used))} ({min(listed_texts)}, ...): check that "
            "they mean the same"
        )
    encoding = _encoded(
        {
            n: text
            for k, each in made.items()
            if k not in by_folder
            for n, text in each.items()
            if text
        }
    )
    left = tuple(sorted(unlisted - known))
    places = {name: k for k, name in enumerate(SPLITS)}
    ordered = dict(
        sorted(made.items(), key=lambda each: places.get(split_of(each[0], folder=True) or "", 9))
    )
    return PictureLists(tuple(dict.fromkeys(used)), ordered, encoding, left, by_folder)


def _class_below(folder: str, name: str) -> str:
    """Return the class folder of a picture in the folder of a split; "" for one in it itself."""
    inner, slash, _ = name[len(folder) + 1 :].partition("/")
    return inner if slash else ""


def _innermost(source: Source, folder: str) -> str:
    """Return the folder in a folder that holds nothing else, as archives have them; splits stay."""
    for _ in range(_DEEPEST):
        rows = source.names(folder)
        if len(rows) != 1 or not rows[0][1] or split_of(folder, folder=True):
            break
        folder = f"{folder}/{rows[0][0]}"
    return folder


def _are_whole(
    source: Source, tops: Sequence[str], folders: set[str], known: set[str], all_of: set[str]
) -> bool:
    """True unless lists name few of the pictures next to them, or pictures of one class folder."""
    if 2 * len(known) < len(all_of):
        return False
    others = [top for top in tops if top not in folders and not split_of(top)]
    others = [top for top in others if not split_of(top, folder=True)]
    return "" in folders or not any(
        True for top in others for _ in islice(files_in(source, top, PICTURES), 1)
    )


def names_of_lists(source: Source, folder: str) -> list[str]:
    """Return the lists in a folder that name pictures of one of its folders."""
    rows = source.names()
    lists = []
    for each in _candidates(source, rows, [folder], None):
        place = _folder_of(source, [folder], each.rows)
        first = [name for name, _ in each.rows[:PROBED]]
        inner = place == "" and all(name.startswith(f"{folder}/") for name in first)
        if place == folder or inner:
            lists.append(each.file)
    return lists


def has_lists(source: Source) -> bool:
    """True if a folder holds files that may be lists."""
    return bool(_files_of(source, source.names()))


def _files_of(source: Source, rows: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the files that may be lists, by their names."""
    files = [name for name in files_among(rows, _LISTS) if _may_be_list(name)]
    for folder in (name for name, is_folder in rows if is_folder and name in _LIST_FOLDERS):
        inner = source.files(folder)
        files += [f"{folder}/{name}" for name in inner if _may_be_list(name, folder)]
    return files[:_MOST_LISTS]


def _candidates(
    source: Source, rows: Sequence[tuple[str, bool]], tops: Sequence[str], label: str | None
) -> list[_List]:
    """Return the files whose first rows name pictures, read. Raises SourceError if one is not a
    list all the same."""
    numbered = _by_numbers(source, rows)
    if numbered:
        return numbered
    made = []
    for file in _files_of(source, rows):
        head = source.read(file, 0, _HEAD)
        whole, mark, _ = head.rpartition(b"\n")
        try:
            first = _parsed(file, whole if mark and len(head) == _HEAD else head, None, file, True)
        except SourceError:
            continue  # A text of another kind.
        if _folder_of(source, tops, first.rows) is not None:
            made.append(_read(source, file, label))
    return made


def names_for(first: Sequence[str], files: Sequence[str] = ()) -> list[str]:
    """Return names for the columns of a table whose first line is not a header, as it has the name
    of a picture, or of one of some files, with its suffix or without; [] for others."""
    named = next((k for k, each in enumerate(first) if each.lower().endswith(PICTURES)), None)
    if named is None:
        cells = {each: k for k, each in enumerate(first) if each.lower() not in FILE_COLUMNS}
        ends = (name.rpartition("/")[2] for name in files)
        forms = (each for end in ends for each in (end, end.partition(".")[0]))
        named = next((cells[each] for each in forms if each in cells), None)
    if named is None:
        return []
    return [FILE_COLUMNS[0] if k == named else f"column {k + 1}" for k in range(len(first))]


def is_wordy(value: str) -> bool:
    """True for a value that is a description, or a box, and not a label."""
    return len(value.split()) > _WORDY


def delimiter_of(file: str, text: str) -> str:
    """Return the character between the values of a table's text."""
    if file.lower().endswith(".tsv"):
        return "\t"
    return separator_of(next(iter(text[:_HEAD].splitlines()), ""))


def _may_be_list(name: str, folder: str = "") -> bool:
    if not name.lower().endswith(_LISTS):
        return False
    stem, suffix = os.path.splitext(name.lower())
    if "submission" in stem:
        return False  # Labels to be filled in.
    if suffix in (".csv", ".tsv") and not folder:
        return True
    return bool(split_word(stem))


def _read(source: Source, file: str, label: str | None, is_named: bool = False) -> _List:
    """Return a list. Raises SourceError if it is not text, UsageError for an unknown column."""
    if os.path.isabs(file) or "://" in file:
        data = file_at(file).opened().read(0, MAX_TABLE + 1)
    else:
        data = source.read(file, 0, MAX_TABLE + 1)
    where = source.shown(file) if not os.path.isabs(file) else file
    head = data[:_HEAD]
    has_header = (
        b"," in head or file.endswith(".tsv") or _has_count(head.decode("utf-8", "replace"))
    )
    if is_named and label is not None and not has_header:
        raise UsageError(f"label={label!r}: {where} has no header: leave label= out")
    made = _parsed(file, data, label, where)
    if is_named and not made.has_labels:
        check_label(where, made.columns, label)
    return made


def _parsed(file: str, data: bytes, label: str | None, where: str, is_head: bool = False) -> _List:
    """Return the list that some bytes are, of a head its names alone. Raises SourceError."""
    try:
        if len(data) > MAX_TABLE:
            raise ValueError(f"it has over {MAX_TABLE} bytes")
        check_cells(data, b"\n\r\t ,", where)
        text = utf8_text(data)
        stem, suffix = os.path.splitext(os.path.basename(file))
        split = split_word(stem) or ""
        if suffix.lower() in (".csv", ".tsv"):
            delimiter, lines = delimiter_of(file, text), io.StringIO(text, newline="")
            table: Iterator[list[str]] = csv.reader(
                lines, delimiter=delimiter, strict=True, skipinitialspace=True
            )
        elif _has_count(text):
            table = iter([line.split() for line in text.splitlines()[1:]])
        else:
            made, has, words = _plain(text)
            return _List(file, split, made, has, words=words)
        header = [name.strip() for name in next(table, [])]
        rows = [row for row in table if row]
        if rows and len(rows[0]) == len(header) + 1 and suffix.lower() == ".txt":
            header = [FILE_COLUMNS[0], *header]
        if names := names_for(header):
            header, rows = names, [header, *rows]
    except (ValueError, csv.Error) as error:
        raise SourceError(f"{where} is not a list of pictures: {error}") from error
    if is_head and header:
        lower = [name.lower() for name in header]
        at = next((lower.index(name) for name in FILE_COLUMNS if name in lower), 0)
        return _List(file, split, [(row[at].strip(), None) for row in rows if len(row) > at], False)
    if label is not None and label not in header:
        return _List(file, split, [(row[0], None) for row in rows], False, tuple(header))
    return _columns(file, split, header, rows, label, where)


def _columns(
    file: str,
    split: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    label: str | None,
    where: str,
) -> _List:
    """Return a list with a header. Raises SourceError for rows of other lengths."""
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise SourceError(f"{where}: row {number + 1} has {len(row)} of {len(header)} values")
    column = split_column(header)
    if column not in (None, label) and len(header) > 2:
        tell_once(f"{where}: {not_chosen_by(column)}")
    lower = [name.lower() for name in header]
    tell_of_boxes(where, header)
    at = next((lower.index(name) for name in FILE_COLUMNS if name in lower), 0)
    others = [k for k, name in enumerate(header) if k != at and not is_index(name)]
    if label is not None:
        place: int | None = header.index(label)
    else:
        place = next((lower.index(name) for name in LABEL_NAMES if name in lower), None)
        is_description = os.path.basename(file).startswith(DESCRIPTIONS)
        if place is None and len(others) == 1 and not is_description:
            wordy = any(is_wordy(row[others[0]]) for row in rows[:PROBED])
            place = None if wordy else others[0]
    if place == at:
        place = None
    made: Rows
    if place is None:
        names = [header[k] for k in others]
        hot = one_hot(where, names, ([row[k] for k in others] for row in rows))
        if hot:
            made = [(row[at].strip(), name) for row, name in zip(rows, hot, strict=True)]
            return _List(file, split, made, True)
        made = [(row[at].strip(), None) for row in rows]
        return _List(file, split, made, False, tuple(names))
    if label is not None:
        # Of `n01440764 10 20 30 40`, a class and its box, the class.
        values = [row[place].strip() for row in rows]
        parts = [value.split(maxsplit=5) for value in values]
        boxed = all(len(each) > _BOX and all(map(is_number, each[1 : 1 + _BOX])) for each in parts)
        values = [each[0] for each in parts] if boxed else values
        made = [(row[at].strip(), text) for row, text in zip(rows, values, strict=True)]
    else:
        made = [(row[at].strip(), row[place].strip()) for row in rows]
    gap = next((name for name, text in made if not text), None)
    if gap is not None:
        raise SourceError(f"{where}: {gap} has no {header[place]}: give it one, or remove its row")
    return _List(file, split, made, True)


def _plain(text: str) -> tuple[Rows, bool, str]:
    """Return (rows of a text without a header, True if they have labels, words about several that
    they may have)."""
    words = ""
    made: list[tuple[str, str | None]] = []
    rests: list[list[str]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith(_COMMENT):
            continue
        parts = line.split("\t") if "\t" in line else line.split()
        made.append((parts[0].strip(), parts[1].strip() if len(parts) > 1 else None))
        rests.append(parts[1:])
    widths = {len(rest) for rest in rests}
    if max(widths, default=0) > 1 and min(widths) > 0 and "\t" not in text:
        if all(each in _MARKED for rest in rests for each in rest):
            words = (
                f"each picture has several marks, such as {' '.join(rests[0][:4])}, and no label "
                "is read of them: write file_name and label to a labels.csv"
            )
            return [(name, None) for name, _ in made], False, words
        if len(widths) > 1 and not any(is_number(rest[0]) for rest in rests):
            # Names of several words, such as `Boeing 707` next to `DC-3`.
            made = [(name, " ".join(rest)) for (name, _), rest in zip(made, rests, strict=True)]
        elif not any(is_number(rest[0]) for rest in rests):
            words = (
                f"the first word behind a name is its label, such as {rests[0][0]} of "
                f"{' '.join(rests[0][:4])}: write a tab in front of labels of several words"
            )
    has = bool(made) and all(each for _, each in made)
    return (made if has else [(name, None) for name, _ in made]), has, words


def _has_count(text: str) -> bool:
    """True for a text that begins with its number of rows and their columns' names, as CelebA's."""
    lines = [line.split() for line in text.split("\n", 3)[:3]]
    if len(lines) < 3 or len(lines[0]) != 1 or not lines[0][0].isdecimal():
        return False
    return len(lines[1]) > 1 and len(lines[2]) - len(lines[1]) in (0, 1)


def _by_partition(
    source: Source,
    rows: Sequence[tuple[str, bool]],
    listed: Sequence[_List],
    lists: Sequence[_List],
) -> list[_List]:
    """Return lists divided by the file that gives the split of each picture, if there is one, or by
    further `lists` without labels; the file is a list without labels if it is the only one."""
    file = next((name for name in _files_of(source, rows) if _PARTITION in name.lower()), None)
    if not listed:
        return []
    if file is not None:
        marks = {same_name(name): text or "" for name, text in _read(source, file, None).rows}
        known = {n: split_of(text, folder=True) or _MARKS.get(text) for n, text in marks.items()}
        beside: tuple[str, ...] = (file,)
    else:
        pairs = {(same_name(name), each.split) for each in lists for name, _ in each.rows}
        known = dict(pairs)
        if len(known) < len(pairs):
            return list(listed)  # Lists of several ways to split them.
        beside = tuple(each.file for each in lists)
    splits = {name: split for name, split in known.items() if split}
    if not splits or len(splits) < len(known):
        return list(listed)
    made: list[_List] = []
    own_names = {os.path.basename(name) for name in beside}
    others = [each for each in listed if os.path.basename(each.file) not in own_names]
    if not others and file is None:
        return list(listed)
    for each in others or [_List(beside[0], "", [(name, None) for name in splits], False)]:
        if each.split or any(same_name(name) not in splits for name, _ in each.rows):
            made.append(each)
            continue
        for split in dict.fromkeys((*SPLITS, *splits.values())):
            own = [row for row in each.rows if splits[same_name(row[0])] == split]
            if own:
                kept = replace(each, split=split, rows=own, beside=(*each.beside, *beside))
                made.append(kept)
    return made


def _by_numbers(source: Source, rows: Sequence[tuple[str, bool]]) -> list[_List]:
    """Return the lists of a data set that numbers its pictures, as CUB-200-2011 does; [] if not."""
    names = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    if any((name, False) not in rows for name in names[:2]):
        return []
    parts: list[dict[str, str]] = []
    for name in names:
        if (name, False) not in rows:
            continue
        plain, *_ = _plain(source.read(name, 0, MAX_TABLE).decode("utf-8-sig", "replace"))
        parts.append({number: value or "" for number, value in plain})
    pictures, labels = parts[:2]
    if pictures.keys() != labels.keys() or any(part.keys() != pictures.keys() for part in parts):
        raise SourceError(
            f"{source.shown()}: {', '.join(names)} number other pictures: restore them"
        )
    if len(parts) < len(names):
        made = [(name, labels[k]) for k, name in pictures.items()]
        return [_List(names[0], "", made, True, beside=names[1:2])]
    return [
        _List(
            names[2],
            split,
            [(name, labels[k]) for k, name in pictures.items() if parts[2][k] == mark],
            True,
            beside=names[:2],
        )
        for split, mark in (("train", "1"), ("test", "0"))
    ]


def _folder_of(source: Source, tops: Sequence[str], rows: Rows) -> str | None:
    """Return the folder in which most of the first pictures of a list lie; None if none do."""
    first = [name for name, _ in islice(rows, PROBED)]
    best, most = None, 0
    for folder in ("images", "", *tops):
        if folder and folder not in tops:
            continue
        count = sum(_lies_in(source, folder, name) for name in first)
        if count > most:
            best, most = folder, count
    return best


def tell_of_boxes(where: str, columns: Sequence[str]) -> bool:
    """Warn once of columns of boxes in a table of labels, or of values within these, such as
    `objects.bbox`; True if there are some."""
    lower = {name.lower() for name in columns}
    known = {*_BOXES, *(name for quad in _QUADS if quad <= lower for name in quad)}
    boxes = [name for name in columns if name.lower().rpartition(".")[2] in known]
    if boxes:
        tell_once(
            f"{where}: its boxes ({', '.join(boxes[:4])}) are left out: write them as COCO's JSON "
            "or as YOLO's texts to read them"
        )
    return bool(boxes)


def same_name(name: str) -> str:
    """Return a file's name as tables and folders of other systems have it alike: with slashes, and
    letters with accents as one character."""
    return os.path.normpath(unicodedata.normalize("NFC", name.replace("\\", "/")))


def small_suffix(name: str) -> str:
    """Return a file's name with its suffix in small letters, as tables may have it of `0.JPG`."""
    stem, suffix = os.path.splitext(name)
    return stem + suffix.lower()


def _lies_in(source: Source, folder: str, name: str) -> bool:
    name = os.path.normpath(name.replace("\\", "/")) if name else ""
    if not name or name.startswith(("..", "/")):
        return False
    inner, _, last = name.rpartition("/")
    here = folder
    for part in inner.split("/") if inner else ():
        if (part, True) not in source.names(here):
            return False
        here = f"{here}/{part}" if here else part
    names = source.files(here)
    pictures = [each for each in names if each.lower().endswith(PICTURES)]
    last = same_name(last)
    pictures = [same_name(each) for each in pictures]
    small = small_suffix(last)
    return any(
        last == os.path.splitext(each)[0] or small == small_suffix(each) for each in pictures
    )


def _keys(source: Source, folder: str, rows: Rows) -> dict[str, str]:
    """Return the pictures of a folder by their names in it, with and without suffix."""
    deep = any("/" in same_name(name) for name, _ in islice(rows, PROBED))
    if deep:
        pictures = list(files_in(source, folder, PICTURES))
    else:
        names = source.files(folder)
        names = [name for name in names if name.lower().endswith(PICTURES)]
        pictures = [f"{folder}/{name}" if folder else name for name in names]
    keys: dict[str, str] = {}
    for picture in pictures:
        own = picture[len(folder) + 1 :] if folder else picture
        keys[same_name(own)] = picture
    for own, picture in list(keys.items()):
        keys.setdefault(os.path.splitext(own)[0], picture)
        keys.setdefault(small_suffix(own), picture)
    return keys


def _picture_of(keys: Mapping[str, str], name: str) -> str | None:
    """Return the picture that a list names; None without one."""
    own = same_name(name)
    return keys.get(own) or keys.get(small_suffix(own))


def _add(
    into: dict[str, str], each: _List, keys: Mapping[str, str], source: Source, folder: str
) -> None:
    """Add the pictures of a list. Raises SourceError for those that are not there."""
    lost = []
    for name, label in each.rows:
        own = same_name(name)
        picture = _picture_of(keys, name)
        if picture is None:
            lost.append(name)
            continue
        text = own.partition("/")[0] if label is None and "/" in own else label or ""
        if into.setdefault(picture, text) != text:
            raise SourceError(
                f"{source.shown(each.file)}: {name} has several labels, here or in another list: "
                f"choose one list, as with table={each.file!r}"
            )
    if lost:
        raise SourceError(
            f"{source.shown(each.file)}: {len(lost)} of its {counted(len(each.rows), 'picture')} "
            f"are not in {source.shown(folder)} {lost[:3]}: copy them, remove their rows, or "
            "leave the list out with layout='classes'"
        )


def _encoded(labels: Mapping[str, str]) -> LabelEncoding:
    """Return labels by their texts; numbers are named by folders, or beginnings of names, if each
    has one of its own."""
    encoding = encode_labels(labels.values())
    if encoding.classes or not labels:
        return encoding
    for name_of in (_folder_name, _first_words):
        names = {text: name_of(picture) for picture, text in labels.items()}
        agree = all(names[text] == name_of(picture) for picture, text in labels.items())
        if agree and all(names.values()) and 1 < len(set(names.values())) == len(names):
            order = sorted(names, key=lambda text: encoding.numbers[text])
            numbers = {text: place for place, text in enumerate(order)}
            return LabelEncoding(numbers, [names[text] for text in order], frozenset())
    return encoding


def _folder_name(picture: str) -> str:
    parts = picture.split("/")
    return parts[-2] if len(parts) > 2 else ""


def _first_words(picture: str) -> str:
    match = _NUMBERED.fullmatch(os.path.splitext(picture.rpartition("/")[2])[0])
    return match[1] if match else ""

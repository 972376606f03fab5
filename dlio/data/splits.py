"""The names that people give the parts of a data set: `train`, `val`, `test` and their like.

One function knows them, for all formats: folders (`train/`), files (`train-00000-of-00003.parquet`,
`mnist_test.h5`), files of annotations (`instances_val2017.json`) and data.yaml.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeAlias

from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.options import Option
from dlio.util.structured_text import parse_json

TRAIN_FOLDERS: Final = ("train", "training")
VAL_FOLDERS: Final = ("val", "validation", "valid", "dev", "eval", "test", "testing")
WHOLE: Final = "all"
"""`split=` that reads all parts as one data set."""
_BOTH: Final = "trainval"
SPLITS: Final = ("train", "validation", "test")
_SPLITS: Final = {
    "train": ("train", "training", _BOTH),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("testing", "test", "t10k"),
}
_CANONICAL: Final = {name: split for split, names in _SPLITS.items() for name in names}
# fmt: off
_COLUMNS: Final = (
    "split", "splits", "subset", "partition", "dataset_split", "data_split", "fold", "folds",
    "kfold",
)
# fmt: on
"""Names of columns that say the split of a row, in small letters."""
_WORD: Final = "|".join(sorted(_CANONICAL, key=len, reverse=True))
_FOLDER: Final = re.compile(rf"({_WORD})([-_]?(19|20)\d\d)?", re.IGNORECASE)
_FILE: Final = re.compile(rf"(?:^|[-._ 0-9])({_WORD})(?=$|[-._ 0-9])", re.IGNORECASE)

_FORMATS: Final = re.compile(r"([-_. ](npz|npy|h5|hdf5|nii|dcm|dicom|jpe?g|png|tiff?|vol))+$")
"""Ends the name of a folder that says the format of its files."""


SplitChoice: TypeAlias = Annotated[
    str | None,
    Option(
        "Split to read where a data set has several, such as train or val; all reads them as one.",
        metavar="NAME",
    ),
]
"""A command's option for `split=` of `dlio.open`."""
FormatChoice: TypeAlias = Annotated[
    str | None,
    Option("Format of a folder that fits several, such as folder or coco.", metavar="FORMAT"),
]
"""A command's option for `format=` of `dlio.open`."""
ReaderChoices: TypeAlias = Annotated[
    tuple[str, ...],
    Option(
        "Option of the reader as of dlio.open, such as layout=flat or dtype=uint16. Repeatable.",
        metavar="NAME=VALUE",
    ),
]
"""A command's option for those of `dlio.open` that single formats have."""
_OF_COMMANDS: Final = ("path", "split", "format", "follow_links", "trust")


def reading_options(
    split: str | None, reader: str | None, others: Sequence[str] = ()
) -> dict[str, object]:
    """Return those of these options of `dlio.open` that are given; `others` are NAME=VALUE, where a
    value that is JSON is taken as such, and any other as text. Raises UsageError."""
    given: dict[str, object] = {"split": split, "format": reader}
    for each in others:
        name, mark, text = each.partition("=")
        name = name.strip().replace("-", "_")
        if not mark or not name.isidentifier():
            raise UsageError(f"--reader-option {each}: give NAME=VALUE, such as layout=flat")
        if name in _OF_COMMANDS:
            raise UsageError(f"--reader-option {each}: this is an option of the command's own")
        if name in given:
            raise UsageError(f"--reader-option {each}: {name} is given twice: leave one out")
        try:
            given[name] = parse_json(text, f"--reader-option {name}")
        except ValueError:
            given[name] = text
    return {name: value for name, value in given.items() if value is not None}


def split_words(split: object, others: object = ()) -> tuple[str, ...]:
    """Return the words of a command line that choose a split and options of the reader."""
    chosen = () if split is None else ("--split", str(split))
    several = others if isinstance(others, tuple) else ()
    return chosen + tuple(word for each in several for word in ("--reader-option", str(each)))


def how_to_choose(split: str) -> str:
    """Return the words by which an error tells how to choose a split."""
    return f"choose one with split={split!r} (--split {split}; of dlio pack --source-split {split})"


def no_splits(split: str, where: str) -> UsageError:
    """Return the error for a split of a data set, given as text, that has none."""
    return UsageError(
        f"split={split!r}: {where} has no splits: leave split= out (on the command line --split "
        "or --val-split, of dlio pack --source-split)"
    )


def split_of(name: str, *, folder: bool = False) -> str | None:
    """Return the part of a data set that a file or folder holds by its name: `train`, `validation`
    or `test`; None if its name does not say so.

    A folder's name is such a word, perhaps with a year; a file's name has one between other words.
    """
    match = _FOLDER.fullmatch(name) if folder else _FILE.search(name)
    return _CANONICAL[match[1].lower()] if match else None


def split_folders(names: Iterable[str]) -> dict[str, str]:
    """Return the part that each folder which is one holds, by its name: `train` and `val`.

    Without such names, those that differ in that word alone are parts, as `training_set` and
    `test_set` or `seg_train` and `seg_test`; `bullet_train` and `test_tube` are not. The format of
    their files may differ, as in `train_npz` and `test_vol_h5`.
    """
    known = list(names)
    exact = {name: split for name in known if (split := split_of(name, folder=True))}
    if exact:
        return exact
    alike: dict[tuple[str, str], dict[str, str]] = {}
    for name in known:
        match = _FILE.search(name)
        if match is not None:
            rest = (name[: match.start(1)].lower(), _FORMATS.sub("", name[match.end(1) :].lower()))
            alike.setdefault(rest, {})[name] = _CANONICAL[match[1].lower()]
    several = [group for group in alike.values() if len(set(group.values())) > 1]
    return several[0] if len(several) == 1 else {}


def split_column(names: Iterable[str]) -> str | None:
    """Return the field of a table that says the split of each row by its name; None without."""
    return next((name for name in names if name.lower() in _COLUMNS), None)


def not_chosen_by(column: str) -> str:
    """Return the words that tell of such a field."""
    return (
        f"its column {column} chooses no samples: all of them are one data set; write each part "
        "to a file of its own, such as train.csv, or choose samples with a sampler"
    )


def split_word(name: str) -> str | None:
    """Return the word in a file's name that says which part it is, as the name spells it."""
    match = _FOLDER.fullmatch(name) or _FILE.search(name)
    return match[1] if match else None


def splits_among(names: Iterable[str], *, folder: bool = False) -> dict[str, list[str]]:
    """Return the names that say which part they are, by part, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        split = split_of(name, folder=folder)
        if split is not None:
            groups.setdefault(split, []).append(name)
    return groups


def chosen_split(split: str, have: Sequence[str], where: str) -> str:
    """Return the one of the splits `have`, as a data set spells them, that `split` names.

    `val` also chooses `validation`, `train` also `train2017`, if there is one such. Raises
    UsageError if none or several are meant.
    """
    if split in have:
        return split
    # `train` may mean `trainval`; one who asks for `trainval` wants more than `train`.
    meant = None if split == _BOTH else split_of(split, folder=True)
    for folder in (True, False):
        fits = [name for name in have if meant and split_of(name, folder=folder) == meant]
        if len(fits) == 1:
            return fits[0]
    if not any(have):
        raise no_splits(split, where)
    shown = ", ".join(filter(None, have))
    raise UsageError(
        f"split={split!r}: {where} has {shown}: choose one of these{nearest(split, have)}"
    )

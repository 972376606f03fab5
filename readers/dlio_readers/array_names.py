"""Splits and parts of samples by the names of arrays and of their files.

pathmnist.npz             train_images, train_labels, val_images, ...       members by split
mnist.npz                 x_train, y_train, x_test, y_test
x.h5                      train/images, test/images                         groups by split
..._train_x.h5, ..._train_y.h5                                              one file an array
X_train.npy, y_train.npy
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from dlio.data.splits import (
    SPLITS,
    WHOLE,
    chosen_split,
    how_to_choose,
    no_splits,
    split_of,
    split_word,
)
from dlio.errors import SourceError, UsageError
from dlio.util.printable import tell_once
from dlio.util.units import counted

# fmt: off
_PARTS: Final = frozenset((
    "x", "y", "image", "images", "label", "labels", "data", "target", "targets", "features",
    "inputs", "outputs", "mask", "masks",
))
# fmt: on
"""Words that say which part of samples a file holds, in lower case."""
_DIGITS: Final = re.compile(r"[0-9]+")
_NO_NAME: Final = re.compile(r"(arr_)?[0-9]+")
_FEW_ARRAYS: Final = 3
"""Numbered arrays that may well be fields."""
_BETWEEN: Final = re.compile(r"[-._ /]+")
T = TypeVar("T")


# Not class, which HDF5's own tools write.
_ANNDATA: Final = {"encoding-type", "encoding-version"}
_LABEL_ATTRIBUTES: Final = frozenset(("label", "labels", "target", "targets"))


def tell_of_attributes(where: str, names: Iterable[str], *, is_root: bool = True) -> None:
    """Warn once if the `names` of an array's attributes are of a scale, as netCDF has it, of
    labels, or AnnData's."""
    names = list(names)
    if is_root and {*names} >= _ANNDATA:
        tell_once(
            f"{where} is AnnData, whose arrays are read as they are stored: sparse ones, and "
            "categories of obs, such as cell types, are not joined to X; write X and labels by "
            "numpy.savez"
        )
    labels = sorted(_LABEL_ATTRIBUTES.intersection(names))
    if labels:
        tell_once(
            f"{where} has an attribute {labels[0]}, and attributes are not read: store labels as "
            "an array next to it"
        )
    scales = sorted({"scale_factor", "add_offset"}.intersection(names))
    if scales:
        tell_once(
            f"{where} has {' and '.join(scales)}, which netCDF4 and xarray apply: here its numbers "
            "are those that are stored, as h5py and zarr read them"
        )


def splits_of_arrays(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return by split the arrays of each field; {} if their names are not by split.

    They are if all arrays of several splits, or of one, have the same fields in each.
    """
    splits: dict[str, dict[str, str]] = {}
    for name in names:
        flat = name.replace("/", "_")
        word = split_word(flat)
        if word is None:
            return {}
        parts = [part for part in _BETWEEN.split(flat) if part]
        at = [part.lower() for part in parts].index(word.lower())
        # Of `train_set_x` both words.
        del parts[at : at + 1 + (len(parts) > at + 1 and parts[at + 1].lower() == "set")]
        splits.setdefault(word, {})["_".join(parts) or "data"] = name
    if len({frozenset(fields) for fields in splits.values()}) != 1:
        return {}
    if sum(map(len, splits.values())) != len(names):
        return {}
    order = {name: k for k, name in enumerate(SPLITS)}
    return dict(sorted(splits.items(), key=lambda each: order[split_of(each[0]) or SPLITS[0]]))


def fields_of_group(names: Sequence[str]) -> dict[str, str]:
    """Return the arrays of a group by their own names, if all lie in one; {} if not."""
    groups = {name.rpartition("/")[0] for name in names}
    if len(groups) != 1 or "" in groups:
        return {}
    return {name.rpartition("/")[2]: name for name in names}


def chosen_arrays(
    where: str, arrays: Mapping[str, T], split: str | None, names: Sequence[str] = ()
) -> list[dict[str, T]]:
    """Return the arrays of a split by field; of each split for `all`, and all if there are none.

    Arrays that the user names stay as they are.

    Raises UsageError if there are several and none is chosen, or no such one.
    """
    splits = {} if names else splits_of_arrays(list(arrays))
    if len(splits) == 1 and split is None:
        return [dict(arrays)]
    if not splits:
        if split not in (None, WHOLE):
            raise no_splits(split, where)
        return [dict(arrays)]
    chosen = list(splits)
    if split is None and len(splits) > 1:
        first = chosen[0]
        raise UsageError(
            f"{where} holds the splits {', '.join(chosen)}, each with {', '.join(splits[first])}: "
            f"{how_to_choose(first)}, or split={WHOLE!r} for all of them together"
        )
    if split not in (None, WHOLE):
        chosen = [chosen_split(split or "", chosen, where)]
    return [{field: arrays[name] for field, name in splits[each].items()} for each in chosen]


def check_groups(where: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Tell of arrays, by their paths, of which each group or each one may be a sample; they would
    be read as fields, with rows as samples.

    Raises UsageError if groups surely are: they are numbered, and hold arrays of the same names, or
    single values.
    """
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        group, _, own = name.rpartition("/")
        groups.setdefault(group, {})[own] = shape
    patterns = Counter(_DIGITS.sub("0", group) for group in groups)
    common = set.intersection(*map(set, groups.values())) if groups else set()
    is_numbered = min(patterns.values(), default=0) > 1
    alike = len(groups) > 1 and "" not in groups and bool(common or is_numbered)
    single = any(() in each.values() for each in groups.values())
    same = all(each.keys() == common for each in groups.values())
    if alike and (is_numbered or (single and same)):
        kind = _DIGITS.sub("0", next(iter(groups)))
        like = [group for group in groups if same or _DIGITS.sub("0", group) == kind]
        first, second = like[:2]
        raise UsageError(
            f"{where}: {counted(len(like), 'group')}, such as {first} and {second}, hold "
            f"{', '.join(groups[first])} each: dlio does not read groups as samples. Store "
            "sample i as row i of data sets, or name data sets to read rows of, as in "
            f"{where}::{first}/{next(iter(groups[first]))}"
        )
    several = {_DIGITS.sub("0", name) for name in shapes}
    rows = {shape[0] for shape in shapes.values() if shape}
    deep = all(len(shape) > 1 for shape in shapes.values())
    numbered = len(several) <= len(groups) and (
        (deep and len(shapes) > _FEW_ARRAYS)
        # Names that numpy.savez gives, or that are numbers alone, as of samples of one shape.
        or (
            len(shapes) >= _FEW_ARRAYS
            and len(set(shapes.values())) == 1
            and all(_NO_NAME.fullmatch(name.rpartition("/")[2]) for name in shapes)
        )
    )
    if len(rows) == 1 and ((alike and same) or numbered):
        first, *_ = shapes
        tell_once(
            f"{where}: {len(shapes)} arrays named alike, such as {first}, are read as fields of "
            f"{counted(rows.pop(), 'sample')}: if each is a sample, store them as rows of one array"
        )


def side_by_side(names: Sequence[str]) -> list[list[tuple[str, int]]]:
    """Return runs of files that hold parts of the same samples: (part, number of the file) of each.

    These are files whose names differ in such a word alone, as `train_x.h5` and `train_y.h5`; []
    unless all are.
    """
    runs: dict[str, dict[str, int]] = {}
    for number, name in enumerate(names):
        words = [word for word in _BETWEEN.split(name.rpartition("/")[2]) if word]
        places = [k for k, word in enumerate(words[:-1]) if word.lower() in _PARTS]
        if not places:
            return []
        part = words.pop(places[-1]).lower()
        run = runs.setdefault("_".join(words), {})
        if part in run:
            return []
        run[part] = number
    if any(len(run) < 2 or run.keys() != next(iter(runs.values())).keys() for run in runs.values()):
        return []
    # Inputs before their targets, as `x` before `y`.
    return [sorted(run.items(), key=lambda each: _rank(each[0])) for run in runs.values()]


def _rank(part: str) -> tuple[bool, str]:
    return part in ("y", "label", "labels", "target", "targets", "outputs"), part


def joined_parts(where: str, parts: Sequence[tuple[str, Mapping[str, T]]]) -> dict[str, T]:
    """Return the arrays of files that lie side by side, by field: by their own names, or the parts
    that their files hold where these are the same.

    Raises SourceError if two fields have one name.
    """
    names = [name for _, arrays in parts for name in arrays]
    joined: dict[str, T] = {}
    for part, arrays in parts:
        for name, array in arrays.items():
            unique = names.count(name) == 1
            field = name if unique else part if len(arrays) == 1 else f"{part}_{name}"
            if field in joined:
                raise SourceError(f"{where}: two files hold {field}: open them one by one")
            joined[field] = array
    return joined

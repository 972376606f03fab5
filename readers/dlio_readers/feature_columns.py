"""Columns of numbers of a table that each sample has as one array, by `columns=`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dlio.data.labels import is_index, label_like
from dlio.errors import UsageError
from dlio.util.printable import tell_once
from dlio_readers.path_reader import check_names

FEATURES: Final = "features"
"""Field of the array."""
NUMBER: Final = ""
"""The kind of a column that can be one of its numbers, in `feature_names`."""
_ALL: Final = "*"


def feature_names(
    path: str,
    kinds: Mapping[str, str],
    label: str | None,
    features: Sequence[str] | str,
    others: Collection[str],
) -> list[str]:
    """Return the columns that make up the array.

    Args:
        path: the table, for messages.
        kinds: by the names of all columns, `NUMBER`, or what a column has instead, such as "text".
        label: the column that is the label.
        features: the columns that the user names, or "*" for all numbers but the label.
        others: columns that samples have next to the array.

    Raises UsageError for columns that are missing, or not of numbers.
    """
    if FEATURES in others:
        raise UsageError(f"{path} has a column {FEATURES!r}: rename it")
    if features == _ALL:
        able = [name for name, kind in kinds.items() if kind == NUMBER and name != label]
        chosen = [name for name in able if not is_index(name)]
        if len(chosen) < len(able):
            tell_once(f"{path}: row numbers that pandas wrote are left out of the features")
        likely = label_like(name for name in kinds if not is_index(name)) if label is None else None
        if likely is not None:
            part = "one of its features" if likely in chosen else "left out, as it is text"
            tell_once(
                f"{path}: no column has a label's name, and {likely!r} is {part}: if it is the "
                f"label, choose it, label={likely!r} (`--reader-option label={likely}`)"
            )
    else:
        chosen = [features] if isinstance(features, str) else list(features)
        twice = next((name for name in chosen if chosen.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"columns=: {twice!r} is named twice: name each column once")
        if not chosen:
            raise UsageError("columns=: the list is empty: name a column, or leave it out")
    check_names(path, chosen, list(kinds), "column")
    wrong = next((name for name in chosen if kinds[name] != NUMBER), None)
    if wrong is not None:
        raise UsageError(
            f"columns=: {wrong!r} of {path} is {kinds[wrong]}: leave it out, or replace it by "
            "numbers"
        )
    if not chosen:
        raise UsageError(f"columns=: {path} has no columns of numbers: leave it out")
    return chosen

"""Checks of arguments and enumerated words, with errors that name a valid value.

The functions take the argument's name as users write it, such as `image_size` or `--mode`.
"""

import difflib
import math
import operator
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Final, SupportsFloat, SupportsIndex, TypeVar, cast

from dlio.errors import UsageError
from dlio.util.limits import why_no_file

_CLOSE: Final = 0.6
"""Least similarity, from 0 to 1, of a word that is taken for a mistyped one; 0.5 for words of two
letters, one of which is right."""
_LONGEST: Final = 80
MOST_SEED: Final = 2**63 - 1
_Word = TypeVar("_Word")
PathText = str | os.PathLike[str]
"""A path as users give it."""


def nearest(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a mistyped word, or the begin of a single one; an empty
    string if none is near. Hyphens in front of options do not count.
    """
    known = {each.lower().lstrip("-"): each for each in words}
    wanted = word.lower().lstrip("-")
    begun = [each for each in known if wanted and each.startswith(wanted)]
    least = _CLOSE if len(wanted) > 2 else 0.5
    close = begun if len(begun) == 1 else difflib.get_close_matches(wanted, known, 1, least)
    return f"; did you mean {known[close[0]]}?" if close else ""


def listed(names: Collection[str]) -> str:
    """Return the first 20 names, for errors."""
    return ", ".join([*list(names)[:20], *(["..."] if len(names) > 20 else [])])


def unknown_word(name: str, word: object, words: Iterable[str], more: str = "") -> UsageError:
    """Return the error for a word that is not among the valid ones, which it lists unless there is
    another remedy, `more`.
    """
    words = list(words)
    joined = " or ".join(words) if len(words) == 2 else ", ".join(words)
    remedy = more or f"choose {'one of ' if len(words) > 2 else ''}{joined}"
    close = nearest(word, words) if isinstance(word, str) else ""
    return UsageError(f"{named(name, word)}: {remedy}{close}")


def one_of(name: str, value: _Word, words: Sequence[str]) -> _Word:
    """Return a value that must be one of several words. Raises UsageError."""
    if not isinstance(value, str) or value not in words:
        raise unknown_word(name, value, words)
    return value


def whole_number(
    name: str, value: object, least: int = 0, most: int | None = None, unit: str = ""
) -> int:
    """Return an integer of any kind, such as one of numpy. Raises UsageError, with the unit in the
    plural.
    """
    number: int | None = None
    if not isinstance(value, bool):
        try:
            number = operator.index(cast(SupportsIndex, value))
        except (TypeError, ValueError, RuntimeError):
            number = None  # RuntimeError and ValueError come from tensors with several elements.
    if number is None or number < least or (most is not None and number > most):
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        kind = f"a whole number of {unit}" if unit else "a whole number"
        raise UsageError(f"{named(name, value)}: give {kind} {limits}")
    return number


def check_counts(name: str, values: object) -> None:
    """Raise UsageError if a value is not a list of whole numbers from 0."""
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        counts = list(cast(Iterable[object], values))
    except TypeError:
        raise UsageError(f"{named(name, values)}: give a list of whole numbers from 0") from None
    for each in counts:
        whole_number(name, each)


def number_in(name: str, value: object, least: float, unit: str) -> float:
    """Return a number that must be at least `least`. Raises UsageError."""
    number = math.nan
    if not isinstance(value, bool | str | bytes):
        try:
            number = float(cast(SupportsFloat, value))
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
    if not least <= number < math.inf:
        raise UsageError(f"{named(name, value)}: give {unit} from {least:g}")
    return number


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raise UsageError if a value is neither True nor False, nor None where that is allowed."""
    is_flag = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if not (is_flag or (value is None and optional)):
        raise UsageError(f"{named(name, value)}: give True or False")


def check_callable(name: str, value: object) -> None:
    """Raise UsageError if a value is neither None nor callable."""
    if value is not None and not callable(value):
        raise UsageError(f"{named(name, value)}: give a function, or another callable object")


def path_in(name: str, value: object, example: str = "/data/train") -> str:
    """Return a path as text: of a str or a pathlib.Path. Raises UsageError."""
    if isinstance(value, str | os.PathLike):
        path = os.fsdecode(value)
        if "\0" in path:
            raise UsageError(f"{named(name, path)}: a path cannot have a byte of zero: correct it")
        return path
    raise UsageError(f"{named(name, value)}: give a path, such as {example!r}")


def script_in(path: str) -> str:
    """Return the path of a script. Raises UsageError if it is not a file."""
    if os.path.isdir(path):
        raise UsageError(f"{path}: a folder, and no script: name a file in it")
    if not os.path.lexists(path):
        raise UsageError(f"{path}: no such script: check the path")
    if reason := why_no_file(path):
        raise UsageError(f"{path}: {reason}: name a script")
    return path


def paths_in(name: str, value: object) -> list[str]:
    """Return several paths as text; a single one is a list of one. Raises UsageError."""
    if value is None:
        return []
    if isinstance(value, str | os.PathLike):
        return [path_in(name, value)]
    if not isinstance(value, list | tuple):
        raise UsageError(f"{named(name, value)}: give a path or a list of paths")
    return [path_in(name, each) for each in value]


def named(name: str, value: object) -> str:
    """Return an argument with its value as users write both, such as `mode='btach'`."""
    if name.startswith("-") or " " in name:
        return f"{name} {value}"
    shown = " ".join(repr(value).split())
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}..."
    return f"{name}={shown}"

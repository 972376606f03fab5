"""The search for the reader of a path; `reader_contract` defines readers."""

import inspect
import os
import types
import typing
from collections.abc import Sequence
from typing import Any, Final, TypeGuard, cast

from dlio.data.concatenation import ConcatReader
from dlio.data.links import following_links
from dlio.data.reader_contract import Reader as Reader  # Packages of readers import it from here.
from dlio.data.reader_contract import ReaderType, path_rules_of
from dlio.data.source import Source, expand, listed_once, redact, split_fields
from dlio.data.splits import warn_of_splits
from dlio.errors import SourceError, UsageError
from dlio.util.arguments import named, nearest, one_of, path_in, paths_in
from dlio.util.extras import how_to_install
from dlio.util.limits import parsing, trusting
from dlio.util.plugins import plugins

# fmt: off
OPEN_ARGUMENTS: Final = (
    "tiers", "image_size", "train", "crops", "transform", "seed", "on_error", "replicas",
    "follow_links", "trust", "requests", "patch", "patches_per_volume", "patch_stride", "pad",
    "window", "min_visible",
)
# fmt: on
"""Arguments of `dlio.open` that readers do not see, for suggestions."""


def open_reader(
    path: object,
    *,
    follow_links: bool | None = None,
    trust: bool | None = None,
    **options: object,
) -> Reader:
    """Find the reader that recognises `path`, and open it.

    Args:
        path: a path or URL, several of them, or an object that a reader takes, such as torch's
            map-style data sets.
        follow_links: follow symbolic links that lead out of the data set's folder, or refuse them;
            None for DLIO_FOLLOW_LINKS.
        trust: lift the guards against strangers; None for DLIO_TRUST. See `dlio.util.limits`.
        options: for the reader, such as `select` for HDF5 and Zarr.

    Raises SourceError when the path does not exist or no reader recognises it, with the reason of
    each; UsageError for an option that the reader does not have.
    """
    path = _as_text(path)
    if isinstance(path, Reader):
        if options:
            raise UsageError(f"{next(iter(options))}=: the data set is open already: give its path")
        return path
    named = False
    if _are_names(path):
        named = True
        for each in expand(path):
            if not Source(split_fields(each)[0]).exists():
                raise SourceError(f"{redact(each)}: no such file or folder: check the path")
    shown = redact(str(path)) if named else f"this {type(path).__name__}"
    first = path[0] if isinstance(path, list | tuple) else path
    kinds = [(entry.name, entry.load()) for entry in plugins("dlio.readers")]
    kinds.sort(key=lambda item: (path_rules_of(item[1]).is_fallback, item[0]))
    kinds = [each for each in kinds if path_rules_of(each[1]).takes_objects != named]
    with listed_once(), following_links(follow_links), trusting(trust):
        name, kind, reasons = _recognised(first, kinds, named)
        if kind is not None:
            single = named and path_rules_of(kind).one_path
            urls = _each(cast("str | Sequence[str]", path)) if single else []
            if len(urls) > 1:
                return ConcatReader([_made(name, kind, url, options) for url in urls])
            return _made(name, kind, urls[0] if urls else path, options)
        if named and (fields := split_fields(cast(str, first))[1]):
            bare = split_fields(cast(str, first))[0]
            name, kind, reasons = _recognised(bare, kinds, named)
            if kind is not None:
                raise SourceError(
                    f"{shown} names {', '.join(fields)}, but {redact(bare)} ({name}) has no such "
                    "parts to choose from: give the path alone"
                )
    if not reasons:
        raise SourceError(f"no readers are installed: install dlio, {how_to_install('')}")
    remedy = "" if named else ": give a path, a list of paths, or a map-style data set of torch"
    raise SourceError(
        f"{shown} is not a data set that dlio can read ({'; '.join(reasons)}){remedy}"
    )


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


def _recognised(
    path: object, kinds: Sequence[tuple[str, Any]], named: bool
) -> tuple[str, Any, list[str]]:
    """Return name and class of the first reader that recognises a path, and why others do not."""
    reasons: list[str] = []
    for name, kind in kinds:
        single = named and path_rules_of(kind).one_path
        try:
            reason = kind.recognises(expand(cast(str, path))[0] if single else path)
        except SourceError as error:
            reason = str(error)
        if reason is None:
            return name, kind, reasons
        reasons.append(f"{name}: {reason}")
    return "", None, reasons


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
            raise UsageError(
                f"{option}=: the {name} reader, which reads {redact(str(path))}, has no such "
                f"option{nearest(option, [*own, *OPEN_ARGUMENTS])}"
            )
    options = {
        each: _fitting(each, value, known[each].annotation) for each, value in options.items()
    }
    if path_rules_of(kind).takes_objects:
        return kind(path, **options)
    with parsing(redact(str(path))):
        reader = kind(path, **options)
    if reader.format == "folder":
        warn_of_splits(reader.path, reader.classes)
    return reader


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
        raise UsageError(f"{named(name, value)}: give text")
    return value

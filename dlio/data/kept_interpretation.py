"""How a large local folder is understood, remembered until anything that was looked at changes.

To find the reader that fits a folder, and the files that it leaves out, all names in it are read.
Of a folder of many files that takes longer than to verify its cached index. So the answer is kept
in the cache, with the state of each folder and file that it was drawn from, and the words that were
told.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from dlio.data.index import Arrays, keep_index, peek_index
from dlio.data.interpretation import Interpretation, Kinds
from dlio.data.links import Looks, is_below, links_followed, noting, path_of_user, state_of
from dlio.util.printable import hearing, tell_once
from dlio.util.settings import settings

_KIND: Final = "understood"
_VERSION: Final = 1
_FROM: Final = 256
"""Names that are looked at; with fewer, there is little to be saved."""
_MOST_LOOKS: Final = 4096
"""Folders and files whose state is compared."""
_SETTLED_NS: Final = 2_000_000_000
"""A file that has changed this recently may change again without a new time."""


def understood(
    path: object,
    kinds: Kinds,
    split: str | None,
    options: dict[str, object],
    understand: Callable[[], Interpretation],
) -> Interpretation:
    """Return how a path is read: as it is remembered, or as `understand` says and raises."""
    if options or path_of_user() is None:
        return understand()
    formats = [(name, getattr(kind, "version", 0)) for name, kind in kinds]
    about = [version("dlio"), path, path_of_user(), split, links_followed(), settings().trust]
    key = json.dumps([*about, formats])
    kept = peek_index(_KIND, _VERSION, key)
    known = None if kept is None else _recalled(kept, dict(kinds))
    if known is not None:
        return known
    looks, began = Looks(), time.time_ns()
    with noting(looks), hearing() as heard:
        reading = understand()
    states = looks.states
    settled = all(
        state is None or max(state[-2:]) < began - _SETTLED_NS for state in states.values()
    )
    if looks.names >= _FROM and not looks.has_links and settled and len(states) <= _MOST_LOOKS:
        fields = {f.name: getattr(reading, f.name) for f in dataclasses.fields(reading)}
        del fields["kind"]
        head = {"reading": fields, "heard": heard, "states": states}
        keep_index(_KIND, _VERSION, key, {"head": np.frombuffer(_text(head), np.uint8)})
    return reading


def _text(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode()


def _recalled(kept: Arrays, kinds: dict[str, Any]) -> Interpretation | None:
    """Return a kept answer, and tell again what was told; None if something has changed since."""
    try:
        head = json.loads(kept["head"].tobytes())
        for place, state in head["states"].items():
            if state_of(place) != (None if state is None else tuple(state)):
                return None
        fields = head["reading"]
        if not _is_sound(fields, head["heard"]):
            return None
        reading = Interpretation(kind=kinds[fields["format"]], **fields)
        for text in head["heard"]:
            tell_once(text)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return reading


def _is_sound(fields: dict[str, Any], heard: object) -> bool:
    """True if a kept answer has values of the right types, and paths of what the user has named."""
    paths = fields["path"] if isinstance(fields["path"], list) else [fields["path"]]
    others, options = fields["others"], fields["options"]
    lists = [paths, heard, fields["left_out"], fields["doubts"], *others.values()]
    texts = [fields["words"], *([] if fields["split"] is None else [fields["split"]])]
    if not all(isinstance(each, list) for each in lists) or not isinstance(options, dict):
        return False
    texts += [text for each in lists for text in each]
    root = path_of_user()
    return (
        root is not None
        and all(isinstance(text, str) for text in texts)
        and all(is_below(os.path.abspath(path), root) for path in paths)
        and isinstance(fields["weight"], int | float)
    )

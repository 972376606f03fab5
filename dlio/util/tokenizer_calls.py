"""Calls of Hugging Face's fast tokenizers by code that makes samples.

Each call first sets how texts are padded and cut, in an object that threads would share: between
that and the encoding of one come the settings of others, and a checkpoint keeps the latest ones.
"""

import dis
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final

from dlio.util.called_code import codes_of

_SETS: Final = frozenset(
    "__call__ encode encode_plus batch_encode_plus _batch_encode_plus _encode_plus "
    "apply_chat_template prepare_seq2seq_batch tokenize set_truncation_and_padding enable_padding "
    "enable_truncation no_padding no_truncation".split()
)
"""Methods that set how a tokenizer pads and cuts."""
_LOADS: Final = frozenset("LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_CLASSDEREF".split())
_ATTRIBUTES: Final = frozenset("LOAD_METHOD LOAD_ATTR".split())
_SKIPPED: Final = frozenset("PRECALL PUSH_NULL CACHE EXTENDED_ARG NOP COPY_FREE_VARS".split())


def tokenizer_call(
    functions: Iterable[types.FunctionType], objects: Iterable[object]
) -> tuple[str, str] | None:
    """Return the first place, as `train.py:41`, where code calls a fast tokenizer or hands it on,
    and the tokenizer's name there; None if it does nowhere.

    `objects` are those that the functions may use as attributes of others.
    """
    if "transformers" not in sys.modules:
        return None
    attributes = {
        name
        for each in objects
        if not type(each).__module__.startswith("transformers.")
        for name, value in getattr(each, "__dict__", {}).items()
        if _is_tokenizer(value)
    }
    for function in functions:
        known = {**function.__globals__, **_closed_over(function)}
        for code in codes_of(function.__code__):
            for name, line in _calls(code, known, attributes):
                return f"{os.path.basename(code.co_filename)}:{line}", name
    return None


def _is_tokenizer(value: object) -> bool:
    """True for a tokenizer of transformers with a part in Rust, and a processor that has one."""
    held = getattr(value, "__dict__", {})
    if not any(each.__module__.startswith("transformers.") for each in type(value).__mro__):
        return False
    inner: Any = held.get("_tokenizer")
    return type(inner).__module__.startswith("tokenizers") or (
        "tokenizer" in held and _is_tokenizer(held["tokenizer"])
    )


def _closed_over(function: types.FunctionType) -> dict[str, object]:
    held: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
    return held


def _calls(
    code: types.CodeType, known: dict[str, Any], attributes: set[str]
) -> Iterator[tuple[str, int]]:
    """Yield name and line of each tokenizer that is called or handed on; not of those of which an
    attribute is read, as `pad_token_id`, or a method called that sets nothing, as `pad`."""
    name, line = "", code.co_firstlineno
    for each in dis.get_instructions(code):
        if each.opname in _SKIPPED:
            continue
        is_attribute = each.opname in _ATTRIBUTES
        if name and not (is_attribute and each.argval not in _SETS):
            yield name, line
        line = each.positions.lineno if each.positions and each.positions.lineno else line
        is_held = each.opname in _LOADS and _is_tokenizer(known.get(each.argval))
        name = each.argval if is_held or (is_attribute and each.argval in attributes) else ""

"""Headings and examples in the help of commands with many options."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])
_GROUPS: Final[dict[Callable[..., object], Mapping[str, Sequence[str]]]] = {}
_EXAMPLES: Final[dict[Callable[..., object], Sequence[str]]] = {}
_USUAL: Final[dict[Callable[..., object], Mapping[str, str]]] = {}
OTHERS: Final = "Other options"
"""Heading of the options that stand under no other, at the end."""


def with_help(
    *examples: str,
    groups: Mapping[str, Sequence[str]] | None = None,
    usual: Sequence[str | tuple[str, str]] = (),
) -> Callable[[_Function], _Function]:
    """Decorate a command's function with examples, command lines, and groups for its help: names of
    options, as fields of records, by the heading that they stand under, in the order of the help.
    Of a command with `usual` options, `--help` shows these alone, in their order: a field has its
    whole help, and a pair of a field and a line has that line, to which the default is added.
    """

    def decorate(function: _Function) -> _Function:
        _EXAMPLES[function] = examples
        _GROUPS[function] = groups or {}
        pairs = (each if isinstance(each, tuple) else (each, "") for each in usual)
        _USUAL[function] = dict(pairs)
        return function

    return decorate


def examples_of(function: Callable[..., object]) -> Sequence[str]:
    """Return the examples of a command."""
    return _EXAMPLES.get(function, ())


def groups_of(function: Callable[..., object]) -> Mapping[str, Sequence[str]]:
    """Return the options of a command by their headings, in the order of its help."""
    return _GROUPS.get(function, {})


def usual_of(function: Callable[..., object]) -> Mapping[str, str]:
    """Return the texts of the options that `--help` shows, by field; empty if it shows all."""
    return _USUAL.get(function, {})

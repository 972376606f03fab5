"""Headings and examples in the help of commands with many options."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])
_GROUPS: Final[dict[Callable[..., object], Mapping[str, Sequence[str]]]] = {}
_OTHERS: Final = "Other options"
_EXAMPLES: Final[dict[Callable[..., object], Sequence[str]]] = {}


def with_help(
    *examples: str, groups: Mapping[str, Sequence[str]] | None = None
) -> Callable[[_Function], _Function]:
    """Decorate a command's function with examples and headings for its help.

    Args:
        examples: command lines.
        groups: names of options, as fields of records, by the heading that they stand under, in the
            order of the help. Other options stand at the end.
    """

    def decorate(function: _Function) -> _Function:
        _EXAMPLES[function] = examples
        _GROUPS[function] = groups or {}
        return function

    return decorate


def examples_of(function: Callable[..., object]) -> Sequence[str]:
    """Return the examples of a command."""
    return _EXAMPLES.get(function, ())


def groups_of(function: Callable[..., object]) -> list[str]:
    """Return the headings of a command, in the order of its help."""
    groups = _GROUPS.get(function, {})
    return [*groups, _OTHERS] if groups else []


def group_of(function: Callable[..., object], name: str) -> str | None:
    """Return the heading of an option; None for a command without headings."""
    groups = _GROUPS.get(function, {})
    others = _OTHERS if groups else None
    return next((heading for heading, names in groups.items() if name in names), others)

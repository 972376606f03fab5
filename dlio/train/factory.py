"""Load and call users' factories, given as `module:factory(option=value)`."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar, cast

from dlio.errors import UsageError
from dlio.util.arguments import unknown_word

_PATTERN: Final = re.compile(r"([\w.\-/]+(?::\w+)?)(?:\((.*)\))?", re.DOTALL)
T = TypeVar("T")


def split_options(option: str, text: str) -> tuple[str, dict[str, object]]:
    """Split an option's value `name(width=64)` into `name` and its keyword arguments, literals all.

    Raises UsageError, which names the option, for any other form.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text}: give a name, or module:factory(option=value)")
    name, inside = match.groups()
    if not inside:
        return name, {}
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("only option=value may stand in the parentheses")
        values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UsageError(
            f"{option} {text}: give literals in the parentheses, such as width=64, "
            f"name='abc' ({error})"
        ) from error
    return name, values


def check_name(option: str, text: str, names: Sequence[str]) -> None:
    """Check `name(...)` or `module:factory(...)` without importing the module.

    Raises UsageError, which names the option, for a name that is not among `names`, or a module
    that does not exist.
    """
    name, _ = split_options(option, text)
    module, colon, _ = name.partition(":")
    if not colon:
        if name not in names:
            raise unknown_word(
                option, name, names, f"choose {', '.join([*names, 'module:factory'])}"
            )
        return
    folder = _add_current_folder()
    # The package's own __init__ may import anything, so only the first part is looked up.
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UsageError(
            f"{option} {name}: no module {module} is installed, and none lies in {folder}"
        )


def load_factory(option: str, name: str) -> Callable[..., object]:
    """Import `module:factory`, also from the current folder.

    Raises UsageError if the module or the factory does not exist.
    """
    module_name, _, attribute = name.partition(":")
    folder = _add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # The module exists; one of its own imports does not.
        raise UsageError(
            f"{option} {name}: no module {module_name} is installed, and none lies in {folder}"
        ) from error
    factory: Callable[..., object] | None = getattr(module, attribute, None)
    if not callable(factory):
        public = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise UsageError(
            f"{option} {name}: {module_name} has no callable {attribute}; it has "
            + (", ".join(sorted(public)[:8]) or "no callables")
        )
    return factory


def _add_current_folder() -> str:
    """Let the user's modules be imported from the current folder, and return it.

    It is searched last: files in it cannot stand in for modules that anything else imports.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    return folder


def call_with(
    option: str,
    name: str,
    factory: Callable[..., T],
    given: Mapping[str, object],
    offered: Iterable[tuple[Sequence[str], object]],
) -> T:
    """Call a factory with the user's options, and with the offered ones that it accepts.

    What is offered are pairs (names, value). The value is passed under the first name that is a
    parameter of the factory, or under the last one if the factory accepts any keyword.

    Raises UsageError, which names the option and the factory, if the arguments do not fit the
    factory's signature, or to the types that it is annotated with.
    """
    arguments = dict(given)
    signature = check_options(option, name, factory, given)
    if signature is not None:
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for names, value in offered:
            known = [each for each in names if each in parameters]
            if not set(names) & set(arguments) and (known or takes_any):
                if not known and len(names) == 1:
                    continue  # A name that only dlio knows.
                arguments[known[0] if known else names[-1]] = value
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise UsageError(f"{option} {name}{signature}: {error}") from error
    return factory(**arguments)


def check_options(
    option: str, name: str, factory: Callable[..., object], given: Mapping[str, object]
) -> inspect.Signature | None:
    """Check a user's options of a factory by its signature, without calling it; return that, None
    if it has none.

    Raises UsageError as `call_with` for a name that it lacks, and for a number or text where its
    annotation has another type.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return None
    try:
        signature.bind_partial(**given)
    except TypeError as error:
        raise UsageError(f"{option} {name}{signature}: {error}") from error
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError, AttributeError):
        hints = {}  # Annotations that only a type checker can read.
    for key, value in given.items():
        if key in hints and not _fits(value, hints[key]):
            wanted = inspect.formatannotation(hints[key])
            raise UsageError(f"{option} {name}{signature}: {key}={value!r} is not {wanted}")
    return signature


def _fits(value: object, annotation: object) -> bool:
    """Return False if an annotation of plain types, or of a union of them, excludes a value."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return any(_fits(value, each) for each in typing.get_args(annotation))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in (bool, str, type(None)):
        return isinstance(value, cast(type, annotation))
    return True

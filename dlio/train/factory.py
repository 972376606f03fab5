"""What users name as `module:factory(option=value)`: models and callbacks of their own."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dlio.errors import UsageError

_PATTERN: Final = re.compile(r"([\w.\-/]+(?::\w+)?)(?:\((.*)\))?", re.DOTALL)


def split_options(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """`name(width=64)` as `name` and its keyword arguments, which are literals.

    Raises UsageError, naming the command line's `option`, for anything else.
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
            raise ValueError("only option=value can stand in the brackets")
        values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UsageError(
            f"{option} {text}: what stands in the brackets is to be like width=64, "
            f"name='abc' ({error})"
        ) from error
    return name, values


def check_name(option: str, text: str, names: Sequence[str]) -> None:
    """Check `name(...)` or `module:factory(...)` without importing the module.

    Args:
        option: the option of the command line, for messages.
        names: names that may stand without a module.

    Raises UsageError for a name that is not among `names`, or a module that does not exist.
    """
    name, _ = split_options(option, text)
    module, colon, _ = name.partition(":")
    if not colon:
        if name not in names:
            raise UsageError(f"{option} {name}: choose {', '.join([*names, 'module:factory'])}")
        return
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # The package's own __init__ may import anything, so only the first part is looked up.
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UsageError(
            f"{option} {name}: there is no module {module}, neither installed nor in {folder}"
        )


def load_factory(option: str, name: str) -> Callable[..., Any]:
    """The `factory` of `module:factory`; modules of the current folder are found, too.

    Raises UsageError where there is none.
    """
    module_name, _, attribute = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # The module is there; something that it wants is not.
        raise UsageError(
            f"{option} {name}: there is no module {module_name}, neither installed nor in {folder}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise UsageError(
            f"{option} {name}: {module_name} has no {attribute} that can be called; it has "
            + (", ".join(sorted(public)[:8]) or "nothing that can")
        )
    made: Callable[..., Any] = found
    return made


def call_with(
    option: str, name: str, factory: Callable[..., Any], given: Mapping[str, Any], offered: Any
) -> Any:
    """Call a factory with the options that the user gave, and those offered ones that it names.

    Args:
        offered: (names, value) pairs; a factory gets the value by the first of the names that is
            a parameter of its, or, where it takes any keyword, by the last.

    Raises UsageError where it cannot be called so.
    """
    arguments = dict(given)
    try:
        signature = inspect.signature(factory)
    except ValueError:
        signature = None
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

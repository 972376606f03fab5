"""The table of commands and the cyclopts app that parses their options.

`dlio CMD` imports only the module of CMD. `dlio --help` reads the summaries from source files,
without importing them.
"""

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Annotated, Any, Final

from cyclopts import App, CycloptsError, Group, Parameter

from dlio import __version__
from dlio.cli.cli_command import SWITCHES, Command, CommandFunction, describe, is_command
from dlio.cli.help import TwoColumns
from dlio.cli.option_groups import examples_of, usual_of
from dlio.errors import DlioError, UsageError
from dlio.util.arguments import nearest
from dlio.util.input_files import read_text
from dlio.util.plugins import plugins
from dlio.util.units import counted

CORE: Final[Mapping[str, str]] = {
    "train": "dlio.cli.train_command:command",
    "launch": "dlio.cli.launch_command:command",
    "eval": "dlio.cli.eval:command",
    "run": "dlio.cli.run:command",
    "join": "dlio.cli.resize:join",
    "leave": "dlio.cli.resize:leave",
    "demo": "dlio.cli.demo:command",
    "ls": "dlio.cli.ls:command",
    "view": "dlio.cli.view:command",
    "cache": "dlio.cli.cache_command:GROUP",
    "ledger": "dlio.cli.ledger_command:command",
    "doctor": "dlio.cli.doctor.doctor_command:command",
    "top": "dlio.cli.top:command",
}
"""Import path of each core command's function."""
_USES: Final[Mapping[str, tuple[str, ...]]] = {
    "Data": ("ls", "view", "pack", "stage", "status", "verify", "evict", "pin", "cache"),
    "Train": ("train", "run", "eval", "export", "search", "demo"),
    "Measure": ("bench", "plan", "simulate", "ledger"),
    "Cluster": ("launch", "doctor", "top", "join", "leave"),
}
"""Commands by use, in the order of the help."""
_BRIEF_EXAMPLES: Final = 2
_HELP: Final = "Feed distributed deep learning from a deep memory hierarchy."


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """A command with sub-commands, such as `dlio bench`."""

    help: str
    commands: Mapping[str, str] = field(default_factory=dict)
    """Import path of each sub-command's function, `package.module:function`, by name."""


def places() -> dict[str, str]:
    """Return the import path of each command, core and plug-ins, by name."""
    plugged = {entry.name: entry.value for entry in plugins("dlio.commands")}
    return {**CORE, **dict(sorted(plugged.items()))}


def make_app(
    path: Sequence[str] | None = None, rest: Sequence[str] = (), brief: bool = True
) -> App:
    """Return the cyclopts app, whose help of a command with usual options is `brief`.

    Only the module of the command at `path`, such as `("bench", "loader")`, is imported; the other
    commands have a summary only. None loads all commands, for completion. The command passes on the
    arguments `rest` unchanged.
    """
    others = Group("Other", sort_key=len(_USES))
    app = _app(
        "dlio", _HELP, version=__version__, version_flags=["--version"], group_commands=others
    )
    app.register_install_completion_command(help="Install completion for the shell in use.")
    brief = brief and path is not None  # A shell completes all options.
    groups = {use: Group(use, sort_key=k) for k, use in enumerate(_USES)}
    uses = {name: groups[use] for use, names in _USES.items() for name in names}
    every = places()
    ordered = [*(name for name in uses if name in every), *(n for n in every if n not in uses)]
    for name in ordered:
        if path is None or list(path[:1]) == [name]:
            part = _loaded(name, every[name], None if path is None else path[1:], rest, brief)
        else:
            part = _app(name, "" if path else _summary(every[name]))
        part.group = uses.get(name, others)
        app.command(part, name=name)
    return app


def all_commands() -> Iterator[Command]:
    """Import and yield all commands whose options are records, including those of groups."""
    for name, place in places().items():
        loaded = resolve_name(place)
        if isinstance(loaded, CommandGroup):
            for inner, where in loaded.commands.items():
                yield Command(f"{name} {inner}", resolve_name(where))
        elif callable(loaded) and is_command(loaded):
            yield Command(name, loaded)


def find_command(tokens: Sequence[str]) -> Command | None:
    """Return the command that the first tokens name; None for a group or a foreign command.

    Raises UsageError for a command that a group does not have.
    """
    if not tokens or tokens[0] not in places():
        return None
    try:
        loaded = resolve_name(places()[tokens[0]])
    except Exception:
        return None  # Running the command reports the reason.
    if isinstance(loaded, CommandGroup):
        if len(tokens) < 2 or tokens[1].startswith("-"):
            return None
        if tokens[1] not in loaded.commands:
            close = nearest(tokens[1], loaded.commands)
            hint = close or f"; there are {', '.join(loaded.commands)}"
            raise UsageError(
                f"{tokens[0]} {tokens[1]}: no such command{hint} (`dlio {tokens[0]} --help`)"
            )
        return Command(" ".join(tokens[:2]), resolve_name(loaded.commands[tokens[1]]))
    return Command(tokens[0], loaded) if callable(loaded) and is_command(loaded) else None


def run_app(app: App, tokens: Sequence[str], command: Command | None = None) -> None:
    """Parse tokens and run the command that they name. Raises UsageError for a wrong option."""
    try:
        app(
            tokens,
            exit_on_error=False,
            print_error=False,
            verbose=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        fields = () if command is None else command.fields
        name = tokens[0] if command is None and tokens else getattr(command, "name", "")
        raise UsageError(describe(error, name, fields, tokens)) from error


def parse(command: Command, tokens: Sequence[str]) -> dict[str, object] | None:
    """Return the records of options of a command line, without the command's name, by parameter,
    without running the command; None if it asks for help, or for the configuration, which is
    printed.

    Raises UsageError for a wrong option.
    """
    records: dict[str, object] = {}

    @functools.wraps(command.function)
    def keep(**given: object) -> None:
        records.update(given)

    own, rest = command.split([token for token in tokens if token not in SWITCHES])
    run_app(_of_function(command.name, keep, rest, False), own, Command(command.name, keep))
    return records or None


def run_function(name: str, function: CommandFunction, tokens: Sequence[str]) -> None:
    """Run a command's function as a separate program, not as part of `dlio`.

    Prints an error in one line and exits with code 2.
    """
    command = Command(name, function)
    try:
        run_app(_of_function(name, function, (), False), tokens, command)
    except DlioError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _app(
    name: str,
    text: str,
    examples: Sequence[str] = (),
    hidden: str = "",
    arguments: Sequence[str] = (),
    **more: Any,
) -> App:
    return App(
        name=name,
        help=text,
        help_format="plaintext",
        help_formatter=TwoColumns(examples, hidden, arguments),
        help_flags=["--help", "-h"],
        **{"version_flags": [], **more},
    )


def _loaded(
    name: str, place: str, path: Sequence[str] | None, rest: Sequence[str], brief: bool
) -> App:
    """Return the app of one command, for an entry point of any kind."""
    try:
        loaded = resolve_name(place)
    except Exception as error:
        return _broken(name, place, error)
    if isinstance(loaded, App):
        return loaded
    if isinstance(loaded, CommandGroup):
        app = _app(name, loaded.help, group_commands=Group("Commands"))
        for inner, where in loaded.commands.items():
            if path is None or list(path[:1]) == [inner]:
                part = _of_function(f"{name} {inner}", resolve_name(where), rest, brief)
            else:
                part = _app(inner, "" if path else _summary(where))
            app.command(part, name=inner)
        return app
    if _is_typer(loaded):
        return _of_typer(name, loaded)
    return _of_function(name, loaded, rest, brief)


def _of_function(name: str, function: CommandFunction, rest: Sequence[str], brief: bool) -> App:
    text, examples = inspect.getdoc(function) or "", examples_of(function)
    hidden = ""
    if brief and usual_of(function):
        examples = examples[:_BRIEF_EXAMPLES]
        options = counted(len(Command(name, function).shown_fields), "option")
        hidden = f"`dlio {name} --help-all` shows all {options}"
    command = Command(name, function, brief)
    arguments: list[str] = []
    if is_command(function):
        positional = [each for each in command.fields if each.option.positional]
        arguments = [each.flag + "..." * each.many for each in positional]
    app = _app(name.rpartition(" ")[2], text, examples, hidden, arguments)
    app.default(command.callable(rest) if is_command(function) else function)
    return app


def _is_typer(loaded: object) -> bool:
    """True for a typer app, or a function whose options are declared with typer."""
    if type(loaded).__module__.partition(".")[0] == "typer":
        return True
    try:
        parameters = inspect.signature(loaded).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    marks = [*(each.default for each in parameters)]
    for each in parameters:
        marks += getattr(each.annotation, "__metadata__", ())
    return any(type(mark).__module__.startswith("typer.") for mark in marks)


def _of_typer(name: str, loaded: Any) -> App:
    import typer

    def run(*tokens: str) -> None:
        typer_app = loaded
        if not isinstance(loaded, typer.Typer):
            typer_app = typer.Typer(add_completion=False, rich_markup_mode=None)
            typer_app.command(name)(loaded)
        typer_app(args=list(tokens), prog_name=f"dlio {name}")

    text = inspect.getdoc(loaded) or "" if callable(loaded) else ""
    app = _app(name, text)
    app.help_flags = []
    run.__annotations__["tokens"] = Annotated[str, Parameter(allow_leading_hyphen=True)]
    app.default(run)
    return app


def _broken(name: str, place: str, error: Exception) -> App:
    """Return an app that reports why a command's module cannot be loaded."""

    def run(*tokens: str) -> None:  # noqa: ARG001 - whatever they are
        raise UsageError(
            f"the command {name} ({place}) cannot be loaded: {error}; install its package again"
        )

    app = _app(name, f"(cannot be loaded: {error})")
    run.__annotations__["tokens"] = Annotated[str, Parameter(allow_leading_hyphen=True)]
    app.default(run)
    return app


def _summary(place: str) -> str:
    """Return the first sentence of a command's description, without importing its module."""
    module, _, attribute = place.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {module!r}")
        if spec.origin is not None and spec.origin.endswith(".py"):
            tree = ast.parse(read_text(spec.origin))
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and node.name == attribute:
                    return _first_paragraph(ast.get_docstring(node))
        loaded = resolve_name(place)
    except Exception as error:
        return f"(cannot be loaded: {error})"
    if isinstance(loaded, CommandGroup):
        return loaded.help
    info = getattr(loaded, "info", loaded)  # A typer app keeps its help in `info`.
    return _first_paragraph(getattr(info, "help", None) or loaded.__doc__)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())

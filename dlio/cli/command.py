"""Create commands from functions whose parameters are frozen records of options.

    def command(shape: Shape, ranks: Ranks) -> None:
        \"\"\"First paragraph: the summary in lists of commands.\"\"\"

All options of the records become options of the command. cyclopts does the parsing, help and
completion; `dlio.util.options` converts and checks values, on the command line as in configuration
files.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Final

from dlio.cli.records import ConfigFile
from dlio.errors import UsageError
from dlio.util.options import Field, Value, nearest, options_of

__all__ = [
    "METAVARS",
    "Command",
    "CommandFunction",
    "default_of",
    "describe",
    "help_of",
    "is_command",
    "parameter_of",
]

CommandFunction = Callable[..., object]
"""A function whose parameters are records of options."""
METAVARS: Final[dict[type, str]] = {int: "INT", float: "FLOAT", str: "TEXT"}
"""Placeholders in the help for values of options that do not define one."""


def is_command(function: CommandFunction) -> bool:
    """True if all parameters of a function are records of options."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):
        return False
    names = inspect.signature(function).parameters
    return all(is_dataclass(hints.get(name)) and options_of(hints[name]) for name in names)


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name and the function that runs it."""

    name: str
    """Name after `dlio`, such as `train` or `bench loader`."""
    function: CommandFunction

    @property
    def records(self) -> dict[str, type]:
        """Types of the function's parameters, by their names."""
        hints = typing.get_type_hints(self.function)
        return {name: hints[name] for name in inspect.signature(self.function).parameters}

    @property
    def fields(self) -> tuple[Field, ...]:
        """All options of the command."""
        return tuple(field for record in self.records.values() for field in options_of(record))

    @property
    def help(self) -> str:
        """Description for the help."""
        return inspect.getdoc(self.function) or ""

    def run(self, given: Mapping[str, object], rest: Sequence[str] = ()) -> object:
        """Run the command with the options of a command line.

        Args:
            given: a text, a boolean or a sequence of texts for each field, by field name.
            rest: arguments for the field that takes the rest.

        Raises UsageError if a value is invalid or a required one is missing.
        """
        values: dict[str, Value] = {}
        for field in self.fields:
            if field.option.rest:
                values[field.name] = tuple(rest)
            elif field.name in given:
                values[field.name] = field.convert(given[field.name], field.flag)
        path = values.get("config")
        if ConfigFile in self.records.values() and isinstance(path, str):
            from dlio.cli.configfile import read_config

            values = {**read_config(path, self.config_fields), **values}
        arguments = {name: self._made(record, values) for name, record in self.records.items()}
        if any(isinstance(each, ConfigFile) and each.print_config for each in arguments.values()):
            from dlio.cli.configfile import config_text

            print(config_text(arguments.values()), end="")
            return None
        return self.function(**arguments)

    @property
    def config_fields(self) -> tuple[Field, ...]:
        """Options that may be set in a configuration file."""
        return tuple(field for field in self.fields if field.record is not ConfigFile)

    def _made(self, record: type, values: Mapping[str, Value]) -> object:
        own = options_of(record)
        for field in own:
            if field.required and field.name not in values:
                raise UsageError(f"{field.flag} is missing: `dlio {self.name} --help` describes it")
        return record(**{each.name: values[each.name] for each in own if each.name in values})

    def split(self, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split tokens into those of this command and those of the field that takes the rest."""
        if not any(field.option.rest for field in self.fields):
            return list(tokens), []
        flags = {field.flag for field in self.fields if field.type is bool}
        at = 0
        while at < len(tokens) and tokens[at].startswith("-") and tokens[at] != "--":
            word = tokens[at]
            joined = "=" in word or (word[1:2] != "-" and len(word) > 2)
            alone = word in flags or word.startswith("--no-") or word in ("--help", "-")
            at += 1 if joined or alone else 2
        return list(tokens[: at + 1]), list(tokens[at + 1 :])

    def callable(self, rest: Sequence[str] = ()) -> CommandFunction:
        """Return a function for cyclopts, with a parameter for each option."""

        def run(*positional: str, **given: object) -> object:
            names = [field.name for field in self.fields if field.option.positional]
            if names and repeated is not None:
                given[names[-1]] = positional[len(names) - 1 :]
            given.update(zip(names if repeated is None else names[:-1], positional, strict=False))
            if repeated is not None and not given[names[-1]]:
                del given[names[-1]]
            return self.run(given, rest)

        # Options that the command line leaves out may be in the configuration file.
        optional = ConfigFile in self.records.values()
        parameters = [
            parameter_of(field, required=field.required and not optional)
            for field in self.fields
            if not field.option.rest
        ]
        parameters.sort(key=lambda parameter: parameter.kind)
        repeated = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        run.__name__ = self.name.replace(" ", "_")
        run.__doc__ = self.help
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run


def parameter_of(field: Field, required: bool) -> inspect.Parameter:
    """Return the parameter that tells cyclopts to parse an option: as text, or as a switch."""
    from cyclopts import Parameter

    option = field.option
    kind: Any = inspect.Parameter.KEYWORD_ONLY
    hint: Any = bool if field.type is bool else str
    if option.positional:
        kind = inspect.Parameter.POSITIONAL_ONLY
        if field.many:
            kind = inspect.Parameter.VAR_POSITIONAL
    elif field.many:
        hint = tuple[str, ...]
    names = [field.flag, *([option.short] if option.short else [])]
    metavar = option.metavar or METAVARS.get(field.type)
    parameter = Parameter(
        name=names[0] if option.positional else names,
        help=help_of(field),
        metavar=metavar,
        choices=field.choices or None,
        show_choices=bool(field.choices),
        show_default=False,
        show=not option.hidden,
        required=required,
        negative=None if field.type is bool else (),
        allow_leading_hyphen=field.type in (int, float),
        allow_repeating=True,
        consume_multiple=False if field.many and not option.positional else None,
    )
    default: Any = inspect.Parameter.empty
    if kind is not inspect.Parameter.VAR_POSITIONAL and not required:
        default = None
        hint = hint | None  # Where pydantic is loaded, cyclopts compares defaults with types.
    return inspect.Parameter(
        field.name, kind, default=default, annotation=Annotated[hint, parameter]
    )


def help_of(field: Field) -> str:
    """Return the help of an option, with its unit and its default."""
    text = field.option.help
    if field.option.unit:
        text += f" [unit: {field.option.unit}]"
    default = default_of(field)
    return f"{text} [default: {default}]" if default else text


def default_of(field: Field) -> str:
    """Return an option's default as shown to users; empty if there is none."""
    if field.option.default_text is not None:
        return field.option.default_text
    if field.required or field.default in (None, (), False):
        return ""
    shown = field.show(field.default)
    return "yes" if shown is True else str(shown)


def describe(error: Exception, name: str, fields: Sequence[Field]) -> str:
    """Return the one-line message of an error that cyclopts raised for a command line."""
    from cyclopts import exceptions

    more = f" (`dlio {name} --help`)" if name else " (`dlio --help`)"
    argument = getattr(error, "argument", None)
    field = next((f for f in fields if argument is not None and f.flag == argument.name), None)
    if isinstance(error, exceptions.UnknownOptionError):
        word = (error.token.keyword or error.token.value).split("=")[0]
        flags = [each.flag for each in fields if not each.option.positional]
        return f"{word}: no such option{nearest(word, [*flags, '--help'])}{more}"
    if isinstance(error, exceptions.MissingArgumentError) and field is not None:
        if field.option.positional:
            return f"{field.flag} is missing{more}"
        return f"{field.flag}: a value is missing: {field.remedy}{more}"
    if isinstance(error, exceptions.CoercionError) and field is not None:
        value = "" if error.token is None else f" {error.token.value}"
        return f"{field.flag}{value}: {field.remedy}{more}"
    if isinstance(error, exceptions.UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or ())}: unexpected argument{more}"
    return " ".join(str(error).split()) + more

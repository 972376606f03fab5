"""Create commands from functions whose parameters are frozen records of options.

    def command(shape: Shape, ranks: Ranks) -> None:
        \"\"\"First paragraph: the summary in lists of commands.\"\"\"

All options of the records become options of the command. cyclopts does the parsing, help and
completion; `dlio.util.options` converts and checks values, on the command line as in configuration
files.
"""

import inspect
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from dlio.cli.option_groups import OTHERS, groups_of, usual_of
from dlio.cli.option_records import ConfigFile
from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.input_files import MOST_SETTINGS, read_text, yaml_value
from dlio.util.options import OptionField, Value, as_mapping, from_mapping, options_of

if TYPE_CHECKING:
    from cyclopts import Group, Parameter

CommandFunction = Callable[..., object]
"""A function whose parameters are records of options."""
SWITCHES: Final = {
    "--follow-links": (
        "DLIO_FOLLOW_LINKS",
        "Follow symbolic links that lead out of the data set's folder.",
    ),
    "--trust": (
        "DLIO_TRUST",
        "Read the data set without the guards against files that strangers made.",
    ),
}
"""Options of all commands that read data: the variable that ranks inherit, and the help. `dlio`
itself takes them."""
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
    brief: bool = False
    """True if the help shows the usual options alone, where the command has such."""

    @property
    def usual(self) -> Mapping[str, str]:
        """Texts of the options that a brief help shows, by field; empty if it shows all."""
        return usual_of(self.function) if self.brief else {}

    @property
    def records(self) -> dict[str, type]:
        """Types of the function's parameters, by their names."""
        hints = typing.get_type_hints(self.function)
        return {name: hints[name] for name in inspect.signature(self.function).parameters}

    @property
    def fields(self) -> tuple[OptionField, ...]:
        """All options of the command."""
        return tuple(field for record in self.records.values() for field in options_of(record))

    @property
    def shown_fields(self) -> tuple[OptionField, ...]:
        """Options that the whole help shows."""
        return tuple(each for each in self.fields if not (each.option.rest or each.option.hidden))

    @property
    def help(self) -> str:
        """Description for the help."""
        return inspect.getdoc(self.function) or ""

    def run(self, given: Mapping[str, object], rest: Sequence[str] = ()) -> object:
        """Run the command with a text, a boolean or a sequence of texts for each field that is
        given, and the arguments `rest` for the field that takes them.

        Raises UsageError if a value is invalid or a required one is missing.
        """
        values: dict[str, Value] = {}
        for field in self.fields:
            if field.option.rest:
                values[field.name] = tuple(rest)
            elif field.name in given:
                value = given[field.name]
                if value == "" or (isinstance(value, list | tuple) and "" in value):
                    # Of a variable of the shell that is not set, mostly.
                    raise UsageError(f"{field.flag}: the value is empty: {field.meaning}")
                values[field.name] = field.convert(value, field.flag)
        path = values.get("config")
        if ConfigFile in self.records.values() and isinstance(path, str):
            values = {**read_config(path, self.config_fields), **values}
        arguments: dict[str, object] = {}
        for name, record in self.records.items():
            for field in options_of(record):
                if field.required and field.name not in values:
                    stated = [(each.flag, given.get(each.name)) for each in self.fields]
                    more = f"{_taken(stated)} (`dlio {self.name} --help`)"
                    raise UsageError(missing(field, more))
                if field.name in values:
                    field.check(values[field.name])
            arguments[name] = from_mapping(record, values)
        if any(isinstance(each, ConfigFile) and each.print_config for each in arguments.values()):
            print(config_text(arguments.values()), end="")
            return None
        return self.function(**arguments)

    @property
    def config_fields(self) -> tuple[OptionField, ...]:
        """Options that may be set in a configuration file."""
        return tuple(field for field in self.fields if field.record is not ConfigFile)

    @property
    def reads_data(self) -> bool:
        """True if the command opens a data set that the user names."""
        names = ("SRC", "PATH", "SCRIPT", "DATA")
        return any(
            field.option.positional and field.flag in names for field in self.fields
        ) and self.name not in ("evict", "pin")

    def groups(self) -> "dict[str, Group]":
        """Return the heading of each option, by its field's name; empty without headings."""
        from cyclopts import Group

        if self.usual:
            return dict.fromkeys((each.name for each in self.fields), Group("Usual options"))
        groups = groups_of(self.function)
        if not groups:
            return {}
        made = {name: Group(name, sort_key=k) for k, name in enumerate([*groups, OTHERS])}
        by_field = {field: made[name] for name, fields in groups.items() for field in fields}
        return {field.name: by_field.get(field.name, made[OTHERS]) for field in self.fields}

    def split(self, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split tokens into those of this command and those of the field that takes the rest."""
        if not any(field.option.rest for field in self.fields):
            return list(tokens), []
        if any(field.option.after_dashes for field in self.fields):
            at = tokens.index("--") if "--" in tokens else len(tokens)
            return list(tokens[:at]), list(tokens[at + 1 :])
        flags = {*SWITCHES, *(field.flag for field in self.fields if field.type is bool)}
        at = 0
        while at < len(tokens) and tokens[at].startswith("-") and tokens[at] != "--":
            word = tokens[at]
            joined = "=" in word or (word[1:2] != "-" and len(word) > 2)
            alone = word in flags or word.startswith("--no-") or word in ("--help", "-h", "-")
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
        groups = self.groups()
        order = list(self.usual)
        fields = [field for field in self.fields if not field.option.rest]
        fields.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
        parameters = [
            parameter_of(
                field, field.required and not optional, groups.get(field.name), self.usual or None
            )
            for field in fields
        ]
        if self.reads_data and not self.usual:
            parameters += _switch_parameters(groups.get("source"))
        parameters.sort(key=lambda parameter: parameter.kind)
        repeated = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        run.__name__ = self.name.replace(" ", "_")
        run.__doc__ = self.help
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run


def parameter_of(
    field: OptionField,
    required: bool,
    group: "Group | None" = None,
    usual: Mapping[str, str] | None = None,
) -> inspect.Parameter:
    """Return the parameter by which cyclopts parses an option, as text or as a switch. Of `usual`
    options, the help shows these, with their texts."""
    from cyclopts import Parameter

    option = field.option
    is_whole = usual is None or usual.get(field.name) == ""
    kind: Any = inspect.Parameter.KEYWORD_ONLY
    hint: Any = bool if field.type is bool else str
    if option.positional:
        kind = inspect.Parameter.POSITIONAL_ONLY
        if field.many:
            kind = inspect.Parameter.VAR_POSITIONAL
    elif field.many:
        hint = tuple[str, ...]
    names = [field.flag, *([option.short] if option.short else [])]
    parameter = Parameter(
        name=names[0] if option.positional else names,
        help=help_of(field, "" if usual is None else usual.get(field.name, "")),
        metavar=option.metavar or METAVARS.get(field.type),
        choices=field.choices or None,
        show_choices=bool(field.choices) and is_whole,
        show_default=False,
        show=not option.hidden if usual is None else field.name in usual,
        required=required,
        negative=None if field.type is bool and not field.flag.startswith("--no-") else (),
        allow_leading_hyphen=field.type in (int, float),
        allow_repeating=True,
        consume_multiple=False if field.many and not option.positional else None,
    )
    default: Any = inspect.Parameter.empty
    if kind is not inspect.Parameter.VAR_POSITIONAL and not required:
        default = None
        hint = hint | None  # Where pydantic is loaded, cyclopts compares defaults with types.
    annotation = _annotated(hint, parameter, group)
    return inspect.Parameter(field.name, kind, default=default, annotation=annotation)


def _annotated(hint: Any, parameter: "Parameter", group: "Group | None") -> Any:
    """Annotate a type with its parameter, below a heading if there is one."""
    from cyclopts import Parameter

    if group is None:
        return Annotated[hint, parameter]
    return Annotated[hint, parameter, Parameter(group=(group,))]


def _switch_parameters(group: "Group | None") -> list[inspect.Parameter]:
    """Return the parameters that show `SWITCHES` in the help."""
    from cyclopts import Parameter

    made = []
    for name, (_, text) in SWITCHES.items():
        parameter = Parameter(name=name, help=text, show_default=False, negative=())
        made.append(
            inspect.Parameter(
                name.strip("-").replace("-", "_"),
                inspect.Parameter.KEYWORD_ONLY,
                default=False,
                annotation=_annotated(bool, parameter, group),
            )
        )
    return made


def help_of(field: OptionField, brief: str = "") -> str:
    """Return the help of an option with its default; its own text, with its unit, without a `brief`
    one."""
    text = brief or field.option.help
    if field.option.unit and not brief:
        text += f" [unit: {field.option.unit}]"
    default = default_of(field)
    return f"{text} [default: {default}]" if default else text


def default_of(field: OptionField) -> str:
    """Return an option's default as shown to users; empty if there is none."""
    if field.option.default_text is not None:
        return field.option.default_text
    if field.required or field.default is False or field.default in (None, ()):
        return ""
    shown = field.show(field.default)
    if isinstance(shown, list):
        return ", ".join(map(str, shown))
    return "yes" if shown is True else str(shown)


def missing(field: OptionField, more: str) -> str:
    """Return the message about a required option that is not there."""
    return f"{field.flag} is missing: {field.meaning}{more}"


def _stated(fields: Sequence[OptionField], tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options that take a value, as they are written, with the words they have taken."""
    names = {name for each in fields for name in (each.flag, each.option.short) if name}
    names -= {each.flag for each in fields if each.type is bool}
    parts = [word.partition("=") for word in tokens]
    return [
        (name, value if joined else next(iter(tokens[k + 1 :]), ""))
        for k, (name, joined, value) in enumerate(parts)
        if name in names
    ]


def _taken(stated: Iterable[tuple[str, object]]) -> str:
    """Return `; PATH is the value of --option` of an option whose value is a file or folder, which
    may be meant for an argument that is missing; an empty string if there is none."""
    paths = [(name, value) for name, value in stated if isinstance(value, str)]
    hints = [f"; {value} is the value of {name}" for name, value in paths if os.path.exists(value)]
    return hints[-1] if hints else ""


def describe(
    error: Exception, name: str, fields: Sequence[OptionField], tokens: Sequence[str] = ()
) -> str:
    """Return the one-line message of an error that cyclopts raised for a command line."""
    from cyclopts import exceptions

    more = f" (`dlio {name} --help`)" if name else " (`dlio --help`)"
    argument = getattr(error, "argument", None)
    field = next((f for f in fields if argument is not None and f.flag == argument.name), None)
    if isinstance(error, exceptions.UnknownOptionError):
        word = (error.token.keyword or error.token.value).split("=")[0]
        flags = [each.flag for each in fields if not each.option.positional]
        hint = nearest(word, [*flags, "--help"])
        if not hint and any(each.option.rest for each in fields):  # It may be the script's own.
            hint = _taken(_stated(fields, tokens))
        return f"{word}: no such option{hint}{more}"
    if isinstance(error, exceptions.MissingArgumentError) and field is not None:
        names = [each for each in (field.flag, field.option.short) if each in tokens]
        if field.option.positional or not names:
            return missing(field, f"{_taken(_stated(fields, tokens))}{more}")
        value = next(iter(tokens[tokens.index(names[0]) + 1 :]), "")
        if value.startswith("-") and value.split("=")[0] not in {each.flag for each in fields}:
            try:
                field.check(field.convert(value, field.flag))
            except UsageError as wrong:
                return f"{wrong}{more}"
            return f"{names[0]} {value}: write {field.flag}={value} if this is its value{more}"
        return f"{field.flag}: a value is missing: {field.meaning}{more}"
    if isinstance(error, exceptions.CoercionError) and field is not None:
        word = "" if error.token is None else error.token.value
        close = nearest(word, field.choices) if word else ""
        return f"{field.flag}{' ' if word else ''}{word}: {field.remedy}{close}{more}"
    if isinstance(error, exceptions.UnusedCliTokensError):
        unused = [*(error.unused_tokens or ())]
        at = len(tokens) - len(unused)
        path = " ".join(tokens[at - 1 :])
        if unused and at and [*tokens[at:]] == unused and os.path.exists(path):
            return f"{path}: quote a name with spaces, as in '{path}'{more}"
        return f"{' '.join(unused)}: unexpected argument{more}"
    return " ".join(str(error).split()) + more


def read_config(path: str, fields: Sequence[OptionField]) -> dict[str, Value]:
    """Return the values in a YAML file, by field name.

    Raises UsageError, naming the file and the key, for a file that cannot be read, a key that is
    not an option, or a value of another type.
    """
    try:
        text = read_text(path, MOST_SETTINGS)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--config {path}: cannot be read: {reason}") from error
    try:
        stated = yaml_value(text)
    except ValueError as error:
        raise UsageError(f"--config {path}: not valid YAML: {error}") from error
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise UsageError(f"--config {path}: give options as `name: value`, one a line")
    known = {field.key: field for field in fields}
    values = {}
    for key, value in cast(dict[object, object], stated).items():
        field = known.get(str(key).replace("-", "_"))
        if field is None:
            raise UsageError(f"{path}: {key}: no such option{nearest(str(key), known)}")
        where = f"{path}: {key}:"
        values[field.name] = field.convert(value, where)
        try:
            field.check(values[field.name])
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return values


def config_text(records: Iterable[object]) -> str:
    """Return the options of records as YAML, which `read_config` reads back."""
    import yaml

    stated = {
        field.key: field.show(values[field.name])
        for record in records
        if not isinstance(record, ConfigFile)
        for values in (as_mapping(record),)
        for field in options_of(type(record))
    }
    text: str = yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)
    return text

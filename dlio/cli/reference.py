"""Commands and environment variables as data, for generated documentation.

    from dlio.cli.reference import SETTINGS, commands

    for command in commands():
        print(command.name, command.summary)
        for option in command.options:
            print(option.names, option.metavar, option.default, option.help)

`SETTINGS` are the variables of the environment, see `dlio.util.settings.Setting`.
"""

from dataclasses import dataclass

from dlio.cli.app import all_commands
from dlio.cli.cli_command import METAVARS, Command, default_of
from dlio.util.options import OptionField


@dataclass(frozen=True, slots=True)
class OptionReference:
    """An option of a command."""

    names: tuple[str, ...]
    """`("--ranks", "-n")`, or the placeholder of a positional argument."""
    metavar: str
    """Placeholder of the value; empty for a switch."""
    default: str
    """Default as shown to users; empty if there is none."""
    help: str
    unit: str
    """Unit of the value; empty if it has none."""
    choices: tuple[str, ...]
    """Allowed values; empty if they are not a fixed list."""
    key: str
    """Name in a configuration file."""
    required: bool
    repeatable: bool
    positional: bool


@dataclass(frozen=True, slots=True)
class CommandReference:
    """A command of `dlio`."""

    name: str
    """Name after `dlio`, such as `train` or `bench loader`."""
    summary: str
    """First paragraph of the description."""
    description: str
    """All paragraphs, with a blank line between them."""
    options: tuple[OptionReference, ...]
    reads_config: bool
    """True if the command takes --config and --print-config."""


def commands() -> list[CommandReference]:
    """Return all commands that are installed, by name. Imports them, but not torch."""
    return sorted(map(_reference, all_commands()), key=lambda command: command.name)


def _reference(command: Command) -> CommandReference:
    paragraphs = [" ".join(each.split()) for each in command.help.split("\n\n")]
    options = tuple(_option(field) for field in command.fields if not field.option.hidden)
    reads_config = any(field.name == "print_config" for field in command.fields)
    return CommandReference(
        command.name, paragraphs[0], "\n\n".join(paragraphs), options, reads_config
    )


def _option(field: OptionField) -> OptionReference:
    option = field.option
    metavar = option.metavar or METAVARS.get(field.type, "")
    return OptionReference(
        names=(field.flag, *([option.short] if option.short else [])),
        metavar=metavar,
        default=default_of(field),
        help=option.help,
        unit=option.unit or "",
        choices=field.choices,
        key=field.key,
        required=field.required,
        repeatable=field.many,
        positional=option.positional or option.rest,
    )

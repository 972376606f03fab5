"""Generated reference pages: commands with their options, and environment variables."""

from collections.abc import Sequence

from dlio.cli.app import all_commands
from dlio.cli.cli_command import METAVARS, Command, default_of
from dlio.util.options import OptionField
from dlio.util.settings import SETTINGS

__all__ = ["commands_page", "environment_table", "options_by_command"]

_COMMON = ("--help",)


def environment_table() -> str:
    """Return a table of the variables in `dlio.util.settings.SETTINGS`."""
    rows = ["| variable | value | default | effect |", "|---|---|---|---|"]
    for each in SETTINGS:
        kind = each.type if each.unit is None else f"{each.type}, {each.unit}"
        default = each.default_text or _value_text(each.default)
        rows.append(f"| `{each.name}` | {kind} | {default} | {each.help} |")
    return "\n".join(rows)


def commands_page() -> str:
    """Return a section for each command: usage, description, arguments and options."""
    return "\n\n".join(map(_section, _commands()))


def options_by_command() -> dict[str, set[str]]:
    """Return the options of each command, as `dlio train` -> {"--epochs", ...}."""
    options = {
        "dlio": {"--version", "--debug", "--install-completion", *_COMMON},
        "dlio bench": {*_COMMON},
    }
    for command in _commands():
        names = {name for field in _shown(command) for name in _names(field)}
        negative = {f"--no-{name[2:]}" for name in names if name.startswith("--")}
        options[f"dlio {command.name}"] = {*names, *negative, *_COMMON}
    return options


def _commands() -> list[Command]:
    return sorted(all_commands(), key=lambda command: command.name)


def _shown(command: Command) -> list[OptionField]:
    return [field for field in command.fields if not field.option.hidden]


def _is_given(field: OptionField) -> bool:
    return field.option.positional or field.option.rest


def _names(field: OptionField) -> list[str]:
    return [field.flag, *([field.option.short] if field.option.short else [])]


def _section(command: Command) -> str:
    given = [field for field in _shown(command) if _is_given(field)]
    options = [field for field in _shown(command) if not _is_given(field)]
    usage = " ".join([f"dlio {command.name}", "[OPTIONS]", *map(_placeholder, given)])
    parts = [
        f"## dlio {command.name} {{#dlio-{command.name.replace(' ', '-')}}}",
        _escaped("\n\n".join(" ".join(each.split()) for each in command.help.split("\n\n"))),
        f"```text\n{usage}\n```",
    ]
    if given:
        parts.append(_list(given))
    if options:
        parts.append(_list(options))
    return "\n\n".join(parts)


def _list(options: Sequence[OptionField]) -> str:
    """Return a definition list: narrow screens show it as well as wide ones."""
    return "\n\n".join(f"{_heading(option)}\n:   {_help(option)}" for option in options)


def _metavar(field: OptionField) -> str:
    return field.option.metavar or METAVARS.get(field.type, "")


def _heading(field: OptionField) -> str:
    if _is_given(field):
        return f"`{_placeholder(field)}`"
    return ", ".join(f"`{f'{name} {_metavar(field)}'.strip()}`" for name in _names(field))


def _placeholder(field: OptionField) -> str:
    name = _metavar(field) or field.flag.lstrip("-").upper()
    name = f"{name}..." if field.many else name
    return name if field.required else f"[{name}]"


def _help(field: OptionField) -> str:
    parts = [field.option.help]
    if field.choices:
        parts.append(f"One of {', '.join(f'`{each}`' for each in field.choices)}.")
    if field.option.unit:
        parts.append(f"Unit: {field.option.unit}.")
    if field.many and "Repeatable" not in field.option.help:
        parts.append("Repeatable.")
    if field.required:
        parts.append("Required.")
    if default := default_of(field):
        parts.append(f"Default: {default}.")
    return _escaped(" ".join(parts))


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)

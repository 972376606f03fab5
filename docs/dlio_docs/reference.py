"""Generated reference pages: commands with their options, and environment variables."""

from collections.abc import Sequence

from dlio.cli.app import all_commands
from dlio.cli.command import Command
from dlio.util.options import Field
from dlio.util.settings import SETTINGS

__all__ = ["commands_page", "environment_table", "options_by_command"]

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}
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
    options = {"dlio": {"--version", "--debug", "--install-completion", *_COMMON}}
    options["dlio bench"] = {*_COMMON}
    for command in _commands():
        names = {name for field in command.fields for name in _names(field)}
        options[f"dlio {command.name}"] = {*names, *_COMMON}
    return options


def _commands() -> Sequence[Command]:
    return sorted(all_commands(), key=lambda command: command.name)


def _section(command: Command) -> str:
    shown = [field for field in command.fields if not field.option.hidden]
    given = [field for field in shown if field.option.positional or field.option.rest]
    usage = " ".join(
        [f"dlio {command.name}", "[OPTIONS]", *(_placeholder(field) for field in given)]
    )
    parts = [
        f"## dlio {command.name} {{#dlio-{command.name.replace(' ', '-')}}}",
        _described(command.help),
        f"```text\n{usage}\n```",
    ]
    if given:
        parts.append(_list(given))
    options = [field for field in shown if field not in given]
    if options:
        parts.append(_list(options))
    return "\n\n".join(parts)


def _list(fields: Sequence[Field]) -> str:
    """Return a definition list: narrow screens show it as well as wide ones."""
    return "\n\n".join(f"{_heading(field)}\n:   {_help(field)}" for field in fields)


def _heading(field: Field) -> str:
    if field.option.positional or field.option.rest:
        return f"`{_placeholder(field)}`"
    metavar = field.option.metavar or _METAVARS[field.type]
    return ", ".join(f"`{f'{name} {metavar}'.strip()}`" for name in _names(field))


def _names(field: Field) -> list[str]:
    names = [field.option.short] if field.option.short else []
    names.append(field.flag)
    if field.type is bool and field.default is True:
        names.append(f"--no-{field.flag[2:]}")
    return names


def _placeholder(field: Field) -> str:
    name = (field.option.metavar or field.name).upper()
    name = f"{name}..." if field.many or field.option.rest else name
    return name if field.required else f"[{name}]"


def _help(field: Field) -> str:
    parts = [field.option.help]
    if field.choices:
        parts.append(f"One of {', '.join(f'`{each}`' for each in field.choices)}.")
    if field.option.unit:
        parts.append(f"Unit: {field.option.unit}.")
    if field.many and "Repeatable" not in field.option.help:
        parts.append("Repeatable.")
    if field.required:
        parts.append("Required.")
    if field.option.default_text:
        parts.append(f"Default: {field.option.default_text}.")
    elif field.default not in (None, False, ()) and not field.required:
        parts.append(f"Default: `{_value_text(field.default)}`.")
    return " ".join(part.replace("<", "&lt;") for part in parts)


def _described(text: str) -> str:
    return text.replace("<", "&lt;")


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)

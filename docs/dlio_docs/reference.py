"""Generated reference pages: commands with their options, and environment variables."""

from collections.abc import Sequence

from dlio.cli.reference import CommandReference, OptionReference, commands
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
    return "\n\n".join(map(_section, commands()))


def options_by_command() -> dict[str, set[str]]:
    """Return the options of each command, as `dlio train` -> {"--epochs", ...}."""
    options = {
        "dlio": {"--version", "--debug", "--install-completion", *_COMMON},
        "dlio bench": {*_COMMON},
    }
    for command in commands():
        names = {name for option in command.options for name in option.names}
        negative = {f"--no-{name[2:]}" for name in names if name.startswith("--")}
        options[f"dlio {command.name}"] = {*names, *negative, *_COMMON}
    return options


def _section(command: CommandReference) -> str:
    given = [option for option in command.options if option.positional]
    options = [option for option in command.options if not option.positional]
    usage = " ".join([f"dlio {command.name}", "[OPTIONS]", *map(_placeholder, given)])
    parts = [
        f"## dlio {command.name} {{#dlio-{command.name.replace(' ', '-')}}}",
        _escaped(command.description),
        f"```text\n{usage}\n```",
    ]
    if given:
        parts.append(_list(given))
    if options:
        parts.append(_list(options))
    return "\n\n".join(parts)


def _list(options: Sequence[OptionReference]) -> str:
    """Return a definition list: narrow screens show it as well as wide ones."""
    return "\n\n".join(f"{_heading(option)}\n:   {_help(option)}" for option in options)


def _heading(option: OptionReference) -> str:
    if option.positional:
        return f"`{_placeholder(option)}`"
    return ", ".join(f"`{f'{name} {option.metavar}'.strip()}`" for name in option.names)


def _placeholder(option: OptionReference) -> str:
    name = option.metavar or option.names[0].lstrip("-").upper()
    name = f"{name}..." if option.repeatable else name
    return name if option.required else f"[{name}]"


def _help(option: OptionReference) -> str:
    parts = [option.help]
    if option.choices:
        parts.append(f"One of {', '.join(f'`{each}`' for each in option.choices)}.")
    if option.unit:
        parts.append(f"Unit: {option.unit}.")
    if option.repeatable and "Repeatable" not in option.help:
        parts.append("Repeatable.")
    if option.required:
        parts.append("Required.")
    if option.default:
        parts.append(f"Default: {option.default}.")
    return _escaped(" ".join(parts))


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)

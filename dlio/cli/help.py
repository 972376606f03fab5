"""Layout of the commands' help: plain text in two columns, wrapped to the terminal."""

import textwrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

_NAMES_WIDTH: Final = 28
"""Width of the column of names, in characters; longer names get a line of their own."""


class TwoColumns:
    """A help formatter of cyclopts that prints examples of command lines below the description."""

    def __init__(
        self, examples: "Sequence[str]" = (), more: str = "", arguments: "Sequence[str]" = ()
    ) -> None:
        self._examples = examples
        self._more = more
        """Last line of a help that does not show all options."""
        self._arguments = arguments
        """Names of the arguments, in order."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Print a panel: its title and one row per command or option."""
        if not panel.entries:
            return
        lines = [f"{panel.title}:"]
        is_option = panel.format == "parameter"
        labels = [_label(entry, is_option) for entry in panel.entries]
        names = min(_NAMES_WIDTH, max(map(len, labels)) + 2)
        for label, entry in zip(labels, panel.entries, strict=True):
            lines += _rows(label, entry, names, console.width)
        if self._more:
            lines += ["", self._more]
        self._print(console, "\n".join(lines))

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: object) -> None:
        """Print the usage line."""
        text = getattr(usage, "plain", str(usage)).strip()
        head, optional, _ = text.partition("[ARGS")  # cyclopts' word for all that are optional.
        if optional and self._arguments:
            required = head.split()
            text = head + " ".join(f"[{each}]" for each in self._arguments if each not in required)
        self._print(console, f"Usage: {text.removeprefix('Usage: ')}")

    def render_description(
        self, console: "Console", options: "ConsoleOptions", description: object
    ) -> None:
        """Print the description of a command."""
        text = _text(description)
        paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
        width = min(console.width, 100)
        wrapped = ["\n".join(_wrapped(each, width)) for each in paragraphs if each]
        if self._examples:
            wrapped.append("\n".join(["Examples:", *(f"  {line}" for line in self._examples)]))
        if wrapped:
            self._print(console, "\n\n".join(wrapped))

    def _print(self, console: "Console", text: str) -> None:
        console.print(f"{text}\n", highlight=False, markup=False, soft_wrap=True)


def _label(entry: "HelpEntry", is_option: bool) -> str:
    """Return the names of a command or an option, with its placeholder."""
    names = [*entry.positive_shorts, *entry.positive_names]
    if entry.positional_label:
        names = [entry.positional_label]
    if any(name.startswith("--no-") for name in entry.negative_names):
        names = [f"--[no-]{name[2:]}" if name.startswith("--") else name for name in names]
    label = ", ".join(names)
    if is_option and not entry.positional_label and entry.metavar:
        label += f" {entry.metavar}"
    return label


def _rows(label: str, entry: "HelpEntry", names: int, width: int) -> list[str]:
    text = _text(entry.description)
    if entry.choices:
        text += f" [one of: {', '.join(entry.choices)}]"
    if entry.required:
        text += " [required]"
    room = max(30, min(width, 100) - names - 2)
    rows = _wrapped(" ".join(text.split()), room) or [""]
    first = f"  {label}"
    indent = " " * (names + 2)
    if len(first) > names:
        return [first, *(f"{indent}{row}" for row in rows)]
    return [f"{first:<{names + 2}}{rows[0]}", *(f"{indent}{row}" for row in rows[1:])]


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text; values such as per-rank, which users copy, stay in one piece."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _text(renderable: object) -> str:
    """Return the plain text of what cyclopts hands a formatter."""
    if renderable is None:
        return ""
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=10_000, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())

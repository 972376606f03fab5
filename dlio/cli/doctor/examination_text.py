"""Findings as tables on a terminal."""

from typing import Final

from dlio.cli.doctor.examination import Examination
from dlio.comm.launch_environment import shows_terminal
from dlio.util.printable import printable

_STYLES: Final = {"ok": "green", "warning": "yellow", "error": "bold red"}
_MOST_NODES: Final = 4


def show(examination: Examination) -> None:
    """Print one line for each finding, remedies below them, and a last line that sums up."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=shows_terminal())
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    for each in examination["findings"]:
        text = Text(printable(each["text"]))
        if each["where"]:
            text.append(f"\non {_nodes(each['where'])}")
        if each["remedy"]:
            text.append(f"\n-> {printable(each['remedy'])}", style="bold")
        table.add_row(
            Text(each["state"], style=_STYLES[each["state"]]), printable(each["subject"]), text
        )
    console.print(table)
    counts = [
        f"{count} {state}{'s' if count > 1 else ''}"
        for state in ("error", "warning")
        if (count := sum(each["state"] == state for each in examination["findings"]))
    ]
    nodes, ranks = len(examination["nodes"]), examination["ranks"]
    print(f"{nodes} node(s), {ranks} rank(s): {', '.join(counts) or 'all is well'}")


def _nodes(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NODES])
    return f"{shown} and {len(names) - _MOST_NODES} more" if len(names) > _MOST_NODES else shown

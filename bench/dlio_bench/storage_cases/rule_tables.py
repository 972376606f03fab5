"""Rules of MLPerf Storage and their outcomes, as a table and for JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dlio_bench.storage_cases.rules import DISCLAIMER, Check, Outcome

_STYLES: Final[dict[Outcome, str]] = {
    "passed": "green",
    "failed": "red",
    "unknown": "yellow",
    "not applicable": "dim",
}


def rules_table(checked: Mapping[str, Sequence[Check]], title: str | None = None) -> Table:
    """Return a row for each rule; the caption says that this is not a result of MLPerf.

    Args:
        checked: checks by what was run, such as loaders: the same rules, in the same order.
        title: of the table.
    """
    table = Table(
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        caption=DISCLAIMER,
        caption_justify="left",
    )
    table.add_column("rule")
    for name in checked:
        table.add_column(escape(name))
    table.add_column("wanted")
    table.add_column("source", no_wrap=True)
    for row in zip(*checked.values(), strict=True):
        outcomes = (f"[{_STYLES[each.outcome]}]{each.outcome}[/]" for each in row)
        cells = [
            f"{outcome}: {escape(each.measured)}"
            for outcome, each in zip(outcomes, row, strict=True)
        ]
        table.add_row(row[0].rule, *cells, row[0].wanted, row[0].source)
    return table


def rules_as_json(checks: Iterable[Check]) -> dict[str, object]:
    """Return the checks for a report, with the sentence that they are not a result of MLPerf."""
    return {"disclaimer": DISCLAIMER, "checks": [asdict(each) for each in checks]}

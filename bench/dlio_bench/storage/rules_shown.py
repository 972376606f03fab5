"""Rules of MLPerf Storage and their outcomes, as a table and for JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dlio_bench.storage.rules import DISCLAIMER, Check

__all__ = ["rules_as_json", "rules_table"]

_STYLES: Final = {"passed": "green", "failed": "red", "unknown": "yellow"}


def rules_table(checks: Iterable[Check]) -> Table:
    """Return a row for each rule; the caption says that this is not a result of MLPerf."""
    table = Table(box=SIMPLE_HEAD, caption=DISCLAIMER, caption_justify="left")
    for title in ("rule", "", "measured", "wanted", "source"):
        table.add_column(title, no_wrap=title in ("", "source"))
    for each in checks:
        style = _STYLES.get(each.outcome, "dim")
        outcome = f"[{style}]{each.outcome}[/]"
        table.add_row(each.rule, outcome, each.measured, each.wanted, each.source)
    return table


def rules_as_json(checks: Iterable[Check]) -> dict[str, object]:
    """Return the checks for a report, with the sentence that they are not a result of MLPerf."""
    return {"disclaimer": DISCLAIMER, "checks": [asdict(each) for each in checks]}

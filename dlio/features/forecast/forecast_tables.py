"""Output of `dlio plan`: forecasts as text, as a table and as a plot."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlio.util.plot_files import picture
from dlio.util.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dlio.features.forecast.forecast_analysis import ForecastFigures


def show_forecast(figures: "ForecastFigures") -> None:
    """Print the forecast of one job, one line per figure."""
    print(
        f"{figures['samples']:,} samples, {format_bytes(figures['bytes'])}; "
        f"{figures['nodes']:,} nodes, {figures['ranks']:,} ranks of {figures['batch_size']}: "
        f"{figures['steps']:,} steps an epoch, mode {figures['mode']}"
    )
    held = figures["held_bytes"] / max(1, figures["bytes"])
    rows = [
        ("in tiers", f"{format_bytes(figures['held_bytes'])} of the data, {held:.0%}"),
        (
            "between nodes",
            f"{format_bytes(figures['moved_bytes'])} an epoch, "
            f"{figures['moved_share']:.2%} of the bytes",
        ),
        (
            "a node's link",
            f"{format_bytes(figures['link_bytes_out_max'])} out, "
            f"{format_bytes(figures['link_bytes_in_max'])} in, at most",
        ),
        (
            "messages",
            f"{figures['messages']:,} in {figures['windows']:,} windows; a rank has at most "
            f"{figures['peers']:,} peers",
        ),
        (
            "memory",
            f"{format_bytes(figures['window_bytes'])} of messages a rank and window, at most",
        ),
        ("from the source", f"{format_bytes(figures['source_bytes'])} in each later epoch"),
    ]
    for name, line in (
        ("first epoch", figures["first_epoch"]),
        ("later epochs", figures["later_epoch"]),
    ):
        rows.append(
            (
                name,
                f"{format_seconds(line['seconds'])}, first batch after "
                f"{format_seconds(line['first_batch_s'])}, waiting {line['stall_share']:.1%}; "
                f"most in use: {line['bottleneck']} ({line['busy'][line['bottleneck']]:.0%})",
            )
        )
    for name, text in rows:
        print(f"  {name:<16} {text}")
    for remedy in figures["remedies"]:
        print(remedy)


def show_sweep(rows: Sequence["ForecastFigures"]) -> None:
    """Print forecasts for several numbers of nodes as a table, one row each."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in (
        "nodes",
        "steps",
        "in tiers",
        "moved",
        "source",
        "first epoch",
        "later",
        "waits",
    ):
        table.add_column(column, justify="right")
    table.add_column("most in use")
    for row in rows:
        later = row["later_epoch"]
        table.add_row(
            f"{row['nodes']:,}",
            f"{row['steps']:,}",
            f"{row['held_bytes'] / max(1, row['bytes']):.0%}",
            f"{row['moved_share']:.2%}",
            format_bytes(row["source_bytes"]),
            format_seconds(row["first_epoch"]["seconds"]),
            format_seconds(later["seconds"]),
            f"{later['stall_share']:.1%}",
            later["bottleneck"],
        )
    Console(width=max(110, Console().width)).print(table)


def draw_sweep(rows: Sequence["ForecastFigures"], path: str) -> None:
    """Plot times and shares against the number of nodes, into a PNG or SVG file."""
    with picture(path) as pyplot:
        nodes = [row["nodes"] for row in rows]
        figure, (times, shares) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 7))
        for name, epochs in (
            ("first epoch", [row["first_epoch"] for row in rows]),
            ("later epochs", [row["later_epoch"] for row in rows]),
        ):
            times.plot(nodes, [epoch["seconds"] for epoch in epochs], marker="o", label=name)
        times.set_ylabel("seconds an epoch")
        times.set_yscale("log")
        shares.plot(nodes, [row["moved_share"] for row in rows], marker="o", label="moved")
        shares.plot(
            nodes,
            [row["source_bytes"] / max(1, row["bytes"]) for row in rows],
            marker="o",
            label="from the source",
        )
        shares.plot(
            nodes, [row["later_epoch"]["stall_share"] for row in rows], marker="o", label="waiting"
        )
        shares.set_ylabel("share of the bytes, or of the time")
        shares.set_xlabel("nodes")
        shares.set_xscale("log", base=2)
        for axes in (times, shares):
            axes.legend()
            axes.grid(True, alpha=0.3)
        job = rows[0]
        figure.suptitle(
            f"{job['samples']:,} samples, {format_bytes(job['bytes'])}, mode {job['mode']}"
        )

"""Scaling as tables, figures, curves and waterfalls."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dlio_bench.results.report_values import Figure, PlotCurve, Waterfall
from dlio_bench.training.forecast_check import Cell
from dlio_bench.training.scaling_measurements import ScalingMeasurements


def show_scaling(cells: Sequence[Cell], console: Console) -> None:
    """Print a table per network and scaling: exchanges as columns, ranks as rows."""
    for network, scaling in dict.fromkeys((each.network, each.scaling) for each in cells):
        group = [each for each in cells if (each.network, each.scaling) == (network, scaling)]
        names = list(dict.fromkeys(each.exchange for each in group))
        console.print(
            f"{network}, {scaling} scaling: ms of a step, and efficiency; ~ in italics: forecast",
            highlight=False,
        )
        table = Table(
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for head in ("ranks", "batch", *names):
            table.add_column(head, justify="right", overflow="fold")
        for p in sorted({each.ranks for each in group}):
            row = {each.exchange: each for each in group if each.ranks == p}
            first = next(iter(row.values()))
            style = "italic" if first.is_forecast else ""
            label = f"~{p:,}" if first.is_forecast else f"{p:,}"
            texts = (_text(row[name]) for name in names)
            table.add_row(label, f"{first.batch_size:g}", *texts, style=style)
        console.print(table)


def _text(cell: Cell) -> str:
    ahead = "~" if cell.is_forecast else ""
    return f"{ahead}{1e3 * cell.step_s:,.4g}\n{100 * cell.efficiency:.0f}%"


def show_checks(cells: Iterable[Cell], console: Console) -> None:
    """Print the forecast next to the measurement, where both exist."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for head in ("network", "scaling", "exchange"):
        table.add_column(head)
    for head in ("ranks", "forecast, ms", "measured, ms", "least", "most", "error, %"):
        table.add_column(head, justify="right")
    for cell in cells:
        if cell.error is None or cell.forecast_s is None:
            continue
        table.add_row(
            cell.network,
            cell.scaling,
            cell.exchange,
            f"{cell.ranks}",
            f"{1e3 * cell.forecast_s:,.4g}",
            f"{1e3 * cell.step_s:,.4g}",
            f"{1e3 * min(cell.measured_s):,.4g}",
            f"{1e3 * max(cell.measured_s):,.4g}",
            f"{100 * cell.error:+.1f}",
        )
    if table.rows:
        console.print("Forecast from one and two ranks, next to the measurement:")
        console.print(table)


def figures(cells: Iterable[Cell]) -> Iterator[Figure]:
    """Yield step times, throughput, efficiency, and errors of the forecast."""
    for cell in cells:
        labels = _labels(cell)
        ahead = cell.is_forecast
        times = cell.measured_s or (cell.step_s,)
        rates = tuple(cell.ranks * cell.batch_size / each for each in times)
        alone = cell.cores * cell.alone_batch / cell.alone_s
        yield Figure("step", "ms", tuple(1e3 * each for each in times), labels, "lower", ahead)
        yield Figure("throughput", "samples/s", rates, labels, "higher", ahead)
        shares = tuple(100 * rate / alone for rate in rates)
        yield Figure("efficiency", "%", shares, labels, "higher", ahead)
        if cell.error is not None and cell.forecast_s is not None:
            ms = 1e3 * cell.forecast_s
            yield Figure("step, forecast from two ranks", "ms", (ms,), labels, "", True)
            yield Figure("error of the forecast", "%", (100 * cell.error,), labels, "", True)


def _labels(cell: Cell) -> dict[str, str]:
    return {
        "network": cell.network,
        "scaling": cell.scaling,
        "exchange": cell.exchange,
        "ranks": str(cell.ranks),
    }


def curves(cells: Sequence[Cell]) -> Iterator[PlotCurve]:
    """Yield throughput against ranks, measured and forecast apart."""
    keys = dict.fromkeys((each.network, each.scaling, each.exchange) for each in cells)
    for network, scaling, exchange in keys:
        group = [
            each
            for each in cells
            if (each.network, each.scaling, each.exchange) == (network, scaling, exchange)
        ]
        for ahead in (False, True):
            points = [each for each in group if each.is_forecast == ahead]
            if points:
                yield PlotCurve(
                    f"{network}, {scaling} scaling",
                    "scaling",
                    "ranks",
                    "samples/s",
                    tuple(float(each.ranks) for each in points),
                    tuple(each.samples_per_s for each in points),
                    {"exchange": exchange},
                    ahead,
                )


def waterfalls(measured: ScalingMeasurements) -> Iterator[Waterfall]:
    """Yield the parts of a step at each point measured, medians of the rounds."""
    for point, times in measured.times.items():
        parts = {
            name: statistics.median([each[name] for each in times.parts_s])
            for name in times.parts_s[0]
        }
        labels = {
            "network": point.network,
            "ranks": str(point.ranks),
            "batch": str(point.batch_size),
            "exchange": point.exchange,
        }
        yield Waterfall("step", parts, labels)

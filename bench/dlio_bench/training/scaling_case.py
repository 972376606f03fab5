"""`--case scaling`: steps on more and more ranks, measured and forecast."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dlio.util.cores import available_cores
from dlio.util.units import counted
from dlio_bench.results.report_values import Figure, PlotCurve, Results, Waterfall
from dlio_bench.results.terminal import console, table
from dlio_bench.training.forecast_check import Cell, cells, link_between_nodes
from dlio_bench.training.scaling_measurements import ScalingMeasurements
from dlio_bench.training.scaling_measurements import measure as measure_steps
from dlio_bench.training.training_options import TrainingBenchOptions


def measure(options: TrainingBenchOptions, results: Results) -> None:
    """Measure all numbers of ranks, forecast the others, and add both to the results."""
    measured = measure_steps(options)
    steps = list(cells(options, measured))
    show_scaling(steps)
    show_checks(steps)
    results.figures += figures(steps)
    results.curves += curves(steps)
    results.waterfalls += waterfalls(measured)
    cores = available_cores()
    link = link_between_nodes(options, measured)
    results.notes += [
        f"{counted(cores, 'core')}; a rank computes with one thread. On more ranks than cores, "
        "ranks take "
        "turns, and efficiency is relative to the cores.",
        "The forecast is made from one and two ranks and from links alone. With more ranks than "
        f"measured, each has a core of its own, on nodes of {options.per_node}: messages within a "
        f"node as in memory here, between nodes {1e6 * link.alpha_s:.3g} µs and "
        f"{1e-9 / link.beta_s:.3g} GB/s. It knows no stragglers and no contention in the network.",
    ]
    errors = [abs(cell.error) for cell in steps if cell.error is not None]
    if errors:
        results.notes.append(
            f"Forecast against measurement: {sum(each <= 0.15 for each in errors)} of "
            f"{len(errors)} within 15 %, the largest error {max(errors):.1%}."
        )
    results.details = {
        **results.details,
        "cores": cores,
        "links": {name: asdict(each) for name, each in measured.links.items()},
        "crowding": [
            {"network": network, "batch_size": size, "ratios": ratios}
            for (network, size), ratios in measured.crowding.items()
        ],
        "parameters": {name: size // 4 for name, (size, _) in measured.sizes.items()},
    }


# Tables, figures, curves and waterfalls


def show_scaling(cells: Sequence[Cell]) -> None:
    """Print a table per network and scaling: exchanges as columns, ranks as rows."""
    for network, scaling in dict.fromkeys((each.network, each.scaling) for each in cells):
        group = [each for each in cells if (each.network, each.scaling) == (network, scaling)]
        names = list(dict.fromkeys(each.exchange for each in group))
        console().print(
            f"{network}, {scaling} scaling: ms of a step, and efficiency; ~ in italics: forecast",
            highlight=False,
        )
        drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for head in ("ranks", "batch", *names):
            drawn.add_column(head, justify="right", overflow="fold")
        for p in sorted({each.ranks for each in group}):
            row = {each.exchange: each for each in group if each.ranks == p}
            first = next(iter(row.values()))
            style = "italic" if first.is_forecast else ""
            label = f"~{p:,}" if first.is_forecast else f"{p:,}"
            texts = (_text(row[name]) for name in names)
            drawn.add_row(label, f"{first.batch_size:g}", *texts, style=style)
        console().print(drawn)


def _text(cell: Cell) -> str:
    ahead = "~" if cell.is_forecast else ""
    return f"{ahead}{1e3 * cell.step_s:,.4g}\n{100 * cell.efficiency:.0f}%"


def show_checks(cells: Iterable[Cell]) -> None:
    """Print the forecast next to the measurement, where both exist."""
    rows = [
        (
            *(cell.network, cell.scaling, cell.exchange),
            f"{cell.ranks}",
            f"{1e3 * cell.forecast_s:,.4g}",
            f"{1e3 * cell.step_s:,.4g}",
            f"{1e3 * min(cell.measured_s):,.4g}",
            f"{1e3 * max(cell.measured_s):,.4g}",
            f"{100 * cell.error:+.1f}",
        )
        for cell in cells
        if cell.error is not None and cell.forecast_s is not None
    ]
    headings = ("network", "scaling", "exchange", "ranks", "forecast, ms")
    measured = ("measured, ms", "least", "most", "error, %")
    if rows:
        title = "Forecast from one and two ranks, next to the measurement:"
        table(title, (*headings, *measured), rows, left=3)


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
    groups: dict[tuple[str, str, str, bool], list[Cell]] = {}
    for each in cells:
        key = (each.network, each.scaling, each.exchange, each.is_forecast)
        groups.setdefault(key, []).append(each)
    for (network, scaling, exchange, ahead), points in groups.items():
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

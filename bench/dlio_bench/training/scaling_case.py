"""`--case scaling`: steps on more and more ranks, measured and forecast."""

from dataclasses import asdict

from rich.console import Console

from dlio.util.cores import available_cores
from dlio.util.progress_bar import ProgressBar
from dlio_bench.results.report_values import Results
from dlio_bench.training.forecast_check import cells, link_between_nodes
from dlio_bench.training.scaling_measurements import measure as measure_steps
from dlio_bench.training.scaling_tables import (
    curves,
    figures,
    show_checks,
    show_scaling,
    waterfalls,
)
from dlio_bench.training.training_options import TrainingBenchOptions


def measure(options: TrainingBenchOptions, results: Results, console: Console) -> None:
    """Measure all numbers of ranks, forecast the others, and add both to the results."""
    with ProgressBar(transient=True, to_stderr=True) as bar:
        measured = measure_steps(options, bar)
    steps = list(cells(options, measured))
    show_scaling(steps, console)
    show_checks(steps, console)
    results.figures += figures(steps)
    results.curves += curves(steps)
    results.waterfalls += waterfalls(measured)
    cores = available_cores()
    link = link_between_nodes(options, measured)
    results.notes += [
        f"{cores} cores; a rank computes with one thread. On more ranks than cores, ranks take "
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

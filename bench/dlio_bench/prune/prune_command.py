"""`dlio bench prune`: the command and its cases."""

import os
import pkgutil
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions
from dlio.data.reader import open_reader
from dlio.util.options import CheckedOptions, Option
from dlio.util.whole_files import check_writable
from dlio_bench.prune.curves import TrainingCurve, draw
from dlio_bench.prune.prune_options import PruneBenchOptions
from dlio_bench.results.envelope import begin, finish, save
from dlio_bench.results.figure_collection import results_of
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.report_values import PlotCurve as Points
from dlio_bench.results.report_values import Results
from dlio_bench.results.terminal import show, working

CASES: Final[dict[str, str]] = {
    "images": "dlio_bench.prune.images:measure",
    "tabular": "dlio_bench.prune.tabular:measure",
    "rows": "dlio_bench.prune.tabular:measure_rows",
    "samples": "dlio_bench.prune.samples:measure",
}
"""Cases by name, and the functions that measure them. They are imported when they run: --help
needs no torch."""
_WITHOUT_IMAGES: Final = "tabular", "rows"
_VERSIONS: Final = ("dlio", "torch", "torch-pruning", "numpy")


@dataclass(frozen=True, slots=True)
class PruneCases(CheckedOptions):
    """Cases to measure."""

    case: Annotated[
        tuple[str, ...],
        Option(
            "Case to measure. Repeatable.",
            choices=tuple(CASES),
            default_text="all; tabular and rows without SRC",
        ),
    ] = ()


@with_help(
    usual=(
        *("source", "val", "case", "ranks", "seeds", "epochs", "tolerance"),
        *("image_size", "keep", "plot", "report"),
    ),
)
def command(options: PruneBenchOptions, cases: PruneCases, output: OutputOptions) -> None:
    """Measure the pruning of neurons and the skipping of samples while a network trains.

    Time, accuracy and size are compared with a training that keeps everything, and with simpler
    ways to remove as much.
    """
    wanted = cases.case or (tuple(CASES) if options.source else _WITHOUT_IMAGES)
    for name in wanted:
        if name not in _WITHOUT_IMAGES:
            options.check_images(name)
    for path in filter(None, (options.source, options.val)):
        open_reader(path).close()  # What is wrong with it is said before ranks start.
    start = begin(output)
    if options.plot is not None:
        check_writable("--plot", options.plot)
    report: dict[str, Any] = {
        "benchmark": "prune",
        "options": asdict(options),
        "machine": describe_machine(_VERSIONS),
    }
    for name in wanted:
        with working(f"prune, {name}"):
            figures = pkgutil.resolve_name(CASES[name])(options)
        report[name] = figures
        show(name, figures)
        if options.plot is not None:
            root, ending = os.path.splitext(options.plot)
            path = options.plot if len(wanted) == 1 else f"{root}-{name}{ending}"
            curves = {
                variant: [TrainingCurve(**each) for each in those]
                for variant, those in figures["raw"].items()
            }
            draw(curves, f"dlio bench prune --case {name}", path)
        # Figures so far stay, if a later case fails.
        save(output, _results(report, options), start)
    finish(output, _results(report, options), start)


def _results(report: dict[str, Any], options: PruneBenchOptions) -> Results:
    results = results_of("prune", report, settings=asdict(options))
    for name in CASES:
        for variant, runs in report.get(name, {}).get("raw", {}).items():
            results.curves += [
                Points(
                    f"{name}: held-out accuracy",
                    "time",
                    "s of training",
                    "held out, %",
                    tuple(run["seconds"]),
                    tuple(100 * each for each in run["accuracy"]),
                    {"variant": variant, "seed": str(seed)},
                )
                for seed, run in enumerate(runs)
            ]
    return results

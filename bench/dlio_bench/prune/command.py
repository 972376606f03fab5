"""`dlio bench prune`: the command and its cases."""

import json
import os
import pkgutil
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from dlio.cli.records import Output
from dlio.util.files import check_writable, write_json
from dlio.util.options import Option, check
from dlio_bench.exchange.command import show
from dlio_bench.prune.curves import Curve
from dlio_bench.prune.drawing import draw
from dlio_bench.prune.options import Options

__all__ = ["CASES", "Cases", "command"]

CASES: Final[dict[str, str]] = {
    "images": "dlio_bench.prune.images:measure",
    "tabular": "dlio_bench.prune.tabular:measure",
    "rows": "dlio_bench.prune.rows:measure",
    "samples": "dlio_bench.prune.images:measure_samples",
}
"""Cases by name, and the functions that measure them. They are imported when they run: --help
needs no torch."""
_WITHOUT_IMAGES: Final = "tabular", "rows"
_VERSIONS: Final = ("dlio", "torch", "torch-pruning", "numpy")


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases to measure."""

    case: Annotated[
        tuple[str, ...],
        Option(
            "Case to measure. Repeatable.",
            choices=tuple(CASES),
            default_text="all; tabular and rows without SRC",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)


def command(options: Options, cases: Cases, output: Output) -> None:
    """Measure the pruning of neurons and the skipping of samples while a network trains.

    Time, accuracy and size are compared with a training that keeps everything, and with simpler
    ways to remove as much.
    """
    from dlio_bench.results.environment import describe_machine

    wanted = cases.case or (tuple(CASES) if options.source else _WITHOUT_IMAGES)
    for name in wanted:
        if name not in _WITHOUT_IMAGES:
            options.check_images(name)
    output.check_writable()
    if options.plot is not None:
        check_writable("--plot", options.plot)
    report: dict[str, Any] = {
        "benchmark": "prune",
        "options": asdict(options),
        "machine": describe_machine(_VERSIONS),
    }
    for name in wanted:
        report[name] = figures = pkgutil.resolve_name(CASES[name])(options)
        show(name, figures)
        if options.plot is not None:
            root, ending = os.path.splitext(options.plot)
            path = options.plot if len(wanted) == 1 else f"{root}-{name}{ending}"
            curves = {
                variant: [Curve(**each) for each in those]
                for variant, those in figures["raw"].items()
            }
            draw(curves, f"dlio bench prune --case {name}", path)
        if output.report is not None:
            # Figures so far stay, if a later case fails.
            write_json(output.report, report)
    if output.as_json:
        print(json.dumps(report))

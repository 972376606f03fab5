"""The command, and its cases."""

import json
import os
import pkgutil
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from dlio.errors import UsageError
from dlio.util.files import check_writable, write_json
from dlio_bench.exchange.command import show
from dlio_bench.prune.curves import Curve
from dlio_bench.prune.drawing import draw
from dlio_bench.prune.options import Options

CASES: Final[dict[str, str]] = {
    "images": "dlio_bench.prune.images:measure",
    "tabular": "dlio_bench.prune.tabular:measure",
    "rows": "dlio_bench.prune.rows:measure",
    "samples": "dlio_bench.prune.images:measure_samples",
}
"""Where each is; they load torch, which `--help` does not want."""
_WITHOUT_IMAGES: Final = "tabular", "rows"
_VERSIONS: Final = ("dlio", "torch", "torch-pruning", "numpy")


def command(
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="Training images.", show_default=False)
    ] = None,
    val: Annotated[str | None, typer.Option(help="Held-out images.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(CASES)}. Repeatable; without SRC, tabular and rows."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    epochs: Annotated[int | None, typer.Option(help="Instead of a case's own.", min=1)] = None,
    shrunk_epochs: Annotated[
        int | None,
        typer.Option(help="Of networks that are or become small, or leave rows out.", min=1),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Of networks before they are pruned.", min=2)
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Points of held-out accuracy.")] = 0.5,
    image_size: Annotated[int, typer.Option(min=32)] = 64,
    rows: Annotated[int | None, typer.Option(help="That perceptrons learn from.", min=1000)] = None,
    lr: Annotated[float, typer.Option(help="Adam's, of perceptrons.")] = 1e-3,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="For images.", min=1)] = 2,
    keep: Annotated[
        str | None,
        typer.Option(help="Folder of trainings' reports: an interrupted benchmark goes on."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            help="Draw accuracy against time, and layers, as .png or .svg; of several "
            "cases each with its name before the ending."
        ),
    ] = None,
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End in one line of JSON.")] = False,
) -> None:
    """Neurons removed while a network trains, and samples left out: time, accuracy and size beside
    a training that keeps all, and beside simpler ways to remove as many."""
    from dlio_bench.machine import describe_machine

    options = Options(
        source=source,
        val=val,
        ranks=ranks,
        seeds=seeds,
        epochs=epochs,
        shrunk_epochs=shrunk_epochs,
        width=width,
        tolerance=tolerance,
        image_size=image_size,
        rows=rows,
        lr=lr,
        keep=keep,
        plot=plot,
    )
    wanted = case or (list(CASES) if source else list(_WITHOUT_IMAGES))
    if wrong := [name for name in wanted if name not in CASES]:
        raise UsageError(f"--case {wrong[0]}: choose from {', '.join(CASES)}")
    for name in wanted:
        if name not in _WITHOUT_IMAGES:
            options.check_images(name)
    for option, path in (("--report", report), ("--plot", plot)):
        if path is not None:
            check_writable(option, path)
    found: dict[str, Any] = {
        "benchmark": "prune",
        "options": asdict(options),
        "machine": describe_machine(_VERSIONS),
    }
    for name in wanted:
        found[name] = told = pkgutil.resolve_name(CASES[name])(options)
        show(name, told)
        if plot is not None:
            root, ending = os.path.splitext(plot)
            path = plot if len(wanted) == 1 else f"{root}-{name}{ending}"
            curves = {
                variant: [Curve(**each) for each in those] for variant, those in told["raw"].items()
            }
            draw(curves, f"dlio bench prune --case {name}", path)
        if report is not None:
            write_json(report, found)  # What has been measured stays, if a later case fails.
    if as_json:
        typer.echo(json.dumps(found))

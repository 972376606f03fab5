"""`dlio bench loader`: loading alone, beside others' loaders, under its ceilings."""

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from dlio.errors import UsageError
from dlio.util.files import check_writable, write_json
from dlio_bench.contenders import CONTENDERS, Contender, missing
from dlio_bench.feeding import arrays, decoded, slow
from dlio_bench.task import Task

_RATIOS = {
    "dlio_over_torch": ("dlio", "torch"),
    "dlio_over_torch_floats": ("dlio", "torch_floats"),
    "dlio_over_ceiling": ("dlio", "ceiling"),
    "dlio_over_full_decode": ("dlio", "full_decode"),
    "dlio_over_ffcv": ("dlio", "ffcv"),
    "rows_over_torch": ("dlio_rows", "torch"),
    "rows_over_ffcv": ("dlio_rows", "ffcv"),
    "rows_over_full_decode": ("dlio_rows", "full_decode"),
    "dlio_256_over_ffcv_256": ("dlio_256", "ffcv_256"),
}
_USUAL = ("torch", "torch_floats", "ceiling", "full_decode", "dlio", "dlio_rows")


_CASES = ("pictures", "arrays", "slow", "decoded")


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    source: str
    image_size: int = 224
    batch_size: int = 64
    workers: int = 2
    repeats: int = 5
    contenders: tuple[str, ...] = _USUAL


def measure(case: Case) -> dict[str, Any]:
    """Passes over the data per contender, in turn within each repeat, each after one that
    is not timed.

    Every contender has a process of its own. `dlio` reads from its RAM tier, which its warm-up
    fills; the others from the page cache, to uint8 as dlio does, but for `torch_floats`, which
    ends in ToTensor, as most scripts do. `full_decode` decodes whole payloads that lie in memory,
    in as many threads, and resizes; `ceiling` does dlio's own decoding alone.
    Returns samples/s of each repeat, ratios of the same repeat's, seconds to a pass's first batch
    and each contender's memory, processes and threads.
    """
    import numpy as np

    from dlio.data.reader import open_reader
    from dlio_bench.machine import describe_machine, ratio, spread

    reader = open_reader(case.source)
    if reader.format != "folder":
        raise UsageError(f"{case.source} is packed: the yardstick reads class folders of images")
    files = [os.path.join(reader.path, reader.name(k)) for k in range(len(reader))]
    labels = np.asarray(reader.labels).tolist()
    samples, size = len(reader), int(reader.sizes.sum())
    reader.close()
    absent = {name: why for name in case.contenders if (why := missing(name)) is not None}
    rates: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    cold: dict[str, float] = {}
    footprint: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlio-bench-"))
        running: dict[str, Contender] = {}
        for name in case.contenders:
            if name in absent:
                continue
            folder = os.path.join(scratch, name)
            task = Task(files, labels, case.image_size, case.batch_size, case.workers, folder)
            try:
                running[name] = stack.enter_context(Contender(name, task))
                cold[name] = running[name].one_pass()["first_batch_s"]
                running[name].pause()
            except UsageError as error:
                absent[name] = str(error)
                running.pop(name, None)
        for repeat in range(case.repeats):
            order = list(running)
            for name in order if repeat % 2 == 0 else order[::-1]:
                # Its memory may have been taken away while others had their turn.
                running[name].one_pass()
                told = running[name].one_pass()
                running[name].pause()
                if not 0.99 * samples <= told["samples"] <= samples:
                    raise UsageError(f"{name} gave {told['samples']} of {samples} samples")
                rates.setdefault(name, []).append(told["samples"] / told["seconds"])
                first.setdefault(name, []).append(told["first_batch_s"])
        for name, contender in running.items():
            footprint[name] = contender.footprint()
    return {
        "benchmark": "loader",
        "case": asdict(case),
        "samples": samples,
        "bytes": size,
        "absent": absent,
        "samples_per_s": {
            name: {**spread(values), "all": values} for name, values in rates.items()
        },
        "cold_first_batch_s": {name: cold[name] for name in rates},
        "first_batch_s": {name: spread(values) for name, values in first.items()},
        "footprint": footprint,
        **{
            key: ratio(rates[mine], rates[other])
            for key, (mine, other) in _RATIOS.items()
            if mine in rates and other in rates
        },
        "machine": describe_machine(
            (
                *("dlio", "torch", "numpy", "pillow", "simplejpeg", "opencv-python-headless"),
                *("webdataset", "mosaicml-streaming", "litdata", "grain", "spdl", "ffcv"),
            )
        ),
    }


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Class folders of images.")],
    image_size: Annotated[int, typer.Option(help="Side of the crops.", min=1)] = 224,
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.", min=1)] = 64,
    workers: Annotated[int, typer.Option(help="Threads here, processes there.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Timed passes each.", min=1)] = 5,
    peers: Annotated[
        str,
        typer.Option(
            help=f"usual, all, or some of {', '.join(CONTENDERS)}, separated by commas; those "
            "that are not installed are left out."
        ),
    ] = "usual",
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="pictures; arrays: volumes of 2 MiB; slow: SRC behind a slow file system and a "
            "consumer of 200 images/s; decoded: a tier of decoded images. Repeatable."
        ),
    ] = None,
    folder: Annotated[str, typer.Option(help="For arrays, on the disk to be measured.")] = ".",
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End in one line of JSON.")] = False,
) -> None:
    """Loading alone: dlio from its RAM tier, torch's DataLoader with Pillow, other libraries'
    loaders where they are installed, and bare decoding loops. RandomResizedCrop and flip to uint8,
    without normalisation; torch also with ToTensor, as most scripts."""
    if report is not None:
        check_writable("--report", report)
    chosen = tuple(
        _USUAL if peers == "usual" else CONTENDERS if peers == "all" else peers.split(",")
    )
    unknown = [name for name in chosen if name not in CONTENDERS]
    if unknown:
        raise UsageError(f"--peers {unknown[0]}: choose from {', '.join(CONTENDERS)}")
    cases = case or ["pictures"]
    if wrong := [name for name in cases if name not in _CASES]:
        raise UsageError(f"--case {wrong[0]}: choose from {', '.join(_CASES)}")
    found: dict[str, Any] = {}
    if "pictures" in cases:
        found = measure(Case(source, image_size, batch_size, workers, repeats, chosen))
        _show(found, image_size, workers, repeats)
    if "arrays" in cases:
        found["arrays"] = arrays(folder, repeats, workers)
        for name, figures in found["arrays"].items():
            if isinstance(figures, dict):
                typer.echo(
                    f"arrays, {name}: {figures['dlio_MiB_per_s']['median']:,.0f} MiB/s; over a "
                    f"bare preadv loop: volumes {_told(figures['dlio_over_preadv'])}, bytes "
                    f"{_told(figures['dlio_over_bandwidth'])}"
                )
    if "slow" in cases:
        found["slow"] = slow(source, repeats, workers, batch_size)
        for name, value in found["slow"].items():
            typer.echo(f"slow, {name}: {_told(value, 3)}")
    if "decoded" in cases:
        found["decoded"] = decoded(source, repeats, workers, image_size, batch_size)
        for name, value in found["decoded"].items():
            told = f"{_told(value)}" if isinstance(value, dict) else value
            typer.echo(f"decoded, {name}: {told}")
    if report is not None:
        write_json(report, found)
    if as_json:
        typer.echo(json.dumps(found))


def _told(value: dict[str, float], digits: int = 2) -> str:
    median, least, most = (f"{value[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def _show(found: dict[str, Any], image_size: int, workers: int, repeats: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{found['samples']:,} images to {image_size} pixels, {workers} workers, "
        f"median of {repeats} (min to max)",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("loader")
    for column in ("samples/s", "first batch, s", "then, s", "PSS, MiB", "processes", "threads"):
        table.add_column(column, justify="right")
    for name, rate in found["samples_per_s"].items():
        space = found["footprint"][name]
        table.add_row(
            CONTENDERS[name][0],
            f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
            f"{found['cold_first_batch_s'][name]:.2f}",
            f"{found['first_batch_s'][name]['median']:.3f}",
            f"{space['pss_MiB']:,.0f}",
            f"{space['processes']}",
            f"{space['threads']}",
        )
    Console(width=max(120, Console().width)).print(table)
    for name, why in found["absent"].items():
        typer.echo(f"left out: {name} ({why})")
    for key in _RATIOS:
        if key in found:
            value = found[key]
            typer.echo(f"{key.replace('_over_', ' / ')}: {_told(value)}")

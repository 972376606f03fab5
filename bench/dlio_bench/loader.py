"""`dlio bench loader`: loading alone, compared with other loaders and with its ceilings."""

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from dlio.cli.records import Output
from dlio.errors import UsageError
from dlio.util.files import write_json
from dlio.util.options import Option, check
from dlio_bench.augment import augment, augment_lines
from dlio_bench.contenders import CONTENDERS, Contender, missing
from dlio_bench.feeding import arrays, decoded, slow
from dlio_bench.latent import mapstyle, shown
from dlio_bench.task import Task

__all__ = ["Case", "Choice", "command", "measure"]

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
_CASES = ("pictures", "arrays", "slow", "decoded", "mapstyle", "transforms")
_WITHOUT_SOURCE = ("arrays", "mapstyle", "transforms")


@dataclass(frozen=True, slots=True)
class Case:
    """A measurement of loaders; options of `dlio bench loader`."""

    source: Annotated[
        str,
        Option(
            "Class folders of images; not needed for the cases arrays, mapstyle and transforms.",
            positional=True,
            metavar="SRC",
        ),
    ] = ""
    image_size: Annotated[int, Option("Side of the square crops.", unit="pixels", least=1)] = 224
    batch_size: Annotated[int, Option("Samples of a batch.", unit="samples", least=1)] = 64
    workers: Annotated[
        int, Option("Decode threads of dlio, and worker processes of other loaders.", least=1)
    ] = 2
    repeats: Annotated[int, Option("Timed passes of each loader.", least=1)] = 5
    contenders: tuple[str, ...] = _USUAL


@dataclass(frozen=True, slots=True)
class Choice:
    """Cases and loaders to measure."""

    peers: Annotated[
        str,
        Option(
            f"Loaders to measure: usual, all, or some of {', '.join(CONTENDERS)}, separated by "
            "commas. Loaders that are not installed are left out.",
            metavar="NAMES",
        ),
    ] = "usual"
    case: Annotated[
        tuple[str, ...],
        Option(
            "pictures: images from RAM. arrays: volumes of 2 MiB. slow: SRC behind a slow file "
            "system, with a consumer of 200 images per second. decoded: a tier of decoded images. "
            "mapstyle: 512 samples of a map-style data set that takes 25 ms for each, without and "
            "with tiers. transforms: each of dlio.transforms in one thread, compared with Pillow. "
            "Repeatable.",
            choices=_CASES,
        ),
    ] = ("pictures",)
    folder: Annotated[
        str, Option("Folder for arrays, on the disk to measure.", metavar="FOLDER")
    ] = "."

    def __post_init__(self) -> None:
        check(self)

    def contenders(self) -> tuple[str, ...]:
        """Return the loaders to measure. Raises UsageError for an unknown one."""
        if self.peers in ("usual", "all"):
            return _USUAL if self.peers == "usual" else tuple(CONTENDERS)
        chosen = tuple(self.peers.split(","))
        if unknown := [name for name in chosen if name not in CONTENDERS]:
            raise UsageError(f"--peers {unknown[0]}: choose one of {', '.join(CONTENDERS)}")
        return chosen


def measure(case: Case) -> dict[str, object]:
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
                timed = running[name].one_pass()
                running[name].pause()
                if not 0.99 * samples <= timed["samples"] <= samples:
                    raise UsageError(f"{name} gave {timed['samples']} of {samples} samples")
                rates.setdefault(name, []).append(timed["samples"] / timed["seconds"])
                first.setdefault(name, []).append(timed["first_batch_s"])
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


def command(case: Case, choice: Choice, output: Output) -> None:
    """Measure loading alone, compared with torch's DataLoader and other libraries.

    dlio reads from its RAM tier, torch's DataLoader decodes with Pillow, and loops that only
    decode show the limit. All make random resized crops and flips as uint8, without normalisation;
    torch is also measured with ToTensor, as most scripts use it.
    """
    output.check_writable()
    needing = [name for name in choice.case if name not in _WITHOUT_SOURCE]
    if needing and not case.source:
        raise UsageError(f"--case {needing[0]}: name SRC, a folder of class folders of images")
    case, cases = replace(case, contenders=choice.contenders()), choice.case
    report: dict[str, Any] = {}
    if "pictures" in cases:
        report = measure(case)
        _show(report, case.image_size, case.workers, case.repeats)
    if "arrays" in cases:
        report["arrays"] = arrays(choice.folder, case.repeats, case.workers)
        for name, figures in report["arrays"].items():
            if isinstance(figures, dict):
                print(
                    f"arrays, {name}: {figures['dlio_MiB_per_s']['median']:,.0f} MiB/s; over a "
                    f"bare preadv loop: volumes {_median(figures['dlio_over_preadv'])}, bytes "
                    f"{_median(figures['dlio_over_bandwidth'])}"
                )
    if "slow" in cases:
        report["slow"] = slow(case.source, case.repeats, case.workers, case.batch_size)
        for name, value in report["slow"].items():
            print(f"slow, {name}: {_median(value, 3)}")
    if "decoded" in cases:
        report["decoded"] = decoded(
            case.source, case.repeats, case.workers, case.image_size, case.batch_size
        )
        for name, value in report["decoded"].items():
            print(f"decoded, {name}: {_median(value) if isinstance(value, dict) else value}")
    if "mapstyle" in cases:
        report["mapstyle"] = mapstyle(case.repeats, case.workers, case.batch_size)
        print("\n".join(shown(report["mapstyle"])))
    if "transforms" in cases:
        report["transforms"] = augment(case.repeats, case.image_size)
        print("\n".join(augment_lines(report["transforms"])))
    if output.report is not None:
        write_json(output.report, report)
    if output.as_json:
        print(json.dumps(report))


def _median(value: dict[str, float], digits: int = 2) -> str:
    median, least, most = (f"{value[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def _show(report: dict[str, Any], image_size: int, workers: int, repeats: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report['samples']:,} images to {image_size} pixels, {workers} workers, "
        f"median of {repeats} (min to max)",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("loader")
    for column in ("samples/s", "first batch, s", "then, s", "PSS, MiB", "processes", "threads"):
        table.add_column(column, justify="right")
    for name, rate in report["samples_per_s"].items():
        space = report["footprint"][name]
        table.add_row(
            CONTENDERS[name][0],
            f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
            f"{report['cold_first_batch_s'][name]:.2f}",
            f"{report['first_batch_s'][name]['median']:.3f}",
            f"{space['pss_MiB']:,.0f}",
            f"{space['processes']}",
            f"{space['threads']}",
        )
    Console(width=max(120, Console().width)).print(table)
    for name, why in report["absent"].items():
        print(f"left out: {name} ({why})")
    for key in _RATIOS:
        if key in report:
            value = report[key]
            print(f"{key.replace('_over_', ' / ')}: {_median(value)}")

"""`dlio bench loader`: loading alone, compared with other loaders and with its ceilings."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Final

import numpy as np

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions
from dlio.data.reader import open_reader
from dlio.errors import UsageError
from dlio.util.arguments import unknown_word
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import counted
from dlio_bench.bench_data import draw_pictures
from dlio_bench.loader_cases import arrays, augment, decoded, mapstyle, shown, slow
from dlio_bench.loader_cores import cores, show_cores
from dlio_bench.loader_rows import SMALL_BATCH, rows, show_rows
from dlio_bench.loader_small import show_small, small
from dlio_bench.peers.contender_table import CASES, CONTENDERS, RATIOS
from dlio_bench.peers.environments import missing
from dlio_bench.peers.process import ContenderProcess, race, start_contender
from dlio_bench.peers.standalone.runners.protocol import Task
from dlio_bench.race_report import (
    race_figures,
    race_ratios,
    show_absent,
    show_race,
    show_ratios,
)
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.figure_collection import collect, results_of
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.terminal import (
    advance,
    expect,
    show_figures,
    show_notes,
    working,
)

_USUAL = ("torch", "torch_floats", "ceiling", "full_decode", "dlio", "dlio_rows")
_CASES = (
    *("pictures", "arrays", "slow", "decoded", "mapstyle", "transforms"),
    *("rows", "small", "cores"),
)
_NEED_SOURCE = ("slow", "decoded")
_BATCH_SIZE = 64
_DRAWN = 400
"""Pictures that are drawn where no source is named."""


@dataclass(frozen=True, slots=True)
class LoaderCase:
    """A measurement of loaders; options of `dlio bench loader`."""

    source: Annotated[
        str,
        Option(
            "Class folders of images; needed for the cases slow and decoded.",
            positional=True,
            metavar="SRC",
            default_text="400 drawn pictures",
        ),
    ] = ""
    image_size: Annotated[int, Option("Side of the square crops.", unit="pixels", least=1)] = 224
    batch_size: Annotated[
        int | None,
        Option(
            "Samples of a batch.",
            unit="samples",
            least=1,
            default_text=f"{_BATCH_SIZE}; {SMALL_BATCH} for the cases rows, small and cores",
        ),
    ] = None
    workers: Annotated[
        int, Option("Decode threads of dlio, and worker processes of other loaders.", least=1)
    ] = 2
    repeats: Annotated[int, Option("Timed passes of each loader.", least=1)] = 5
    patience: Annotated[
        float,
        Option(
            "Time that a loader may take to prepare its data, or for a pass. It is ended then, and "
            "reported.",
            unit="seconds",
            above=0,
        ),
    ] = 600.0
    contenders: tuple[str, ...] = _USUAL


@dataclass(frozen=True, slots=True)
class LoaderChoice(CheckedOptions):
    """Cases and loaders to measure."""

    peers: Annotated[
        str,
        Option(
            f"Loaders to measure: usual, all, or some of {', '.join(CONTENDERS)}, separated by "
            "commas. Those that are not installed (dlio bench peers), or fail, are reported.",
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
            "rows: rows of 64 bytes, 1 and 3 kB and windows of 1,024 tokens, from a RAM tier, and "
            "packed in the page cache. small: JPEGs of 64 pixels to 32. cores: threads that sleep "
            "in place of decoding. Repeatable.",
            choices=_CASES,
        ),
    ] = ("pictures",)
    folder: Annotated[
        str, Option("Folder for arrays, on the disk to measure.", metavar="FOLDER")
    ] = "."
    samples: Annotated[
        int, Option("Rows of the case rows, or pictures of the case small.", least=10)
    ] = 20_000
    cores: Annotated[
        int,
        Option(
            "Cores that the case cores emulates, and most threads of dlio in the cases rows and "
            "small, next to 1 and 2.",
            least=1,
        ),
    ] = 16
    beside: Annotated[
        int,
        Option(
            "Measure the case small a second time, next to so many processes that spin: what the "
            "loaders keep of their fair share. That is samples/s there, over the samples that they "
            "make alone for each second of processor time, times the seconds that a process of as "
            "many threads, which only spin, gets there for each second.",
            unit="processes",
            least=0,
        ),
    ] = 0

    def contenders(self) -> tuple[str, ...]:
        """Return the loaders to measure. Raises UsageError for an unknown one."""
        if self.peers in ("usual", "all"):
            return _USUAL if self.peers == "usual" else tuple(CONTENDERS)
        chosen = tuple(self.peers.split(","))
        if unknown := [name for name in chosen if name not in CONTENDERS]:
            raise unknown_word("--peers", unknown[0], CONTENDERS)
        return chosen


def measure(case: LoaderCase) -> dict[str, object]:
    """Passes over the data per contender, in turn within each repeat, each after one that
    is not timed.

    Every contender has a process of its own. `dlio` reads from its RAM tier, which its warm-up
    fills; the others from the page cache. All give uint8 as dlio does, but for `torch_floats`,
    which ends in ToTensor, as most scripts do, and TurboLoader, which knows only floats. All give
    labels, and the multiset of labels of every pass is compared with the data's. `full_decode`
    decodes whole payloads that lie in memory, in as many threads, and resizes; `ceiling` does
    dlio's own decoding alone.
    Returns samples/s of each repeat, ratios of the same repeat's, milliseconds on processors for
    each sample (of all processes of a contender; a busy machine changes them less than rates),
    seconds to a pass's first batch, and each contender's memory, processes and threads. `absent`
    has the reasons of those that could not take part.
    """
    absent = {
        name: why
        for name in case.contenders
        if (kept := CONTENDERS[name].environment) and (why := missing(kept)) is not None
    }
    batch_size = case.batch_size or _BATCH_SIZE
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlio-bench-"))
        files, labels = _pictures(case.source or draw_pictures(scratch, _DRAWN, 10, 10)[0])
        size = sum(os.path.getsize(file) for file in files)
        starts: dict[str, Callable[[], ContenderProcess]] = {}
        for name in case.contenders:
            if name not in absent:
                folder = os.path.join(scratch, name)
                task = Task(files, labels, case.image_size, batch_size, case.workers, folder)
                starts[name] = partial(
                    start_contender, name, task, case.patience, CONTENDERS[name].environment
                )
        expect(len(starts) * (1 + case.repeats))
        outcome = race(starts, labels, case.repeats, advance)
    machine = describe_machine(
        ("dlio", "torch", "numpy", "pillow", "simplejpeg", "opencv-python-headless")
    )
    assert isinstance(machine["versions"], dict)
    machine["versions"].update(outcome.versions)
    figures = race_figures(outcome)
    return {
        "benchmark": "loader",
        "case": asdict(case),
        "samples": len(files),
        "bytes": size,
        "absent": {**absent, **outcome.absent},
        **figures,
        **race_ratios(figures, RATIOS),
        "machine": machine,
    }


def _pictures(source: str) -> tuple[list[str], list[int]]:
    """Files and labels of class folders. Raises UsageError for packed data."""
    with contextlib.closing(open_reader(source)) as reader:
        if reader.format != "folder":
            raise UsageError(f"{source} is packed: the yardstick reads class folders of images")
        files = [os.path.join(reader.path, reader.name(k)) for k in range(len(reader))]
        return files, np.asarray(reader.labels).tolist()


@with_help(
    usual=(
        "source",
        ("peers", "usual, all, or names such as torch,dlio"),
        *("workers", "repeats", "batch_size", "image_size"),
        ("case", "pictures, arrays, slow, decoded, mapstyle, transforms, rows, small or cores"),
        *("folder", "report", "as_json"),
    ),
)
def command(case: LoaderCase, choice: LoaderChoice, output: OutputOptions) -> None:
    """Measure loading alone, compared with torch's DataLoader and other libraries.

    dlio reads from its RAM tier, torch's DataLoader decodes with Pillow, and loops that only
    decode show the limit. All make random resized crops and flips as uint8, without normalisation;
    torch is also measured with ToTensor, as most scripts use it. Other libraries need environments
    of their own: dlio bench peers install.
    """
    start = begin(output)
    needing = [name for name in choice.case if name in _NEED_SOURCE]
    if needing and not case.source:
        raise UsageError(f"--case {needing[0]}: name SRC, a folder of class folders of images")
    case, cases = replace(case, contenders=choice.contenders()), choice.case
    report: dict[str, Any] = {}
    workers, repeats = case.workers, case.repeats
    batch_size = case.batch_size or _BATCH_SIZE
    small_batch = case.batch_size or SMALL_BATCH
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "pictures": lambda: measure(case),
        "arrays": lambda: arrays(choice.folder, repeats, workers),
        "slow": lambda: slow(case.source, repeats, workers, batch_size),
        "decoded": lambda: decoded(case.source, repeats, workers, case.image_size, batch_size),
        "mapstyle": lambda: mapstyle(repeats, workers, batch_size),
        "transforms": lambda: augment(repeats, case.image_size),
        "rows": lambda: rows(repeats, small_batch, choice.cores, choice.samples, case.patience),
        "small": lambda: small(
            repeats, small_batch, choice.cores, choice.samples, case.patience, choice.beside
        ),
        "cores": lambda: cores(repeats, small_batch, choice.cores),
    }
    for name in (name for name in measures if name in cases):
        with working(f"loader, {name}"):
            figures = measures[name]()
        if name == "pictures":
            report |= figures
            _show(figures, case.image_size, workers, repeats)
        else:
            report[name] = figures
            if name in _SHOW:
                _SHOW[name](figures)
                continue
            show_figures(name, *collect(figures))
            show_notes(shown(figures) if name == "mapstyle" else [])
    results = results_of(
        "loader",
        report,
        settings={**asdict(case), **asdict(choice)},
        paths=(choice.folder, *((case.source,) if case.source else ())),
    )
    finish(output, results, start)


_SHOW: Final[dict[str, Callable[[dict[str, object]], None]]] = {
    "rows": show_rows,
    "small": show_small,
    "cores": show_cores,
}
"""Cases with tables of their own."""


def _show(report: dict[str, Any], image_size: int, workers: int, repeats: int) -> None:
    for case, title in {**CASES, "": "limits"}.items():
        text = (
            f"{title}: {report['samples']:,} to {image_size} pixels, {counted(workers, 'worker')}, "
            f"median of {repeats} (min to max)"
        )
        titles = {name: each.title for name, each in CONTENDERS.items() if each.case == case}
        show_race(text, report, titles)
    show_absent(report)
    show_ratios(report, RATIOS)

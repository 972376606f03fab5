"""`dlio bench index`: the opening of data sets, side by side with other libraries.

Each opening is in a process of its own, which has opened a small data set of the format first. The
first opening of dlio builds its index, the second one has it in the cache. System calls are counted
by strace, between two marks, in a second run, as tracing takes time.
"""

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated, Final

import numpy as np
import simplejpeg

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.util.input_files import open_text
from dlio.util.options import CheckedOptions, Option
from dlio.util.printable import print_line
from dlio.util.units import counted, format_seconds
from dlio_bench.file_systems import check_scratch
from dlio_bench.peers.environments import missing, python_of, shared_environment
from dlio_bench.readers import write_mds
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.terminal import advance, expect, table, working

_TIMEOUT_S: Final = 3600.0
_SMALL: Final = 10
_MARK: Final = "/dlio-bench-opening"
_PICTURE: Final = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))


@dataclass(frozen=True, slots=True)
class _IndexContender:
    """A library that opens a data set: its name, imports, and the code that sets `count`."""

    name: str
    imports: str
    code: str
    environment: str = ""
    """Of `dlio bench peers`, if the library is not among dlio's packages."""

    def python(self) -> str | None:
        """Return the interpreter that has the library; None without one."""
        module = self.imports.split()[1].partition(".")[0]
        if find_spec(module) is not None:
            return sys.executable
        is_there = self.environment and missing(self.environment) is None
        return python_of(self.environment) if is_there else None


_DLIO: Final = _IndexContender(
    "dlio",
    "from dlio.data.reader import open_reader",
    "kept = open_reader(path); count = len(kept)",
)
_WALK: Final = "sum(len(files) for _, _, files in os.walk(path))"
_HUGGING_FACE: Final = "kept = datasets.load_dataset({}, split='train'); count = len(kept)"
_CONTENDERS: Final = {
    "folder": (
        _IndexContender("os.scandir", "import os", f"count = {_WALK}"),
        _IndexContender(
            "Hugging Face imagefolder",
            "import datasets",
            _HUGGING_FACE.format("'imagefolder', data_dir=path"),
        ),
    ),
    "tar": (
        _IndexContender(
            "tarfile", "import tarfile", "count = len(tarfile.open(path).getnames()) // 2"
        ),
        _IndexContender(
            "WebDataset, one pass",
            "import webdataset",
            "count = sum(1 for _ in webdataset.WebDataset(path, shardshuffle=False))",
            "webdataset",
        ),
    ),
    "csv": (
        _IndexContender(
            "pyarrow, table in memory",
            "import pyarrow.csv",
            "kept = pyarrow.csv.read_csv(path); count = len(kept)",
        ),
        _IndexContender(
            "Hugging Face csv", "import datasets", _HUGGING_FACE.format("'csv', data_files=path")
        ),
    ),
    "zarr": (
        _IndexContender(
            "zarr, chunks counted",
            "import zarr",
            "kept = zarr.open(path)['image']; kept.nchunks_initialized; count = kept.shape[0]",
        ),
    ),
    "mds": (
        _IndexContender(
            "Streaming",
            "import streaming",
            "kept = streaming.StreamingDataset(local=path, batch_size=1); count = len(kept)",
            "mosaic",
        ),
    ),
}
_CHILD: Final = """
import json, os, sys, threading, time
{imports}

def memory(*names):
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return [int(rows[name].split()[0]) * 1024 for name in names]

own, ended = [0], threading.Event()

def watch():
    while not ended.wait(0.005):  # The kernel keeps no peak of a process's own memory.
        own[0] = max(own[0], *memory("RssAnon"))

watching = threading.Thread(target=watch)
if {watches}:
    watching.start()
for path in sys.argv[1:]:  # A small data set first: libraries load parts of themselves with it.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, before_own = memory("VmRSS", "RssAnon")
    own[0] = before_own
    os.access("{mark}", 0)
    began, cpu = time.perf_counter(), time.process_time()
    {code}
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    os.access("{mark}", 0)
ended.set()
if {watches}:
    watching.join()
grown = [*(each - before for each in memory("VmHWM", "VmRSS")), own[0] - before_own]
print("\\n" + json.dumps([count, seconds, cpu, *grown]), flush=True)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class IndexBenchOptions(CheckedOptions):
    """The options of `dlio bench index`."""

    formats: Annotated[
        tuple[str, ...],
        Option("Format to measure. Repeatable.", name="format", choices=tuple(_CONTENDERS)),
    ] = tuple(_CONTENDERS)
    samples: Annotated[int, Option("Number of samples of each data set.", least=10)] = 10_000
    scratch: Annotated[
        str | None,
        Option("Folder for the data sets.", metavar="DIR", default_text="a temporary folder"),
    ] = None


@dataclass(frozen=True, slots=True)
class OpeningFigures:
    """An opening of a data set."""

    seconds: float
    cpu_s: float
    own_bytes: float
    """Growth of the process's own memory at its peak, for each sample: without pages of files."""
    peak_bytes: float
    """Growth of resident memory at its peak."""
    held_bytes: float
    """Growth of resident memory afterwards."""
    calls: int | None
    """System calls; None without strace."""


def measure(options: IndexBenchOptions, scratch: str) -> dict[str, dict[str, OpeningFigures | str]]:
    """Open a data set of each format with each library; returns the figures, or a reason why there
    are none, by library and by format. Raises UsageError if dlio fails."""
    figures: dict[str, dict[str, OpeningFigures | str]] = {}
    for name in options.formats:
        own = figures[name] = {}
        paths: list[str] = []
        for part, count in (("small", _SMALL), ("data", options.samples)):
            os.makedirs(f"{scratch}/{name}/{part}")
            paths.append(_WRITERS[name](f"{scratch}/{name}/{part}", count))
        expect(2 + len(_CONTENDERS[name]))
        for contender in _CONTENDERS[name]:
            advance(f"{name}: {contender.name}")
            python = contender.python()
            if python is None:
                where = f"dlio bench peers install {contender.environment}"
                hint = where if contender.environment else "pip install it"
                own[contender.name] = f"not installed: {hint}"
                continue
            try:
                own[contender.name] = _opened(contender, python, paths, options.samples, scratch)
            except UsageError as error:  # The others can be measured all the same.
                own[contender.name] = f"left out: {error}"
        for opening in ("first", "second"):
            advance(f"{name}: dlio, {opening} opening")
            again = opening == "second"
            made = _opened(_DLIO, sys.executable, paths, options.samples, scratch, again=again)
            own[f"dlio, {opening}"] = made
    return figures


def _opened(
    contender: _IndexContender,
    python: str,
    paths: Sequence[str],
    samples: int,
    scratch: str,
    *,
    again: bool = False,
) -> OpeningFigures:
    """Open data sets, of which the last is measured, with empty caches, or `again` with the caches
    of the opening before."""
    caches, trace = f"{scratch}/caches", f"{scratch}/trace"

    def run(*before: str) -> list[float]:
        code = _CHILD.format(
            imports=contender.imports,
            code=contender.code,
            mark=_MARK,
            watches=not before,  # Its calls are not the library's.
        )
        if not again:
            shutil.rmtree(caches, ignore_errors=True)
        os.makedirs(caches, exist_ok=True)
        command = [*before, python, "-c", code, *paths]
        return _answer(contender.name, command, python, caches)

    count, seconds, cpu_s, *memory = run()
    if count != samples:
        raise UsageError(
            f"{contender.name} opened {count:.0f} of the {counted(samples, 'sample')} of "
            f"{paths[-1]}"
        )
    calls = None
    if shutil.which("strace") is not None:
        run("strace", "-f", "-qq", "-o", trace)
        calls = _calls_of(trace)
    peak, held, own = (max(0.0, each) / samples for each in memory)
    return OpeningFigures(seconds, cpu_s, own, peak, held, calls)


def _answer(name: str, command: list[str], python: str, caches: str) -> list[float]:
    """Run an opening and return (samples, seconds, seconds on processors, bytes at
    the peak, bytes afterwards, own bytes at the peak)."""
    environment = {
        **os.environ,
        "DLIO_CACHE": f"{caches}/dlio",
        "HF_HOME": f"{caches}/hf",
        "HF_HUB_OFFLINE": "1",
        **(shared_environment() if python == sys.executable else {}),
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"{name} took more than {_TIMEOUT_S:.0f} s: give fewer --samples"
        ) from error
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"{name} exited with code {done.returncode}: {words[:300]}")
    answer: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _calls_of(trace: str) -> int | None:
    """Return the number of system calls between the last two marks in the lines of strace; None
    where another process did the work, which strace did not see."""
    with open_text(trace, errors="replace") as file:
        lines = [line for line in file if " resumed>" not in line]
    marks = [number for number, line in enumerate(lines) if _MARK in line]
    return marks[-1] - marks[-2] - 1 if len(marks) > 1 else None


def _folder(scratch: str, samples: int) -> str:
    for k in range(samples):
        os.makedirs(f"{scratch}/folder/{k % 10}", exist_ok=True)
        with open(f"{scratch}/folder/{k % 10}/{k:08d}.jpg", "wb") as file:
            file.write(_PICTURE)
    return f"{scratch}/folder"


def _tar(scratch: str, samples: int) -> str:
    with tarfile.open(f"{scratch}/a.tar", "w") as archive:
        for k in range(samples):
            for extension, data in (("cls", b"%d" % (k % 10)), ("jpg", _PICTURE)):
                member = tarfile.TarInfo(f"{k:08d}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return f"{scratch}/a.tar"


def _csv(scratch: str, samples: int) -> str:
    with open(f"{scratch}/a.csv", "w", encoding="ascii") as file:
        file.write("a,b,text,label\n")
        file.writelines(f"{k},{k / 7:.4f},row {k},{k % 10}\n" for k in range(samples))
    return f"{scratch}/a.csv"


def _zarr(scratch: str, samples: int) -> str:
    import zarr

    group = zarr.open_group(f"{scratch}/a.zarr", mode="w")
    array = group.create_array("image", shape=(samples, 4, 4), chunks=(1, 4, 4), dtype="u1")
    array[:] = 1
    return f"{scratch}/a.zarr"


def _mds(scratch: str, samples: int) -> str:
    return write_mds(scratch, itertools.repeat(_PICTURE, samples))


_WRITERS: Final[dict[str, Callable[[str, int], str]]] = {
    "folder": _folder,
    "tar": _tar,
    "csv": _csv,
    "zarr": _zarr,
    "mds": _mds,
}


def command(options: IndexBenchOptions, output: OutputOptions) -> None:
    """Measure the opening of data sets, side by side with other libraries.

    Figures are seconds, bytes of memory for each sample (the process's own at its peak, with pages
    of files, which processes of a node share, and all afterwards) and system calls. The first
    opening of dlio builds its index, the second one uses it. Each data set has small samples, and
    one file or chunk a sample in folder and Zarr.
    """
    if options.scratch is not None:
        check_scratch(options.scratch)
    start = begin(output)
    folder = tempfile.TemporaryDirectory(prefix="dlio-bench-", dir=options.scratch)
    with folder as scratch, working("index"):
        measured = measure(options, scratch)
    figures: list[Figure] = []
    rows = []
    for name, own in measured.items():
        for library, each in own.items():
            if isinstance(each, str):
                print_line(f"{name}: {library} is {each}")
                continue
            calls = "" if each.calls is None else f"{each.calls / options.samples:.3f}"
            memory = [
                f"{value:,.0f}" for value in (each.own_bytes, each.peak_bytes, each.held_bytes)
            ]
            rows.append((name, library, format_seconds(each.seconds), *memory, calls))
            labels = {"format": name, "library": library}
            values = [("time", "s", each.seconds), ("processor time", "s", each.cpu_s)]
            values.append(("own memory at its peak", "bytes/sample", each.own_bytes))
            values.append(("peak memory", "bytes/sample", each.peak_bytes))
            values.append(("held memory", "bytes/sample", each.held_bytes))
            if each.calls is not None:
                values.append(("system calls", "", each.calls))
            figures += [Figure(what, unit, (v,), labels, "lower") for what, unit, v in values]
    headings = ("format", "library", "time", "own bytes/sample", "peak", "held", "calls/sample")
    table(f"opening {counted(options.samples, 'sample')}", headings, rows, left=2)
    results = Results(
        "index",
        settings=asdict(options),
        figures=figures,
        paths=(options.scratch or tempfile.gettempdir(),),
    )
    finish(output, results, start)

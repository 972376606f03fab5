"""`dlio bench tiers`: how fast the places are that data is read from, for `dlio plan` and for
reads that have a choice."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import numpy as np

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import format_bytes, format_seconds
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.terminal import steps, table, working

_SAMPLE: Final = 100_000
_SMALL: Final = 4096
_PAGE: Final = 4096
_SECONDS: Final = 2.0
"""Each measurement takes about."""


def measure(read: Callable[[int, int], object], length: int, threads: int) -> dict[str, float]:
    """Random reads, `read(offset, count)`, from a place of `length` bytes, for about 2 x 2 s:
    seconds of a small one alone, and bytes a second of samples of 100 kB, `threads` at a time."""
    offsets = np.random.default_rng(0).integers(0, max(1, length - _SAMPLE), 1 << 16).tolist()
    small, ends = [], time.monotonic() + _SECONDS
    for offset in offsets:
        began = time.perf_counter()
        read(offset, min(_SMALL, length))
        small.append(time.perf_counter() - began)
        if time.monotonic() > ends:
            break
    count = min(_SAMPLE, length)
    began = time.monotonic()
    ends = began + _SECONDS

    def reader(first: int) -> int:
        done = 0
        for offset in offsets[first::threads]:
            read(offset, count)
            done += count
            if time.monotonic() > ends:
                break
        return done

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(reader, range(threads)))
    return {
        "latency_s": float(np.median(small)),
        "bytes_per_s": total / (time.monotonic() - began),
    }


def measure_tier(root: str, size: int, threads: int) -> dict[str, float]:
    """Rates of a folder on a disk or in memory: a file of `size` bytes is written, and read as it
    comes from the device, where the system lets its cache be emptied."""
    descriptor, path = tempfile.mkstemp(prefix=".dlio-bench-", dir=root)
    try:
        piece = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8).tobytes()
        for _ in range(max(1, size >> 20)):
            os.write(descriptor, piece)
        os.fsync(descriptor)
        length = os.fstat(descriptor).st_size

        def read(offset: int, count: int) -> None:
            with contextlib.suppress(OSError):
                # Whole pages, and the read-ahead of earlier ones.
                first = offset & -_PAGE
                os.posix_fadvise(descriptor, first, count + 2 * _PAGE, os.POSIX_FADV_DONTNEED)
            os.pread(descriptor, count, offset)

        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return measure(read, length, threads)
    except OSError as error:
        raise UsageError(f"{root} cannot be measured: {error.strerror}") from error
    finally:
        os.close(descriptor)
        os.unlink(path)


def measure_source(source: str, threads: int) -> dict[str, float]:
    """Rate of a data set: its samples, as its reader reads them."""
    from dlio.data.reader import open_reader

    with contextlib.closing(open_reader(source)) as reader:
        count = len(reader)
        mean = max(1, int(np.asarray(reader.sizes).mean()))
        smallest = int(np.argmin(reader.sizes))

        def read(offset: int, size: int) -> None:
            sample = smallest if size == _SMALL else (offset // mean) % count
            reader.read(np.array([sample], np.int64))

        return measure(read, int(np.asarray(reader.sizes).sum()), threads)


@dataclass(frozen=True, slots=True)
class TierBenchOptions(CheckedOptions):
    """The options of `dlio bench tiers`."""

    sources: Annotated[
        tuple[str, ...], Option("Data sets, or copies of one.", positional=True, metavar="SRC")
    ] = ()
    tiers: Annotated[
        str | None,
        Option("Tiers, such as ram:2GiB,/local/scratch:20GiB.", metavar="TIERS"),
    ] = None
    size: Annotated[
        str, Option("Size of the file that is written into each tier.", metavar="SIZE")
    ] = "256MiB"
    threads: Annotated[int, Option("Number of concurrent reads.", unit="threads", least=1)] = 4
    keep: Annotated[bool, Option("Remember the figures for this machine.")] = True


def command(options: TierBenchOptions, output: OutputOptions) -> None:
    """Measure the speed of tiers and sources.

    `dlio plan` uses the figures, and reads that can go to several copies of a source begin with
    the fastest.
    """
    from dlio.data.replicas import remember
    from dlio.storage.tier_spec import parse_tiers
    from dlio.util.units import parse_bytes

    start = begin(output)
    specs = parse_tiers(options.tiers or "none")
    if not specs and not options.sources:
        raise UsageError("nothing to measure: name tiers with --tiers, or data sets")
    report: dict[str, dict[str, float]] = {}
    with working("tiers"):
        for spec in steps(specs, lambda spec: spec.root):
            size = min(parse_bytes(options.size, "--size"), spec.capacity)
            name = "ram" if spec.kind == "ram" else spec.root
            report[name] = measure_tier(spec.root, size, options.threads)
        for source in steps(options.sources):
            report[source] = measure_source(source, options.threads)
    rows = [
        (
            name,
            f"{format_bytes(int(each['bytes_per_s']))}/s",
            format_seconds(each["latency_s"]),
        )
        for name, each in report.items()
    ]
    table("random reads", ("of", "in samples of 100 kB", "a small read"), rows)
    if options.keep:
        kept = ""
        for name, each in report.items():
            kept = remember(name, each["latency_s"], each["bytes_per_s"])
        print(f"remembered in {kept}")
    results = Results(
        "tiers",
        settings=asdict(options),
        seeds={"offsets": 0},
        figures=[
            figure
            for name, each in report.items()
            for figure in (
                Figure("throughput", "bytes/s", (each["bytes_per_s"],), {"of": name}, "higher"),
                Figure("latency of 4 KiB", "s", (each["latency_s"],), {"of": name}, "lower"),
            )
        ],
        details=report,
        paths=(*(spec.root for spec in specs), *options.sources),
    )
    finish(output, results, start)

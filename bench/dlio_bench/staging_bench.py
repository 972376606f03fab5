"""`dlio bench staging`: staging, compared with its source's bandwidth and with cp."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import numpy as np

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.util.options import CheckedOptions, Option
from dlio.util.shared_folders import SHARED_MEMORY
from dlio.util.units import format_bytes
from dlio_bench.bench_data import bytes_below, files_below
from dlio_bench.bench_processes import descendants
from dlio_bench.emulated.emulated_mount import slow_mount, stats
from dlio_bench.file_systems import check_scratch
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.figure_collection import results_of
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.repeats import ratio, spread, turns
from dlio_bench.results.terminal import advance, expect, show_figures, working
from dlio_bench.storage_cases.page_cache import drop
from dlio_staging.pack_folder import pack

CASES = ("slow-50", "slow-200", "local", "small-files", "two-jobs", "memory")
_MIB = 1 << 20
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is staged."""

    slow_s: float = 10.0
    """Seconds of the emulated bandwidth."""
    local_bytes: int = 4 << 30
    files: int = 100_000
    file_bytes: int = 4096
    samples: int = 10_000_000
    copied: float = 1.0
    """Share of the small files that `cp -r` copies; its time is scaled up."""
    repeats: int = 3


def measure(cases: Sequence[str], sizes: Sizes, folder: str) -> dict[str, object]:
    """Run cases in a folder on the disk to be measured; files made there are removed.

    Every figure is of `dlio stage`, run as its users run it, unless it says so.
    """
    results = {}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="staging-bench-", dir=folder) as inside:
            expect(sizes.repeats)
            advance(case, 0)
            results[case] = _CASES[case](inside, sizes)
    packages = ("dlio", "numpy", "mfusepy", "xxhash")
    return {
        "benchmark": "staging",
        "sizes": asdict(sizes),
        "cases": results,
        "machine": describe_machine(packages),
    }


@dataclass(frozen=True, slots=True)
class StagingChoice(CheckedOptions):
    """The options of `dlio bench staging`."""

    cases: Annotated[
        tuple[str, ...], Option("Case to measure. Repeatable.", name="case", choices=CASES)
    ] = CASES
    folder: Annotated[
        str | None,
        Option("Folder on the disk to measure.", metavar="FOLDER", default_text="the current one"),
    ] = None
    repeats: Annotated[int, Option("Timed runs of each figure.", least=1)] = 3
    quick: Annotated[bool, Option("Stage a tenth of the data.")] = False
    copied: Annotated[
        float,
        Option("Share of the small files that `cp -r` copies; its time is scaled up.", least=0.001),
    ] = 1.0

    def sizes(self) -> Sizes:
        """Return how much is staged."""
        if self.quick:
            return Sizes(2.0, 1 << 27, 5000, 4096, 1_000_000, min(0.2, self.copied), 1)
        return Sizes(repeats=self.repeats, copied=min(1.0, self.copied))


def command(choice: StagingChoice, output: OutputOptions) -> None:
    """Measure `dlio stage`, compared with dd and cp in the same run.

    Sources are an emulated parallel file system and the local disk. Figures are shares of the
    bandwidth, small files, two jobs at once, and memory.
    """
    folder, sizes = choice.folder or os.getcwd(), choice.sizes()
    check_scratch(folder)
    start = begin(output)
    with working("staging"):
        report: dict[str, Any] = measure(choice.cases, sizes, folder)
    results = results_of(
        "staging",
        report,
        settings={**asdict(sizes), "cases": choice.cases},
        seeds={"data": 0},
        paths=(folder, SHARED_MEMORY),
    )
    show_figures("staging", results.figures, results.ratios)
    finish(output, results, start)


def _slow(folder: str, sizes: Sizes, bandwidth: int) -> dict[str, Any]:
    """From packed shards on a file system with 5 ms latency, into memory."""
    source = os.path.join(folder, "source")
    bytes_ = _make_shards(source, int(bandwidth * sizes.slow_s))
    shares, reads, rates = [], [], []
    with (
        slow_mount(source, latency_s=0.005, bandwidth=bandwidth) as mounted,
        _memory_folder(bytes_) as tier,
    ):
        for _ in range(sizes.repeats):
            advance()
            seconds = _stage(mounted, tier, bytes_)
            rates.append(bytes_ / seconds / _MIB)
            shares.append(bytes_ / seconds / bandwidth)
            reads.append(_parallel_read(mounted) / bandwidth)
    return {
        "bytes": bytes_,
        "MiB_per_s": spread(rates),
        "share_of_bandwidth": spread(shares),
        "plain_parallel_read_share": spread(reads),
    }


def _local(folder: str, sizes: Sizes) -> dict[str, Any]:
    """From packed shards on the local disk, cold, into memory and onto the same disk."""
    source = os.path.join(folder, "source")
    bytes_ = _make_shards(source, sizes.local_bytes)
    tier = os.path.join(folder, "tier")
    os.makedirs(tier)
    with _memory_folder(bytes_) as memory:
        contenders: dict[str, Callable[[], float]] = {
            "dd": lambda: _dd(source),
            "dd_direct": lambda: _dd(source, direct=True),
            "memory": lambda: _stage(source, memory, bytes_),
            "dd_copy": lambda: _dd(source, os.path.join(folder, "copy")),
            "same_disk": lambda: _stage(source, tier, bytes_),
        }
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for _, name in turns(contenders, sizes.repeats):
            advance(steps=1 / len(contenders))
            drop(files_below(source))
            rates[name].append(bytes_ / contenders[name]() / _MIB)
    return {
        "bytes": bytes_,
        **{f"{name}_MiB_per_s": spread(values) for name, values in rates.items()},
        "into_memory_over_dd_read": ratio(rates["memory"], rates["dd"]),
        "into_memory_over_direct_dd_read": ratio(rates["memory"], rates["dd_direct"]),
        "onto_disk_over_dd_copy": ratio(rates["same_disk"], rates["dd_copy"]),
    }


def _small_files(folder: str, sizes: Sizes) -> dict[str, Any]:
    """Class folders of small files, 2 ms latency, compared with cp -r into the same place."""
    source = os.path.join(folder, "source")
    classes = 100
    copied = max(1, round(classes * sizes.copied))
    _make_files(source, classes, sizes.files // classes, sizes.file_bytes)
    bytes_ = sizes.files * sizes.file_bytes
    staged: list[float] = []
    by_cp: list[float] = []
    asked: dict[str, int] = {}
    with (
        slow_mount(source, latency_s=0.002) as mounted,
        _memory_folder(4 * bytes_) as memory,
    ):
        for repeat in range(sizes.repeats):
            advance()
            before = stats(mounted)
            staged.append(_stage(mounted, memory, bytes_))
            asked = {key: count - before[key] for key, count in stats(mounted).items()}
            if repeat and copied == classes:
                by_cp.append(by_cp[0])  # A quarter of an hour: once.
                continue
            started = time.perf_counter()
            for k in range(copied):
                name = f"class{k:03d}"
                _run(["cp", "-r", os.path.join(mounted, name), os.path.join(memory, name)])
            by_cp.append((time.perf_counter() - started) * classes / copied)
            _empty(memory)
    return {
        "files": sizes.files,
        "cp_share": copied / classes,
        "stage_s": spread(staged),
        "cp_s": spread(by_cp),
        "faster_than_cp": ratio(by_cp, staged),
        "asked_of_the_source": asked,
    }


def _two_jobs(folder: str, sizes: Sizes) -> dict[str, Any]:
    """Two jobs of one node stage the same data at once: bytes read from the source in all."""
    source = os.path.join(folder, "source")
    bytes_ = _make_shards(source, int(100 * _MIB * sizes.slow_s / 10))
    shares, copies = [], []
    with (
        slow_mount(source, latency_s=0.005) as mounted,
        _memory_folder(3 * bytes_) as memory,
    ):
        for _ in range(sizes.repeats):
            advance()
            before = stats(mounted)["bytes"]
            jobs = [subprocess.Popen(_stage_argv(mounted, memory, bytes_)) for _ in range(2)]
            for job in jobs:
                if job.wait(_TIMEOUT_S):
                    raise UsageError("a job of the benchmark has failed; see above")
            shares.append((stats(mounted)["bytes"] - before) / bytes_)
            copies.append(bytes_below(memory) / bytes_)
            _empty(memory)
    return {"bytes": bytes_, "read_over_data": spread(shares), "kept_over_data": spread(copies)}


def _memory(folder: str, sizes: Sizes) -> dict[str, Any]:
    """The most memory that a staging process has, of a data set of many tiny samples."""
    source = os.path.join(folder, "source")
    with _packed(source, np.int64, (sizes.samples,), _MIB) as data:
        data[:] = np.arange(sizes.samples)
    bytes_ = bytes_below(source)
    tier = os.path.join(folder, "tier")
    os.makedirs(tier)
    peaks = []
    for _ in range(sizes.repeats):
        advance()
        peaks.append(_peak_of(_stage_argv(source, tier, 2 * bytes_)) / _MIB)
        _empty(tier)
    return {"samples": sizes.samples, "bytes": bytes_, "peak_MiB": spread(peaks)}


_CASES: Final[dict[str, Callable[[str, Sizes], dict[str, Any]]]] = {
    "slow-50": lambda folder, sizes: _slow(folder, sizes, 50 * _MIB),
    "slow-200": lambda folder, sizes: _slow(folder, sizes, 200 * _MIB),
    "local": _local,
    "small-files": _small_files,
    "two-jobs": _two_jobs,
    "memory": _memory,
}


def _make_shards(folder: str, size: int) -> int:
    """Pack samples of random bytes, 110 kB each as ImageNet's; return the bytes of the shards."""
    count = max(8, size // 110_000)
    generator = np.random.default_rng(0)
    with _packed(folder, np.uint8, (count, 110_000), 256 * _MIB) as data:
        for start in range(0, count, 256):
            part = data[start : start + 256]
            part[:] = np.frombuffer(generator.bytes(part.nbytes), np.uint8).reshape(part.shape)
    return bytes_below(folder)


@contextmanager
def _packed(folder: str, kind: type, shape: tuple[int, ...], shard_bytes: int) -> Iterator[Any]:
    """An array to fill, which is packed into a folder afterwards."""
    path = f"{folder}.npy"
    data = np.lib.format.open_memmap(path, "w+", kind, shape)
    yield data
    data.flush()
    pack(path, folder, order="source", compress="none", shard_bytes=shard_bytes)
    os.unlink(path)


def _make_files(folder: str, classes: int, each: int, size: int) -> None:
    block = os.urandom(1 << 20)
    for c in range(classes):
        inside = os.path.join(folder, f"class{c:03d}")
        os.makedirs(inside)
        for k in range(each):
            at = (c * each + k) * 37 % ((1 << 20) - size)
            with open(os.path.join(inside, f"{k:05d}.jpg"), "wb") as file:
                file.write(block[at : at + size])


def _stage_argv(source: str, tier: str, size: int) -> list[str]:
    room = size + size // 4 + (64 << 20)
    return [sys.executable, "-m", "dlio.cli", "stage", source, "--tiers", f"{tier}:{room}B"]


def _stage(source: str, tier: str, size: int) -> float:
    """Seconds of a staging, its process's start included; the tier is emptied afterwards."""
    started = time.perf_counter()
    _run(_stage_argv(source, tier, 2 * size))
    seconds = time.perf_counter() - started
    _empty(tier)
    return seconds


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise UsageError(f"{' '.join(argv[:6])} ended with {done.returncode}: {done.stderr[-500:]}")


def _dd(folder: str, copy: str | None = None, direct: bool = False) -> float:
    """Seconds that dd takes to read all files, past the page cache if `direct`, as fio commonly
    does, or to write them into `copy` and to the disk."""
    started = time.perf_counter()
    for name in sorted(os.listdir(folder)):
        out = ["of=/dev/null"] if copy is None else [f"of={copy}", "conv=fsync"]
        size = ["bs=8M", "iflag=direct"] if direct else ["bs=1M"]
        _run(["dd", f"if={os.path.join(folder, name)}", *out, *size])
    seconds = time.perf_counter() - started
    if copy is not None:
        os.unlink(copy)
    return seconds


def _parallel_read(folder: str) -> float:
    """Bytes a second of 32 threads that read stretches of 1 MiB, and do nothing else."""
    with ExitStack() as stack:
        parts = []
        for name in sorted(os.listdir(folder)):
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            stack.callback(os.close, descriptor)
            parts += [(descriptor, at) for at in range(0, os.fstat(descriptor).st_size, _MIB)]
        started = time.perf_counter()
        with ThreadPoolExecutor(32) as pool:
            total = sum(pool.map(lambda part: len(os.pread(part[0], _MIB, part[1])), parts))
        return total / (time.perf_counter() - started)


@contextmanager
def _memory_folder(size: int) -> Iterator[str]:
    """A folder in memory, to which writing costs no disk access."""
    room = os.statvfs(SHARED_MEMORY)
    if room.f_bavail * room.f_frsize < 2 * size:
        raise UsageError(
            f"{SHARED_MEMORY} has no room for {format_bytes(2 * size)}: run with --quick"
        )
    with tempfile.TemporaryDirectory(prefix="staging-bench-", dir=SHARED_MEMORY) as folder:
        yield folder


def _empty(folder: str) -> None:
    for name in os.listdir(folder):
        shutil.rmtree(os.path.join(folder, name))


def _peak_of(argv: Sequence[str]) -> int:
    """The largest VmHWM of a command's processes: all its memory, mapped files included."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: so that none is lost from sight.
    peak = 0
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as job:
        while job.poll() is None:
            for pid in descendants(job.pid):
                peak = max(peak, _high_water(pid))
            time.sleep(0.01)
        if job.returncode:
            raise UsageError("the staging of the benchmark has failed; see above")
    return peak


def _high_water(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            match = re.search(r"VmHWM:\s+(\d+) kB", file.read())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0

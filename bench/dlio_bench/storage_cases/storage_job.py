"""A measurement on all ranks: data, emulated storage, loaders in turn, and what they did."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.comm.comm_protocol import Communicator
from dlio.comm.job_nodes import JobNodes, find_nodes
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.units import counted
from dlio_bench.bench_processes import cpu_s, pss, tree
from dlio_bench.emulated.emulated_mount import Emulation
from dlio_bench.results.repeats import turns
from dlio_bench.results.terminal import advance, steps, working
from dlio_bench.storage_cases.claim import claimed
from dlio_bench.storage_cases.generate import GeneratedData, generate
from dlio_bench.storage_cases.generate.content import payload
from dlio_bench.storage_cases.generate.stamp import digest_of
from dlio_bench.storage_cases.latencies import Latencies
from dlio_bench.storage_cases.page_cache import drop, residency
from dlio_bench.storage_cases.rank_loaders import (
    THREADS,
    FactoryLoader,
    LoaderShare,
    RankLoader,
    StorageDlioLoader,
    TorchLoader,
    bare_rate,
    digest,
)
from dlio_bench.storage_cases.served_bytes import Meter, ServedBytes
from dlio_bench.storage_cases.storage_options import StorageCase
from dlio_bench.storage_cases.utilisation import Accelerator, StepTimes
from dlio_bench.storage_cases.workload import Workload

Digests = npt.NDArray[np.int64]
"""Digest of each sample; shape (samples,). Empty if samples are not compared."""


@dataclass(frozen=True, slots=True)
class StorageRankEpoch:
    """One rank's epoch."""

    steps: StepTimes
    served: ServedBytes
    wanted_bytes: int
    """Bytes of samples that had to come from the files, and not from a tier."""
    request_kind: str
    requests: Latencies
    ended_s: list[float]
    """Seconds from the beginning of the epoch to the arrival of each batch."""
    resident_before: float | None
    """Share of the files' pages that were in the page cache; None where this rank did not look."""
    notes: Sequence[str]
    """Sentences on caches that could not be dropped."""

    def to_json(self) -> Mapping[str, object]:
        """Return it as JSON values, for rank 0."""
        return {**asdict(self), "requests": self.requests.to_json()}


@dataclass(frozen=True, slots=True)
class LoaderRun:
    """One repeat of a loader, of all ranks."""

    loader: str
    repeat: int
    ranks: Sequence[Mapping[str, Any]]
    """By rank: `epochs` (see `StorageRankEpoch.to_json`), `cpu_s`, `memory_bytes`, `processes`."""
    steps: int
    left_out: int


@dataclass(frozen=True)
class Runner:
    """Runs epochs of any loader on this rank."""

    comm: Communicator
    place: LoaderShare
    """The data and this rank's share."""
    digests: Digests
    """Of all samples, for comparison while the accelerator computes."""
    first_of_node: bool
    """True on the rank that drops the page cache of its machine."""
    cache: str
    """`drop`, `drop-all` or `keep` the page cache before each epoch."""
    files: tuple[str, ...]
    """The data's files as they lie on the disk, whose pages are dropped."""

    @cached_property
    def meter(self) -> Meter:
        """Counters of what is read."""
        return Meter(self.place.generated.files[0])

    def run(self, name: str, repeat: int) -> LoaderRun:
        """Run a repeat of a loader. Collective."""
        workload = self.place.workload
        accelerator = Accelerator(
            workload.step_s, workload.step_s_stdev, workload.seed + 1000 * self.comm.rank + repeat
        )
        account = _ResourceAccount()
        with closing(_MADE.get(name, partial(FactoryLoader, name))(self.place)) as contender:
            total = contender.steps * workload.epochs
            with working(f"{name}, repeat {repeat + 1}", total, shown=self.comm.rank == 0):
                epochs = [
                    self.epoch(contender, accelerator, number, name, account.look).to_json()
                    for number in range(workload.epochs)
                ]
        mine = {"epochs": epochs, **account.taken()}
        ranks = self.comm.allgather(mine)
        return LoaderRun(name, repeat, ranks, contender.steps, contender.left_out)

    def epoch(
        self,
        contender: RankLoader,
        accelerator: Accelerator,
        number: int,
        name: str,
        halfway: Callable[[], object] = lambda: None,
    ) -> StorageRankEpoch:
        """Run an epoch of a number from 0. Collective.

        `halfway` is called while the accelerator computes on the batch in the middle of the epoch.

        Raises CorruptBlock for a sample with other bytes, SourceError for samples that are given
        twice or not at all.
        """
        before = None
        if self.first_of_node and self.cache == "keep":
            before = residency(self.files)
        elif self.first_of_node:
            before = drop(self.files, everything=self.cache == "drop-all")
        counts = np.zeros(self.place.workload.samples, np.int64)
        loads, computed, arrivals = [], [], []
        self.comm.barrier()
        served = self.meter.snapshot()
        began = time.perf_counter()
        batches = contender.batches(number)
        asked = began
        for step in range(contender.steps):
            batch = next(batches, None)
            came = time.perf_counter()
            if batch is None:
                raise SourceError(
                    f"{name}: gave {step} of the {counted(contender.steps, 'batch')} of an epoch: "
                    "it loses samples, or its batches are larger than asked for"
                )
            loads.append(came - asked)
            arrivals.append(came - began)

            def host(batch: object = batch, middle: bool = step == contender.steps // 2) -> None:
                self._take(batch, contender, counts, name)
                if middle:
                    halfway()

            computed.append(accelerator.compute(host))
            self.comm.barrier()
            advance()
            asked = time.perf_counter()
        next(batches, None)
        seconds = time.perf_counter() - began
        served = self.meter.snapshot() - served
        passed = contender.passed()
        own = int(self.place.generated.sizes[counts > 0].sum())
        self._compare(counts, contender, name)
        return StorageRankEpoch(
            steps=StepTimes(
                loads,
                [busy_s for busy_s, _ in computed],
                [over_s for _, over_s in computed],
                seconds,
                self.place.workload.batch_size,
            ),
            served=served,
            wanted_bytes=own if passed.source_bytes is None else passed.source_bytes,
            request_kind=passed.request_kind,
            requests=Latencies(passed.request_s),
            ended_s=arrivals,
            resident_before=before.share if before else None,
            notes=before.notes if before else (),
        )

    def _take(
        self, batch: object, contender: RankLoader, counts: npt.NDArray[np.int64], name: str
    ) -> None:
        """Compare a batch's samples with those that were generated, and count them."""
        numbers, data = contender.received(batch)
        size = self.place.workload.batch_size
        if len(numbers) != size or len(data) != size:
            raise SourceError(
                f"{name}: a batch of {counted(len(numbers), 'sample')} in place of {size}"
            )
        for number, sample in zip(numbers, data, strict=True):
            counts[number] += 1
            if len(self.digests) and digest(self.place.workload, sample) != self.digests[number]:
                raise CorruptBlock(
                    f"{name}: sample {number} is not the one that was generated: the loader mixed "
                    "samples up, or the files have changed (remove them to generate them again)"
                )

    def _compare(self, counts: npt.NDArray[np.int64], contender: RankLoader, name: str) -> None:
        """Verify that all ranks together had as many samples as they should, each once."""
        workload = self.place.workload
        self.comm.wait([self.comm.iallreduce(counts)], "the numbers of samples")
        wanted = contender.steps * workload.batch_size * self.place.ranks
        if counts.max() > 1 or counts.sum() != wanted:
            raise SourceError(
                f"{name}: an epoch had {counted(int(counts.sum()), 'sample')}, "
                f"{int((counts > 1).sum()):,} of them more than once; {wanted:,} different ones "
                "were asked for"
            )


# All loaders in turn


_MADE: Final[dict[str, Callable[[LoaderShare], RankLoader]]] = {
    "torch": TorchLoader,
    "dlio": StorageDlioLoader,
}
"""Loaders by name; others are functions of users."""
_COMPARED_BYTES: Final = 8 << 30
"""Data sets up to this size are compared byte by byte: making the digests takes a while."""


@dataclass(frozen=True, slots=True)
class StorageMeasurements:
    """All that was measured; complete on rank 0."""

    runs: Sequence[LoaderRun]
    nodes: JobNodes
    bare: Mapping[int, float]
    """Bytes per second of bare reads by all ranks, by threads of a rank; empty if not measured."""
    data: GeneratedData
    written_files: int
    generated_s: float
    compared: bool
    """True if the samples' bytes were compared with those that were generated."""
    memory_bytes: int
    """Memory of all machines together."""
    meter: Meter
    """Judges on rank 0 whether bytes came from the page cache."""


def measure(
    case: StorageCase, workload: Workload, emulation: Emulation, comm: Communicator
) -> StorageMeasurements:
    """Generate the data of the workload that `case` asks for, and run each loader. Collective.

    Raises UsageError for options that cannot work, SourceError or CorruptBlock for a loader that
    does not give the data.
    """
    least = workload.batch_size * comm.size
    if workload.samples < least:
        raise UsageError(
            f"{counted(workload.samples, 'sample')}: an epoch has less than a batch of "
            f"{workload.batch_size} for each of {counted(comm.size, 'rank')}: give at least "
            f"{least} (--files, --samples-per-file), or a smaller --batch-size"
        )
    nodes = find_nodes(comm)
    emulation.check_possible(len(nodes.names))
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # The workload says how many workers there are.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        own = stack.enter_context(_generated(case, workload, comm))
        mounted = stack.enter_context(emulation.mounted(case.path, comm, writable=False))
        read = _moved(own, case.path, mounted)
        place = LoaderShare(read, comm.rank, comm.size, case.tiers)
        compared = own.data_bytes <= _COMPARED_BYTES
        digests = _digests(own, comm) if compared else np.empty(0, np.int64)
        first = nodes.node_of.tolist().index(nodes.here) == comm.rank
        runner = Runner(comm, place, digests, first, case.cache, own.files)
        bare = {}
        if case.bare_seconds:
            bare = _bare(case.bare_seconds, place, comm, own.files if first else ())
        order = turns(case.names(), case.repeats)
        runs = [runner.run(name, repeat) for repeat, name in order]
        written = sum(comm.allgather(own.written_files))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if first else 0
        return StorageMeasurements(
            runs=runs,
            nodes=nodes,
            bare=bare,
            data=own,
            written_files=written,
            generated_s=max(comm.allgather(own.seconds)),
            compared=compared,
            memory_bytes=sum(comm.allgather(memory)),
            meter=runner.meter,
        )


class _ResourceAccount:
    """Use of the machine by this process and all below it; memory is that of the moments of `look`.

    Memory is not watched all the time: while the system adds up the pages of a process, none of its
    threads can have new memory.
    """

    def __init__(self) -> None:
        self._memory_before, self._cpu_s, _ = _used()
        self._memory, self._processes = 0, 1

    def look(self) -> None:
        """Look at the memory; takes milliseconds per GiB."""
        memory, _, processes = _used()
        self._memory = max(self._memory, memory)
        self._processes = max(self._processes, processes)

    def taken(self) -> dict[str, float]:
        """Return seconds on processors, and the largest memory, beyond that of the beginning, and
        number of processes that were seen."""
        self.look()
        return {
            "cpu_s": _used()[1] - self._cpu_s,
            "memory_bytes": max(0, self._memory - self._memory_before),
            "processes": self._processes,
        }


def _used() -> tuple[int, float, int]:
    """Return (bytes of memory, seconds on processors, number of processes)."""
    pids = tree(os.getpid())
    return 1024 * sum(map(pss, pids)), sum(map(cpu_s, pids)), len(pids)


def data_folder(path: str, workload: Workload) -> str:
    """Return the folder below `path` that holds the data of a workload."""
    return os.path.join(path, f"dlio-bench-{workload.name}-{digest_of(workload)[:8]}")


@contextmanager
def _generated(
    case: StorageCase, workload: Workload, comm: Communicator
) -> Iterator[GeneratedData]:
    """The workload's data; removed at the end if this run made it and it is not to be kept."""
    folder = data_folder(case.path, workload)
    with claimed(folder, case.keep) if comm.rank == 0 else nullcontext():
        yield generate(workload, folder, rank=comm.rank, ranks=comm.size, barrier=comm.barrier)


def _moved(generated: GeneratedData, path: str, mounted: str) -> GeneratedData:
    """Return the data set as it is seen below another folder."""
    if mounted == path:
        return generated

    def moved(place: str) -> str:
        return os.path.join(mounted, os.path.relpath(place, path))

    files = tuple(moved(each) for each in generated.files)
    return replace(generated, source=moved(generated.source), files=files)


def _digests(generated: GeneratedData, comm: Communicator) -> Digests:
    """Return the digest of each sample; the ranks share the work."""
    workload = generated.workload
    digests = np.zeros(workload.samples, np.int64)
    mine = range(comm.rank, workload.samples, comm.size)
    with working("digests of the samples", len(mine), shown=comm.rank == 0):
        for sample in mine:
            data = payload(workload, sample, int(generated.sizes[sample]))
            digests[sample] = digest(workload, data)
            advance()
    comm.wait([comm.iallreduce(digests)], "the digests of the samples")
    return digests


def _bare(
    seconds: float, place: LoaderShare, comm: Communicator, files: Sequence[str]
) -> dict[int, float]:
    """Return the bytes per second of bare reads by all ranks together, by threads of a rank."""
    rates: dict[int, float] = {}
    with working("bare parallel reads", shown=comm.rank == 0):
        for threads in steps(THREADS, "{} threads".format):
            if files:
                drop(files)
            rates[threads] = sum(comm.allgather(bare_rate(place, threads, seconds, comm.barrier)))
    return rates

"""One rank's epochs of a loader: batches are taken, computed on, and compared with the data."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from dlio.comm.comm_protocol import Communicator
from dlio.errors import CorruptBlock, SourceError
from dlio_bench.storage_cases.contenders.rank_loader import LoaderShare, RankLoader, digest
from dlio_bench.storage_cases.latencies import Latencies
from dlio_bench.storage_cases.page_cache import PageDrop, drop, resident
from dlio_bench.storage_cases.served_bytes import Meter, ServedBytes
from dlio_bench.storage_cases.utilisation import Accelerator, StepTimes

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
    dropped: PageDrop | None

    def to_json(self) -> Mapping[str, object]:
        """Return it as JSON values, for rank 0."""
        return {**asdict(self), "requests": self.requests.to_json()}


class Runner:
    """Runs epochs of any loader on this rank.

    Args:
        place: the data and this rank's share.
        digests: of all samples, for comparison while the accelerator computes.
        first_of_node: True on the rank that drops the page cache of its machine.
        cache: `drop`, `drop-all` or `keep` the page cache before each epoch.
        files: the data's files as they lie on the disk, whose pages are dropped.
    """

    def __init__(
        self,
        comm: Communicator,
        place: LoaderShare,
        digests: Digests,
        first_of_node: bool,
        cache: str,
        files: tuple[str, ...],
    ) -> None:
        self._comm, self._place, self._digests = comm, place, digests
        self._first_of_node, self._cache, self._files = first_of_node, cache, files
        self.meter = Meter(place.generated.files[0])

    def epoch(
        self,
        contender: RankLoader,
        accelerator: Accelerator,
        number: int,
        name: str,
        after_step: Callable[[int], object] = lambda _: None,
        halfway: Callable[[], object] = lambda: None,
    ) -> StorageRankEpoch:
        """Run an epoch. Collective.

        Args:
            number: of the epoch, from 0.
            name: of the loader, in errors.
            after_step: called with the number of steps that are done.
            halfway: called while the accelerator computes on the batch in the middle of the epoch.

        Raises CorruptBlock for a sample with other bytes, SourceError for samples that are given
        twice or not at all.
        """
        dropped, before = None, None
        if self._first_of_node:
            if self._cache != "keep":
                dropped = drop(self._files, everything=self._cache == "drop-all")
            before = dropped.resident_share if dropped is not None else resident(self._files)
        counts = np.zeros(self._place.workload.samples, np.int64)
        loads, computed, arrivals = [], [], []
        self._comm.barrier()
        served = self.meter.snapshot()
        began = time.perf_counter()
        batches = contender.batches(number)
        asked = began
        for step in range(contender.steps):
            batch = next(batches, None)
            came = time.perf_counter()
            if batch is None:
                raise SourceError(
                    f"{name}: gave {step} of the {contender.steps} batches of an epoch: it loses "
                    "samples, or its batches are larger than asked for"
                )
            loads.append(came - asked)
            arrivals.append(came - began)

            def host(batch: object = batch, middle: bool = step == contender.steps // 2) -> None:
                self._take(batch, contender, counts, name)
                if middle:
                    halfway()

            computed.append(accelerator.compute(host))
            self._comm.barrier()
            after_step(step + 1)
            asked = time.perf_counter()
        next(batches, None)
        seconds = time.perf_counter() - began
        served = self.meter.snapshot() - served
        passed = contender.passed()
        own = int(self._place.generated.sizes[counts > 0].sum())
        self._compare(counts, contender, name)
        return StorageRankEpoch(
            steps=StepTimes(
                loads,
                [each.busy_s for each in computed],
                [each.over_s for each in computed],
                seconds,
                self._place.workload.batch_size,
            ),
            served=served,
            wanted_bytes=own if passed.source_bytes is None else passed.source_bytes,
            request_kind=passed.request_kind,
            requests=Latencies(passed.request_s),
            ended_s=arrivals,
            resident_before=before,
            dropped=dropped,
        )

    def _take(
        self, batch: object, contender: RankLoader, counts: npt.NDArray[np.int64], name: str
    ) -> None:
        """Compare a batch's samples with those that were generated, and count them."""
        numbers, data = contender.received(batch)
        size = self._place.workload.batch_size
        if len(numbers) != size or len(data) != size:
            raise SourceError(f"{name}: a batch of {len(numbers)} samples in place of {size}")
        for number, sample in zip(numbers, data, strict=True):
            counts[number] += 1
            if len(self._digests) and digest(self._place.workload, sample) != self._digests[number]:
                raise CorruptBlock(
                    f"{name}: sample {number} is not the one that was generated: the loader mixed "
                    "samples up, or the files have changed (remove them to generate them again)"
                )

    def _compare(self, counts: npt.NDArray[np.int64], contender: RankLoader, name: str) -> None:
        """Verify that all ranks together had as many samples as they should, each once."""
        workload = self._place.workload
        self._comm.wait([self._comm.iallreduce(counts)], "the numbers of samples")
        wanted = contender.steps * workload.batch_size * self._place.ranks
        if counts.max() > 1 or counts.sum() != wanted:
            raise SourceError(
                f"{name}: an epoch had {int(counts.sum()):,} samples, {int((counts > 1).sum()):,} "
                f"of them more than once; {wanted:,} different ones were asked for"
            )

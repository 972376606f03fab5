"""torch's DataLoader with worker processes, as a user of torch writes it."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data

from dlio.errors import UsageError
from dlio_bench.storage_cases.contenders.rank_loader import LoaderShare, PassCounts, Received
from dlio_bench.storage_cases.contenders.sample_formats import (
    IndexedSamples,
    SequentialSamples,
    Timed,
    is_sequential,
)

_Batch = tuple[list[int], Any, list[float]]
"""Numbers of the samples, their bytes, seconds of each."""


class _RankSampler(torch.utils.data.Sampler[int]):
    """A rank's samples of an epoch: every rank-th of a permutation, whole batches only."""

    def __init__(self, place: LoaderShare, steps: int) -> None:
        self._place, self._steps = place, steps
        self.epoch = 0

    def __len__(self) -> int:
        return self._steps * self._place.workload.batch_size

    def __iter__(self) -> Iterator[int]:
        workload = self._place.workload
        order = np.arange(workload.samples)
        if workload.shuffle:
            np.random.default_rng((workload.seed, self.epoch)).shuffle(order)
        mine = order[self._place.rank :: self._place.ranks]
        yield from mine[: len(self)].tolist()


class TorchLoader:
    """torch's DataLoader; workers live on from epoch to epoch where samples have numbers."""

    def __init__(self, place: LoaderShare) -> None:
        self._place = place
        self._workers = place.workload.workers
        self._request_s: list[float] = []
        workload = place.workload
        each = workload.batch_size * place.ranks
        self._loader: Any = None
        self.left_out = 0
        if is_sequential(workload.format):
            if workload.files < place.ranks:
                raise UsageError(
                    f"{workload.format} is read file by file: {place.ranks} ranks need at least "
                    f"as many files, and there are {workload.files} (--files)"
                )
            self.steps = self._sequential_steps()
            self.left_out = (workload.samples // each - self.steps) * each
        else:
            self.steps = workload.samples // each
            self._sampler = _RankSampler(place, self.steps)
            self._loader = self._loader_of(IndexedSamples(place), sampler=self._sampler)

    def batches(self, epoch: int) -> Iterator[object]:
        self._request_s = []
        if self._loader is not None:
            self._sampler.epoch = epoch
            return iter(self._loader)
        return iter(self._loader_of(SequentialSamples(self._place, epoch, self._workers)))

    def received(self, batch: object) -> Received:
        numbers, data, seconds = cast(_Batch, batch)
        self._request_s += seconds
        return numbers, data

    def passed(self) -> PassCounts:
        return PassCounts(self._request_s)

    def close(self) -> None:
        # Its workers end with its iterator.
        self._loader = None

    def _loader_of(self, data: Any, **options: Any) -> Any:
        return torch.utils.data.DataLoader(
            data,
            self._place.workload.batch_size,
            num_workers=self._workers,
            persistent_workers=self._workers > 0 and "sampler" in options,
            drop_last=True,
            collate_fn=_collate,
            multiprocessing_context="fork" if self._workers else None,
            **options,
        )

    def _sequential_steps(self) -> int:
        """Return the steps that every rank has: each worker fills batches of its own files."""
        workload = self._place.workload
        least = workload.samples
        for rank in range(self._place.ranks):
            place = LoaderShare(self._place.generated, rank, self._place.ranks)
            data = SequentialSamples(place, 0, self._workers)
            counts = [len(data.files_of(k)) for k in range(max(1, self._workers))]
            per_file, batch = workload.samples_per_file, workload.batch_size
            least = min(least, sum(count * per_file // batch for count in counts))
        return least


def _collate(samples: Sequence[Timed]) -> _Batch:
    """Stack samples of one size; a list of tensors otherwise."""
    numbers, data, seconds = zip(*samples, strict=True)
    alike = len({each.shape for each in data}) == 1
    joined = torch.utils.data.default_collate(list(data)) if alike else list(data)
    return list(numbers), joined, list(seconds)

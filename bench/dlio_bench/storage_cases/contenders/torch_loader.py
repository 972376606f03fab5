"""torch's DataLoader with worker processes, as a user of torch writes it."""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
import torch.utils.data

import dlio
from dlio.data.requests import observed_requests
from dlio.errors import SourceError, UsageError
from dlio.util.threads import Workers
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

    def __init__(self, place: LoaderShare) -> None:
        self._place = place
        self.epoch = 0

    def __len__(self) -> int:
        return self._place.steps * self._place.workload.batch_size

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
        self._loader: Any = None
        self.steps, self.left_out = place.steps, 0
        if is_sequential(workload.format):
            if workload.files < place.ranks:
                raise UsageError(
                    f"{workload.format} is read file by file: {place.ranks} ranks need at least "
                    f"as many files, and there are {workload.files} (--files)"
                )
            self.steps = self._sequential_steps()
            self.left_out = (place.steps - self.steps) * workload.batch_size * place.ranks
        else:
            self._sampler = _RankSampler(place)
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
        per_file, batch = self._place.workload.samples_per_file, self._place.workload.batch_size

        def steps_of(rank: int) -> int:
            data = SequentialSamples(replace(self._place, rank=rank), 0, self._workers)
            workers = range(max(1, self._workers))
            return sum(len(data.files_of(k)) * per_file // batch for k in workers)

        return min(map(steps_of, range(self._place.ranks)))


def _collate(samples: Sequence[Timed]) -> _Batch:
    """Stack samples of one size; a list of tensors otherwise."""
    numbers, data, seconds = zip(*samples, strict=True)
    alike = len({each.shape for each in data}) == 1
    joined = torch.utils.data.default_collate(list(data)) if alike else list(data)
    return list(numbers), joined, list(seconds)


# Parallel reads of a data set's files without a loader: the most that the storage gives


THREADS: Final = (1, 4, 16, 64)
"""Numbers of threads per rank that are tried."""
_PIECE: Final = 1 << 20


def bare_rate(
    place: LoaderShare, threads: int, seconds: float, barrier: Callable[[], object]
) -> float:
    """Return the bytes per second at which this rank's threads read its share of the files.

    Files are read in pieces of 1 MiB, from a rank's own files, in order. Each piece opens its
    file, as loaders do that cannot keep millions open.

    Args:
        threads: reads at a time.
        seconds: time after which no further piece begins.
        barrier: called before the first read; returns when all ranks have called it.
    """
    files = place.generated.files[place.rank :: place.ranks]
    pieces = [
        (path, offset) for path in files for offset in range(0, os.stat(path).st_size, _PIECE)
    ]
    barrier()
    began = time.perf_counter()
    counts = [0] * threads
    errors: list[OSError] = []

    def read(worker: int) -> None:
        try:
            for path, offset in pieces[worker::threads]:
                if time.perf_counter() - began > seconds or errors:
                    return
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    counts[worker] += len(os.pread(descriptor, _PIECE, offset))
                finally:
                    os.close(descriptor)
        except OSError as error:
            errors.append(error)

    with Workers("dlio-bench-bare", read, threads) as running:
        running.wait()
    if errors:
        raise SourceError(f"{errors[0].filename}: {errors[0].strerror}") from errors[0]
    return sum(counts) / (time.perf_counter() - began)


# A loader of the user's own, or of another library, named as `module:function`


class FactoryLoader:
    """A loader that a function makes."""

    def __init__(self, name: str, place: LoaderShare) -> None:
        """Raises UsageError if the function cannot be imported."""
        module, _, attribute = name.partition(":")
        try:
            make: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"--loaders {name}: {error}; name a function as module:function, in a folder of "
                "PYTHONPATH"
            ) from error
        workload = place.workload
        self.steps, self.left_out = place.steps, 0
        self._batches = make(
            files=list(place.generated.files),
            samples_per_file=workload.samples_per_file,
            batch_size=workload.batch_size,
            rank=place.rank,
            ranks=place.ranks,
            workers=workload.workers,
            seed=workload.seed,
        )

    def batches(self, epoch: int) -> Iterator[object]:
        return iter(self._batches(epoch))

    def received(self, batch: object) -> Received:
        numbers, data = cast(Received, batch)
        return [int(number) for number in numbers], data

    def passed(self) -> PassCounts:
        return PassCounts()

    def close(self) -> None:
        if callable(close := getattr(self._batches, "close", None)):
            close()


# dlio.DataLoader


class StorageDlioLoader:
    """dlio's loader over `dlio.open`, with tiers."""

    def __init__(self, place: LoaderShare) -> None:
        workload, generated = place.workload, place.generated
        self._field = generated.field
        self.steps, self.left_out = place.steps, 0
        # Samples of one size are stacked, as the other loaders do it.
        alike = bool((generated.sizes == generated.sizes[0]).all())
        with ExitStack() as stack:
            self._data = stack.enter_context(
                dlio.open(
                    generated.source,
                    tiers=place.tiers,
                    image_size=None,
                    seed=workload.seed,
                    **generated.options,
                )
            )
            self._loader = stack.enter_context(
                dlio.DataLoader(
                    self._data,
                    workload.batch_size,
                    shuffle=workload.shuffle,
                    num_workers=workload.workers,
                    drop_last=True,
                    collate_fn=None if alike else list,
                    persistent_workers=True,
                )
            )
            self._request_s = stack.enter_context(observed_requests())
            self._stack = stack.pop_all()

    def batches(self, epoch: int) -> Iterator[object]:
        self._request_s.clear()
        self._loader.set_epoch(epoch)
        return iter(self._loader)

    def received(self, batch: object) -> Received:
        numbers = [int(number) for number in self._loader.last_samples]
        if isinstance(batch, list):
            return numbers, [each[self._field] for each in batch]
        stacked = cast(Mapping[str, torch.Tensor | list[bytes]], batch)[self._field]
        return numbers, list(stacked)

    def passed(self) -> PassCounts:
        counts = self._loader.stats().get("bytes", {})
        return PassCounts(list(self._request_s), counts.get("source"), "request")

    def close(self) -> None:
        self._stack.close()

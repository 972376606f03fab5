"""A loader of the user's own, or of another library, named as `module:function`.

    def make(files, samples_per_file, batch_size, rank, ranks, workers, seed):
        ...  # called once on each rank
        return batches  # called with the number of each epoch: an iterable of (numbers, samples)

`numbers` are the numbers of the samples, file by file; `samples` their bytes, as bytes, arrays or
tensors. The benchmark compares the bytes with those that were generated.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from dlio.errors import UsageError
from dlio_bench.storage_cases.contenders.rank_loader import LoaderShare, PassCounts, Received


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
        self.steps = workload.samples // (workload.batch_size * place.ranks)
        self.left_out = 0
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

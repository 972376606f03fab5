"""dlio.DataLoader."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import cast

import torch

import dlio
from dlio.data.requests import observed_requests
from dlio_bench.storage_cases.contenders.rank_loader import LoaderShare, PassCounts, Received


class StorageDlioLoader:
    """dlio's loader over `dlio.open`, with tiers."""

    def __init__(self, place: LoaderShare) -> None:
        workload, generated = place.workload, place.generated
        self._field = generated.field
        self.steps = workload.samples // (workload.batch_size * place.ranks)
        self.left_out = 0
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

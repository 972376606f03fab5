"""Batches without samples, for ranks that an epoch's last, small global batch does not reach."""

from dataclasses import dataclass

from dlio.loader.contract import BatchData, CollateFn, Sample, UserDataset
from dlio.loader.nested_batches import emptied


@dataclass(frozen=True, slots=True)
class EmptyBatchCollate:
    """A collate_fn that also collates an empty list: it collates sample 0 and drops it again."""

    collate: CollateFn
    dataset: UserDataset

    def __call__(self, samples: list[Sample]) -> BatchData:
        if len(samples):
            return self.collate(samples)
        return emptied(self.collate([self.dataset[0]]))

"""The number of samples in a batch, whatever dimension they have."""

import torch

from dlio.integrations.batch_size import BatchSize


def test_samples_are_counted_where_the_loader_puts_them() -> None:
    by_time, flat = BatchSize(), BatchSize()
    assert by_time.of({"tokens": torch.zeros(30, 8), "labels": torch.zeros(8)}, 8) == 8
    assert by_time.of({"tokens": torch.zeros(24, 3), "labels": torch.zeros(3)}, 8) == 3
    assert flat.of([torch.zeros(()), torch.zeros(8, 30)], 8) == 8
    assert flat.of([torch.zeros(()), torch.zeros(5, 30)], 8) == 5
    assert flat.of([torch.zeros(4)], None) == 4
    assert flat.of("no tensor", 8) == 1

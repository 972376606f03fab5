"""The least data of a workload, by numbers made by hand from MLPerf Storage's rules."""

import pytest

from dlio_bench.storage_cases.data_size import data_size
from dlio_bench.storage_cases.workload import Workload

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "ranks", "files", "said"),
    [
        # 5 x 64 GiB of files of 128 samples of 1 MiB; 500 steps of batches of 4 need fewer.
        (64 * GIB, 1, 2560, "decided by the memory"),
        # 500 x 800 x 4 samples need 12,500 files.
        (64 * GIB, 800, 12_500, "decided by the steps"),
        (1, 1, 16, "decided by the steps"),
    ],
)
def test_memory_or_steps_decide(memory: int, ranks: int, files: int, said: str) -> None:
    workload = Workload("custom", "npz", 1, 128, float(1 << 20), 0.0, 4, 0.1)
    size = data_size(workload, ranks, memory)
    assert (size.files, size.samples, size.bytes) == (files, 128 * files, files * 128 << 20)
    assert size.steps >= 500
    assert size.bytes >= 5 * memory
    assert said in size.describe()

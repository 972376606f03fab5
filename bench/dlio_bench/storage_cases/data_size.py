"""Size of the data that a workload asks for, on hosts of some memory. Pure.

As `mlpstorage training datasize` counts it: at least five times the memory of all hosts, so that
the page cache cannot hold the data, and 500 steps in an epoch. Source: MLPerf Storage,
Submission_guidelines.md (v2.0), section 7; Rules.md (v3.0), 3.1.
"""

from dataclasses import dataclass
from math import ceil

from dlio.util.units import counted, format_bytes
from dlio_bench.storage_cases.rules import MEMORY_RATIO, RULE_STEPS
from dlio_bench.storage_cases.workload import Workload


@dataclass(frozen=True, slots=True)
class DataSize:
    """The least data of a workload on some ranks."""

    workload: str
    ranks: int
    memory_bytes: int
    """Memory of all hosts together."""
    files: int
    samples: int
    bytes: int
    steps: int
    """Steps of an epoch."""
    files_by_memory: int
    files_by_steps: int

    def describe(self) -> str:
        """Return a sentence."""
        by = "the memory" if self.files_by_memory >= self.files_by_steps else "the steps"
        return (
            f"{self.workload} on {counted(self.ranks, 'rank')}, with "
            f"{format_bytes(self.memory_bytes)} of memory: {counted(self.files, 'file')}, "
            f"{counted(self.samples, 'sample')}, {format_bytes(self.bytes)}, "
            f"{counted(self.steps, 'step')} an epoch; decided by {by}: {MEMORY_RATIO} times the "
            f"memory are {counted(self.files_by_memory, 'file')}, {RULE_STEPS} steps are "
            f"{counted(self.files_by_steps, 'file')}"
        )


def data_size(workload: Workload, ranks: int, memory_bytes: int) -> DataSize:
    """Return the least data that a workload asks for on so many ranks, emulated accelerators, whose
    hosts have so much memory together."""
    file_bytes = workload.samples_per_file * workload.sample_bytes
    by_memory = ceil(MEMORY_RATIO * memory_bytes / file_bytes)
    wanted = RULE_STEPS * ranks * workload.batch_size
    by_steps = ceil(wanted / workload.samples_per_file)
    files = max(by_memory, by_steps)
    samples = files * workload.samples_per_file
    return DataSize(
        workload.name,
        ranks,
        memory_bytes,
        files,
        samples,
        round(samples * workload.sample_bytes),
        samples // (ranks * workload.batch_size),
        by_memory,
        by_steps,
    )

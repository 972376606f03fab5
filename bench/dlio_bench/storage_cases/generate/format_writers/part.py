"""The samples of one file of a workload."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio_bench.storage_cases.generate.content import payload
from dlio_bench.storage_cases.workload import Workload


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file to write: its samples, and their workload."""

    workload: Workload
    number: int
    """Number of the file."""
    label: int
    """Label of its samples."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each of its samples."""
    first: int
    """Number of its first sample."""

    def payloads(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the bytes of each sample, in order."""
        for row, size in enumerate(self.sizes.tolist()):
            yield payload(self.workload, self.first + row, size)

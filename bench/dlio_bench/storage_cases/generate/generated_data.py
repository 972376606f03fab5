"""A data set that was generated: its files, and the bytes that each sample must have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock
from dlio_bench.storage_cases.generate.content import payload
from dlio_bench.storage_cases.workload import Workload


@dataclass(frozen=True, slots=True)
class GeneratedData:
    """A complete data set of a workload."""

    workload: Workload
    source: str
    """Path for `dlio.open`."""
    options: Mapping[str, Any]
    """Further arguments of `dlio.open`."""
    files: tuple[str, ...]
    """Paths of the data files; sample k lies in file k // workload.samples_per_file."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each sample, without its label and the format's own bytes; shape (samples,)."""
    file_bytes: int
    """Bytes of all files."""
    written_files: int = 0
    """Files that this call wrote; 0 if all were there."""
    seconds: float = 0.0
    """Time that writing took, until the data was on the disk."""
    field: str = "image"
    """Name of the field with the sample's bytes, as `dlio.open` gives it."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all samples."""
        if not self.workload.sample_bytes_stdev:
            return self.workload.samples * int(self.sizes[0])
        return int(self.sizes.sum())

    def check(self, sample: int, data: Buffer | npt.NDArray[np.uint8]) -> None:
        """Raise CorruptBlock unless `data` are the bytes of a sample."""
        size = int(self.sizes[sample])
        given = np.frombuffer(data, np.uint8)
        if len(given) != size or not np.array_equal(given, payload(self.workload, sample, size)):
            path = self.files[sample // self.workload.samples_per_file]
            raise CorruptBlock(
                f"{path}: sample {sample} is not the one that was generated ({len(given):,} of "
                f"{size:,} bytes): remove the folder and generate it again"
            )

"""The contract between the benchmark and a loader."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dlio_bench.storage_cases.generate import GeneratedData
from dlio_bench.storage_cases.workload import Workload

Payload: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8] | torch.Tensor
"""A sample as a loader gives it."""
Received: TypeAlias = tuple[Sequence[int], Sequence[Payload]]
"""Numbers of a batch's samples, and their bytes: tensors, arrays or bytes, one for each."""


@dataclass(frozen=True, slots=True)
class LoaderShare:
    """The data that a rank's loader reads, and its share."""

    generated: GeneratedData
    rank: int
    ranks: int
    tiers: str | None = None
    """Tiers of dlio; None for its default."""

    @property
    def workload(self) -> Workload:
        """The workload."""
        return self.generated.workload

    @property
    def steps(self) -> int:
        """Whole batches of each rank in an epoch."""
        return self.workload.samples // (self.workload.batch_size * self.ranks)


@dataclass(slots=True)
class PassCounts:
    """Counts of a loader's last pass."""

    request_s: list[float] = field(default_factory=list)
    """Seconds of the requests to storage, or of single samples where a loader has no others."""
    source_bytes: int | None = None
    """Bytes of samples that came from the files, and not from a tier; None if all did."""
    request_kind: str = "sample"
    """`request` to the file system, or `sample`: all that a sample took."""


class RankLoader:
    """A loader of one rank, made before the first epoch and used for all of them."""

    steps: int
    """Steps of an epoch: the same on all ranks."""
    left_out = 0
    """Samples of all ranks that an epoch leaves out, beyond an incomplete last batch."""

    def batches(self, epoch: int) -> Iterator[object]:
        """Begin a pass; epochs count from 0. Yields at least `steps` batches."""
        raise NotImplementedError

    def received(self, batch: object) -> Received:
        """Return the samples of a batch."""
        raise NotImplementedError

    def passed(self) -> PassCounts:
        """Return the counts of the pass that has ended."""
        return PassCounts()

    def close(self) -> None:
        """End its processes and threads."""


def body(workload: Workload, data: Payload) -> npt.NDArray[np.uint8]:
    """Return a sample's bytes without an image's header, as a flat array; a tensor of an image has
    shape (3, height, width)."""
    if isinstance(data, torch.Tensor):
        image = workload.format == "folder" and data.ndim == 3
        array = (data.permute(1, 2, 0) if image else data).contiguous().numpy()
    elif isinstance(data, bytes | bytearray | memoryview):
        array = np.frombuffer(data, np.uint8)
    else:
        array = data
    flat: npt.NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1)
    if workload.format != "folder" or bytes(flat[:3]) != b"P6\n":
        return flat
    header = bytes(flat[:64]).split(b"\n", 3)
    width, height = map(int, header[1].split())
    first = sum(len(line) + 1 for line in header[:3])
    return flat[first : first + 3 * width * height]


def digest(workload: Workload, data: Payload) -> int:
    """Return the 63-bit digest of a sample's bytes."""
    return xxhash.xxh3_64_intdigest(body(workload, data).data) >> 1
